"""The model half of a Megatron-LM command line: sizes, attention, experts. Flags as in megatron-core 0.19.2 `megatron/training/arguments.py`."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from math import gcd

from costmodel.errors import InputError
from planner.export.result import Loss
from planner.models.spec import Experts, ModelSpec
from planner.plan import Plan

Flag = tuple[str, ...]

# Fields of ModelSpec that flags carry, or that only name and describe the model. `fused`: Megatron always fuses q, k, v and gate, up.
_CARRIED = (
    "activation", "gated", "norm", "attention_bias", "output_bias", "ffn_bias", "tied", "qk_norm", "rope_dim", "experts", "latent",
    "max_sequence", "fused", "notes",
)  # fmt: skip
_ROUTERS = {"softmax": "softmax", "top_k": "softmax", "sigmoid": "sigmoid"}


def model_flags(plan: Plan, spec: ModelSpec) -> tuple[Flag, ...]:
    """Flags that build the model, one tuple (name, values...) each.

    The vocabulary keeps its size: Megatron pads it to a multiple of divisor x tp, so the divisor is the largest (up to its usual 128) that pads nothing.
    NullTokenizer and mock data stand for the user's own, so that the line validates as it is.
    """
    tp = plan.strategy.mesh.tp
    divisor = gcd(spec.vocab // tp, 128) if spec.vocab % tp == 0 else 1
    dropout = f"{plan.job.dropout:g}"
    rotates = bool(spec.rope_dim or spec.latent)
    biased = spec.ffn_bias or spec.output_bias
    flags: list[Flag] = [
        ("--num-layers", str(spec.num_layers)),
        ("--hidden-size", str(spec.hidden)),
        ("--ffn-hidden-size", str(spec.ffn)),
        ("--num-attention-heads", str(spec.heads)),
        ("--seq-length", str(plan.job.seq_len)),
        ("--max-position-embeddings", str(max(spec.max_sequence, plan.job.seq_len))),
        ("--position-embedding-type", "rope" if rotates else "learned_absolute"),
        ("--normalization", "LayerNorm" if spec.norm == "layer" else "RMSNorm"),
        ("--attention-dropout", dropout),
        ("--hidden-dropout", dropout),
        ("--tokenizer-type", "NullTokenizer"),
        ("--vocab-size", str(spec.vocab)),
        ("--make-vocab-size-divisible-by", str(divisor)),
        ("--mock-data",),
    ]
    switches = (
        ("--swiglu", spec.gated),
        ("--disable-bias-linear", not biased),
        ("--add-qkv-bias", spec.attention_bias and not biased),
        ("--qk-layernorm", bool(spec.qk_norm)),
        ("--untie-embeddings-and-output-weights", not spec.tied),
    )
    flags += [(name,) for name, on in switches if on]
    if spec.latent is None and rotates and spec.rope_dim != spec.head_dim:
        flags.append(("--rotary-percent", f"{spec.rope_dim / spec.head_dim:g}"))
    flags += _attention(spec)
    flags += _experts(spec.experts, spec.num_layers) if spec.experts else []
    return tuple(flags)


def decoder_spec(spec: ModelSpec) -> ModelSpec:
    """`spec` with what GPT-2's family implies written out. Raises InputError for models that are not decoder-only transformers."""
    if spec.encoder_layers or spec.image is not None or spec.type_vocab or spec.position_buckets:
        raise InputError(f"{spec.family} is not a decoder-only transformer", where="Plan.spec", remedy="export to torchrun")
    if spec.family == "gpt2":
        return replace(spec, gated=False, norm="layer", attention_bias=True, output_bias=True, ffn_bias=True)
    return spec


def model_losses(spec: ModelSpec) -> tuple[Loss, ...]:
    """What Megatron's flags cannot say about the model: every switch of the spec that is on and has no flag, and three that have only part of one."""
    experts = spec.experts
    switches = [item.name for item in fields(spec) if item.default is not MISSING and item.name not in _CARRIED]
    unsaid = [name for name in switches if getattr(spec, name) != _defaults(spec)[name]]
    losses = [
        Loss(field=f"spec.{name}", says=str(getattr(spec, name)), launcher_does="has no flag for it and builds without") for name in unsaid
    ]
    partly = (
        ("norm", spec.norm, spec.norm not in ("llama", "layer"), "uses RMSNorm"),
        ("activation", spec.activation, spec.gated and spec.activation != "silu", "gates with SiLU (--swiglu)"),
        ("activation", spec.activation, not spec.gated and not spec.activation.startswith("gelu"), "uses GELU"),
        ("qk_norm", spec.qk_norm, spec.qk_norm not in ("", "head"), "normalises q and k per head"),
        ("experts.step", experts and experts.step, experts is not None and experts.step > 1, "makes every layer sparse"),
        ("experts.biases", True, experts is not None and experts.biases, "has no biases in router and experts"),
    )
    return (*losses, *(Loss(field=f"spec.{name}", says=str(says), launcher_does=does) for name, says, lost, does in partly if lost))


def _defaults(spec: ModelSpec) -> dict[str, object]:
    return {item.name: item.default for item in fields(spec)}


def _attention(spec: ModelSpec) -> list[Flag]:
    latent = spec.latent
    if latent is not None:
        flags: list[Flag] = [("--multi-latent-attention",), ("--kv-lora-rank", str(latent.kv_rank))]
        if latent.q_rank:
            flags.append(("--q-lora-rank", str(latent.q_rank)))
        return [
            *flags,
            ("--qk-head-dim", str(latent.nope_dim)),
            ("--qk-pos-emb-head-dim", str(latent.rope_dim)),
            ("--v-head-dim", str(latent.v_dim)),
        ]
    flags = [("--kv-channels", str(spec.head_dim))]
    if spec.kv_heads != spec.heads:
        flags += [("--group-query-attention",), ("--num-query-groups", str(spec.kv_heads))]
    return flags


def _experts(experts: Experts, num_layers: int) -> list[Flag]:
    flags: list[Flag] = [
        ("--num-experts", str(experts.num_experts)),
        ("--expert-tensor-parallel-size", "1"),
        ("--moe-router-topk", str(experts.top_k)),
        ("--moe-router-score-function", _ROUTERS[experts.router]),
        ("--moe-ffn-hidden-size", str(experts.ffn)),
        ("--moe-token-dispatcher-type", "alltoall"),
        ("--moe-grouped-gemm",),
        ("--moe-router-load-balancing-type", "aux_loss"),
    ]
    if experts.router == "softmax":
        flags.append(("--moe-router-pre-softmax",))
    if experts.groups > 1:
        flags += [("--moe-router-num-groups", str(experts.groups)), ("--moe-router-group-topk", str(experts.top_groups))]
    if experts.shared_ffn:
        flags.append(("--moe-shared-expert-intermediate-size", str(experts.shared_ffn)))
    if experts.shared_gate:
        flags.append(("--moe-shared-expert-gate",))
    if experts.first_dense:
        flags.append(("--moe-layer-freq", f"([0]*{experts.first_dense}+[1]*{num_layers - experts.first_dense})"))
    return flags
