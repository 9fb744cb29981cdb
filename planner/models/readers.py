"""Readers: the config.json of each rotary decoder family as a ModelSpec. Defaults are those of the transformers 5.24 configuration classes."""

from __future__ import annotations

from dataclasses import replace

from planner.models import ops
from planner.models.config import Config
from planner.models.spec import Experts, LatentAttention, ModelSpec


def llama(config: Config, name: str) -> ModelSpec:
    """Llama 1 to 3.x; the base of every other rotary decoder."""
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    head_dim = config.heads(hidden, heads)
    if head_dim % 2:
        raise config.fail(
            "head_dim", f"{head_dim} features cannot rotate in pairs", "give an even head_dim, or other hidden_size and num_attention_heads"
        )
    bias = config.flag("attention_bias", default=False)
    return ModelSpec(
        name=name,
        family=str(config.values["model_type"]),
        num_layers=config.layers("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=config.kv_heads(heads),
        head_dim=head_dim,
        ffn=config.integer("intermediate_size"),
        vocab=config.integer("vocab_size"),
        activation=config.choice("hidden_act", "hidden_activation", known=ops.ACTIVATIONS, default="silu"),
        attention_bias=bias,
        output_bias=bias,
        ffn_bias=config.flag("mlp_bias", default=False),
        tied=config.flag("tie_word_embeddings", default=False),
        rope_dim=head_dim,
        attention=attention_kind(config),
    )


def attention_kind(config: Config, default: str = "flash", *, known: tuple[str, ...] = ("flash", "eager")) -> str:
    """ "flash" or "eager" from `attn_implementation`: whether the scores are kept. Raises InputError for one the family's program does not have."""
    key, value = config.find("attn_implementation", "_attn_implementation")
    kind = default if value is None else "eager" if value == "eager" else "flash"
    if kind not in known or not isinstance(value, (str, type(None))):
        raise config.fail(
            key, f"{value!r} is not supported for this family", "use sdpa, and Strategy.flash_attention=False for kept scores"
        )
    return kind


def mistral(config: Config, name: str) -> ModelSpec:
    """Mistral: every layer slides when `sliding_window` is given."""
    return replace(llama(config, name), window=config.integer("sliding_window", default=0, least=0))


def qwen2(config: Config, name: str) -> ModelSpec:
    """Qwen2 and 2.5: biases on q, k, v; layers from `max_window_layers` on slide when `use_sliding_window`."""
    return replace(_qwen(config, name), attention_bias=True, output_bias=False, ffn_bias=False)


def qwen3(config: Config, name: str) -> ModelSpec:
    """Qwen3: norms per head on q and k, head_dim 128 unless given."""
    defaults = Config({"head_dim": 128, **{key: value for key, value in config.values.items() if value is not None}}, config.where)
    return replace(_qwen(defaults, name), qk_norm="head")


def _qwen(config: Config, name: str) -> ModelSpec:
    spec = llama(config, name)
    if not config.flag("use_sliding_window", default=False):
        return spec
    first = config.integer("max_window_layers", default=28, least=0)
    default = tuple(index >= first for index in range(spec.num_layers))
    return replace(spec, window=config.integer("sliding_window", default=4096), windowed=_windowed(config, spec, default))


def gemma2(config: Config, name: str) -> ModelSpec:
    """Gemma 2: norms around both halves, scaled embeddings, capped scores and logits, every other layer slides."""
    spec = _gemma(config, name)
    kind = attention_kind(config, "eager")
    capped = _present(config, "attn_logit_softcapping", default=True)
    default = tuple(index % 2 == 0 for index in range(spec.num_layers))
    return replace(
        spec,
        windowed=_windowed(config, spec, default),
        score_softcap=capped,
        attention=kind,
        notes=_assumed(kind, "soft-capped scores"),
        logit_softcap=_present(config, "final_logit_softcapping", default=True),
    )


def gemma3(config: Config, name: str) -> ModelSpec:
    """Gemma 3 (text): as Gemma 2 without caps, norms per head on q and k, every sixth layer full, sliding layers with their own rope."""
    spec = _gemma(config, name)
    pattern = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    default = tuple((index + 1) % pattern != 0 for index in range(spec.num_layers))
    windowed = _windowed(config, spec, default)
    return replace(
        spec,
        windowed=windowed,
        qk_norm="head_transposed",
        rope_kinds=len(set(windowed)),
        logit_softcap=_present(config, "final_logit_softcapping", default=False),
    )


def _gemma(config: Config, name: str) -> ModelSpec:
    defaults = {
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "num_attention_heads": 8,
        "vocab_size": 262208,
    }
    present = {key: value for key, value in config.values.items() if value is not None and key != "hidden_act"}
    merged = Config({**defaults, "num_key_value_heads": 4, **present}, config.where)
    spec = llama(merged, name)
    return replace(
        spec,
        norm="gemma",
        norm_place="sandwich",
        embedding_scale=True,
        window=config.integer("sliding_window", default=4096, least=0),
    )


def phi3(config: Config, name: str) -> ModelSpec:
    """Phi-3 and Phi-4: fused qkv and gate-up matmuls, part of a head rotates when `partial_rotary_factor` < 1."""
    spec = replace(mistral(config, name), fused=True, attention_bias=False, output_bias=False, ffn_bias=False)
    nested = config.section("rope_parameters") or config.section("rope_scaling")
    holder = nested if nested is not None and "partial_rotary_factor" in nested.values else config
    factor = holder.number("partial_rotary_factor", default=1.0)
    if not 0.0 < factor <= 1.0:
        raise holder.fail("partial_rotary_factor", f"{factor} is out of range", "give a fraction in (0, 1]")
    return replace(spec, rope_dim=int(spec.head_dim * factor) // 2 * 2)


def olmo(config: Config, name: str) -> ModelSpec:
    """OLMo: layer norms without parameters, optional clipping of q, k, v."""
    return replace(llama(config, name), norm="olmo", ffn_bias=False, rope_dtype="fp32")


def olmo2(config: Config, name: str) -> ModelSpec:
    """OLMo 2: norms after attention and feed-forward, and over all of q and k."""
    return replace(llama(config, name), norm="wide", norm_place="post", qk_norm="full", ffn_bias=False, rope_dtype="fp32")


def _windowed(config: Config, spec: ModelSpec, default: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which layers slide, from `layer_types` or the family's pattern."""
    kinds = config.values.get("layer_types")
    if kinds is None:
        return default
    if not isinstance(kinds, (list, tuple)) or len(kinds) != spec.num_layers:
        raise config.fail("layer_types", f"{kinds!r} does not list {spec.num_layers} layers", "give one kind a layer")
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise config.fail(
                "layer_types", f"{kind!r} is not supported", "use sliding_attention or full_attention, or pass the nn.Module itself"
            )
    return tuple(kind == "sliding_attention" for kind in kinds)


def _present(config: Config, key: str, *, default: bool) -> bool:
    """Whether an optional number is set: absent means the family's default, null means off."""
    if key not in config.values:
        return default
    return config.values[key] is not None and config.number(key, default=0.0) > 0.0


def _assumed(kind: str, feature: str) -> tuple[str, ...]:
    """What to say about a family whose attention PyTorch's own kernel cannot run."""
    if kind == "eager":
        return (
            f"attention keeps its scores, as transformers does by default for {feature}; attn_implementation flash_attention_2 avoids it",
        )
    return (
        f"attention is priced as a flash kernel that knows {feature} (flash-attn, FlexAttention); transformers' default keeps the scores",
    )


def mixtral(config: Config, name: str) -> ModelSpec:
    """Mixtral: every feed-forward is a mixture; weights stay fp32."""
    spec = mistral(config, name)
    experts = _experts(config, ffn=spec.ffn, normalized=True)
    return replace(spec, experts=replace(experts, router="softmax_fp32"))


def qwen2_moe(config: Config, name: str) -> ModelSpec:
    """Qwen2-MoE: routed experts beside a gated shared one."""
    spec = qwen2(config, name)
    experts = _experts(config, ffn=config.integer("moe_intermediate_size"), normalized=config.flag("norm_topk_prob", default=False))
    shared = config.integer("shared_expert_intermediate_size")
    return replace(spec, experts=replace(_stepped(config, experts, spec), shared_ffn=shared, shared_gate=True))


def qwen3_moe(config: Config, name: str) -> ModelSpec:
    """Qwen3-MoE: as Qwen3, without shared experts."""
    spec = qwen3(config, name)
    experts = _experts(config, ffn=config.integer("moe_intermediate_size"), normalized=config.flag("norm_topk_prob", default=False))
    return replace(spec, experts=_stepped(config, experts, spec))


def gpt_oss(config: Config, name: str) -> ModelSpec:
    """gpt-oss: attention sinks, biases everywhere, clamped gates, alternating windows."""
    bias = config.flag("attention_bias", default=True)
    kind = attention_kind(config, "eager")
    spec = replace(llama(Config({"head_dim": 64, **config.values}, config.where), name), attention_bias=bias, output_bias=bias)
    experts = _experts(config, ffn=spec.ffn, normalized=False)
    default = tuple(index % 2 == 0 for index in range(spec.num_layers))
    return replace(
        spec,
        norm="wide",
        sinks=True,
        rope="chunks",
        window=config.integer("sliding_window", default=128, least=0),
        windowed=_windowed(config, spec, default),
        experts=replace(experts, router="top_k", biases=True),
        attention=kind,
        notes=_assumed(kind, "sinks"),
    )


def deepseek_v2(config: Config, name: str) -> ModelSpec:
    """DeepSeek V2: latent attention, fp32 softmax router, shared experts, leading dense layers."""
    spec = _deepseek(config, name, "wide_softmax")
    limited = config.choice("topk_method", known=("greedy", "group_limited_greedy"), default="greedy") != "greedy"
    experts = spec.experts
    assert experts is not None
    if not limited:
        experts = replace(experts, groups=1, top_groups=1)
    return replace(spec, experts=experts, rope="complex", rope_dtype="fp32")


def deepseek_v3(config: Config, name: str) -> ModelSpec:
    """DeepSeek V3: latent attention, sigmoid router with group limits. The multi-token-prediction layers of the checkpoint are not built."""
    rope = "strided" if config.flag("rope_interleave", default=True) else "halves"
    return replace(_deepseek(config, name, "sigmoid"), rope=rope)


def _deepseek(config: Config, name: str, router: str) -> ModelSpec:
    attention_kind(config, known=("flash",))
    spec = llama(Config({**config.values, "head_dim": config.integer("qk_rope_head_dim")}, config.where), name)
    width = config.integer("moe_intermediate_size")
    experts = _experts(config, ffn=width, normalized=config.flag("norm_topk_prob", default=True))
    groups = config.integer("n_group", default=1)
    if experts.num_experts % groups:
        raise config.fail(
            "n_group", f"{groups} groups do not divide {experts.num_experts} experts", f"give a divisor of {experts.num_experts}"
        )
    latent = LatentAttention(
        q_rank=config.integer("q_lora_rank", default=0, least=0),
        kv_rank=config.integer("kv_lora_rank"),
        nope_dim=config.integer("qk_nope_head_dim"),
        rope_dim=config.integer("qk_rope_head_dim"),
        v_dim=config.integer("v_head_dim"),
    )
    return replace(
        spec,
        latent=latent,
        experts=replace(
            experts,
            router=router,
            shared_ffn=width * config.integer("n_shared_experts", default=1),
            first_dense=config.integer("first_k_dense_replace", default=0, least=0),
            groups=groups,
            top_groups=min(groups, config.integer("topk_group", default=groups)),
        ),
    )


def _experts(config: Config, *, ffn: int, normalized: bool) -> Experts:
    number = config.integer("num_local_experts", "num_experts", "n_routed_experts")
    chosen = config.integer("num_experts_per_tok", "experts_per_token")
    if chosen > number:
        raise config.fail("num_experts_per_tok", f"{chosen} experts a token of only {number}", f"give at most {number}")
    return Experts(num_experts=number, top_k=chosen, ffn=ffn, normalized=normalized)


def _stepped(config: Config, experts: Experts, spec: ModelSpec) -> Experts:
    dense = config.values.get("mlp_only_layers") or ()
    if not isinstance(dense, (list, tuple)) or list(dense) != list(range(len(dense))) or len(dense) > spec.num_layers:
        raise config.fail(
            "mlp_only_layers", f"{dense!r} are not the leading layers", "list leading layers only, or pass the nn.Module itself"
        )
    return replace(experts, step=config.integer("decoder_sparse_step", default=1), first_dense=len(dense))
