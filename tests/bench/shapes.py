"""A row's `model` -> a Hugging Face style configuration that `planner.models.resolve` reads. Only dimensions decide, never a model's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# GPT-2's vocabulary padded to a multiple of 128, as Megatron does: assumed where a row names none.
DEFAULT_VOCAB = 50304
Row = Mapping[str, Any]


def config_of(model: Row, arguments: Row, tp: int) -> dict[str, Any]:
    """The configuration. `arguments`: the launcher's own arguments where the row carries them. The vocabulary is padded to a multiple of `tp`."""
    hidden, heads = model["hidden"], model["heads"]
    vocab = -(-(model.get("vocab") or DEFAULT_VOCAB) // tp) * tp
    tied = model.get("tied_embeddings") is not False
    moe, mla = model.get("moe"), model.get("mla") or _latent_arguments(arguments)
    common = {
        "hidden_size": hidden, "intermediate_size": model["ffn_hidden"], "num_hidden_layers": model["layers"], "num_attention_heads": heads,
        "num_key_value_heads": model.get("kv_heads") or heads, "vocab_size": vocab, "tie_word_embeddings": tied,
        "max_position_embeddings": model["seq_len"],
    }  # fmt: skip
    if mla:
        return {**common, "model_type": "deepseek_v2", "num_key_value_heads": heads, **_latent(mla), **_latent_experts(model, moe)}
    if moe:
        return {
            **common, "model_type": "qwen3_moe", "num_experts": moe["experts"], "num_experts_per_tok": moe["top_k"],
            "moe_intermediate_size": moe.get("moe_ffn_hidden") or model["ffn_hidden"], "head_dim": model.get("head_dim") or hidden // heads,
        }  # fmt: skip
    gated = is_gated(model, arguments)
    if gated or (model.get("kv_heads") or heads) != heads:
        # The graphs have no ungated feed-forward beside grouped queries: a gated one of as many weights (and flops) stands for it.
        width = model["ffn_hidden"] if gated else max(1, round(model["ffn_hidden"] * 2 / 3 / tp)) * tp
        return {
            **common,
            "intermediate_size": width,
            "model_type": "llama",
            **({"head_dim": model["head_dim"]} if model.get("head_dim") else {}),
        }
    return {
        "model_type": "gpt2", "activation_function": "gelu", "n_embd": hidden, "n_inner": model["ffn_hidden"], "n_layer": model["layers"], "n_head": heads,
        "vocab_size": vocab, "n_positions": model["seq_len"], "tie_word_embeddings": tied,
    }  # fmt: skip


def is_gated(model: Row, arguments: Row) -> bool:
    """Whether the feed-forward has a gate: said by the row or the launcher, else by the parameter count, else by the 4 x hidden width of ungated models."""
    if arguments:
        return bool(arguments.get("swiglu"))
    hidden, ffn, vocab = model["hidden"], model["ffn_hidden"], model.get("vocab") or DEFAULT_VOCAB
    if not model.get("params_b"):
        return bool(ffn != 4 * hidden)
    embeddings = vocab * hidden * (1 if model.get("tied_embeddings") is not False else 2)
    attention = 2 * hidden * hidden * (1 + (model.get("kv_heads") or model["heads"]) / model["heads"])

    def miss(matrices: int) -> float:
        return float(abs(embeddings + model["layers"] * (attention + matrices * hidden * ffn) - model["params_b"] * 1e9))

    return miss(3) < miss(2)


def _latent(mla: Row) -> dict[str, Any]:
    """Multi-head latent attention under the names of the Hugging Face configuration: sources call the unrotated part qk_head_dim or qk_nope_head_dim."""
    return {
        "q_lora_rank": mla.get("q_lora_rank") or 0, "kv_lora_rank": mla["kv_lora_rank"], "v_head_dim": mla["v_head_dim"],
        "qk_nope_head_dim": mla.get("qk_nope_head_dim") or mla["qk_head_dim"], "qk_rope_head_dim": mla.get("qk_rope_head_dim") or 64,
    }  # fmt: skip


def _latent_arguments(arguments: Row) -> dict[str, Any] | None:
    if not arguments.get("multi-latent-attention"):
        return None
    names = {"q_lora_rank": "q-lora-rank", "kv_lora_rank": "kv-lora-rank", "qk_nope_head_dim": "qk-head-dim",
             "qk_rope_head_dim": "qk-pos-emb-head-dim", "v_head_dim": "v-head-dim"}  # fmt: skip
    # Defaults of megatron-core 0.19.2 MLATransformerConfig.
    defaults = {"q_lora_rank": 512, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return {name: int(arguments.get(key) or defaults[name]) for name, key in names.items()}


def _latent_experts(model: Row, moe: Row | None) -> dict[str, Any]:
    """The experts of a latent-attention model; one that has none is all leading dense layers."""
    if not moe:
        moe = {"experts": 1, "top_k": 1, "moe_ffn_hidden": model["ffn_hidden"], "dense_layers": model["layers"]}
    dense = moe.get("dense_layers") or moe.get("first_dense_layers") or moe.get("dense_first_layers") or 0
    shared = {"n_shared_experts": moe["shared_experts"]} if moe.get("shared_experts") else {}
    return {
        "n_routed_experts": moe["experts"], "num_experts_per_tok": moe["top_k"], "first_k_dense_replace": dense, **shared,
        "moe_intermediate_size": moe.get("moe_ffn_hidden") or model["ffn_hidden"], "topk_method": "greedy",
    }  # fmt: skip
