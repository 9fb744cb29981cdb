"""Decoder-only families with rotary positions and RMS norms: Llama, Mistral, Qwen, Gemma, Phi-3, OLMo and their mixtures of experts.

Module names are those of transformers 5.24 (models/*/modeling_*.py): `model.embed_tokens`, `model.layers.N`, `model.norm`, `lm_head`.
"""

from __future__ import annotations

from planner.models import attention, losses, mla, moe, norms, ops, scores
from planner.models.assemble import Program
from planner.models.builder import BlockBuilder, Variable
from planner.models.spec import ModelSpec

STACKED = "holds several projections one after the other"


def build_decoder(program: Program) -> None:
    """Write a rotary decoder: embedding, layers, head with the shifted language-model loss."""
    spec = program.spec
    flows = program.block("embed", "embedding", "", _embedding)
    for index in range(spec.num_layers):
        sliding = spec.slides(index)
        window = spec.window if sliding and spec.window < program.sequence else 0
        sparse = spec.sparse(index)
        apart = bool(window) or (sliding and (spec.rope_kinds > 1 or spec.attention == "eager"))
        marks = (("sparse", sparse), ("sliding", apart), ("frozen_input", not flows))
        key = "_".join(["layer", *(mark for mark, holds in marks if holds)])
        flows = program.block(key, "layer", f"model.layers.{index}", _layer, window, sliding, sparse, flows)
    program.block("head", "head", "", causal_head, flows)
    if spec.tied:
        program.tie("model.embed_tokens.weight", "lm_head.weight")


def _embedding(b: BlockBuilder, program: Program) -> tuple[Variable, ...]:
    """Token embedding and the rotary tables that every layer shares."""
    spec = program.spec
    hidden = ops.embedding(b, program.ids(b), "model.embed_tokens", spec.vocab, spec.hidden)
    if spec.embedding_scale:
        hidden = ops.scale(b, hidden, "model.embed_tokens")
    tables = [
        attention.rotary_tables(b, "model.rotary_emb", program.sequence, spec.rope_dim, spec.rope, spec.rope_dtype)
        for _ in range(spec.rope_kinds)
    ]
    masks = [scores.causal_mask(b, program.batch, program.sequence) for _ in range(program.num_masks)]
    return hidden, *(table for made in tables for table in made), *masks


def _layer(b: BlockBuilder, program: Program, window: int, sliding: bool, sparse: bool, flows: bool) -> tuple[Variable, ...]:
    spec = program.spec
    x = program.hidden(b, flows)
    tables = program.tables(b, "_sliding" if sliding and spec.rope_kinds > 1 else "")
    before, after, before_ffn, after_ffn = _NORMS[spec.norm_place]
    y = norm(b, x, before, spec) if before else x
    mask = program.mask(b, "_sliding" if sliding else "") if spec.attention == "eager" else None
    y = mla.attend(b, y, spec, tables) if spec.latent else self_attention(b, y, spec, tables, mask, window)
    y = norm(b, y, after, spec) if after else y
    x = ops.add(b, x, y, "")
    y = norm(b, x, before_ffn, spec) if before_ffn else x
    y = _mixture(b, y, spec) if sparse else gated_ffn(b, y, "mlp", spec, spec.ffn)
    y = norm(b, y, after_ffn, spec) if after_ffn else y
    return (ops.add(b, x, y, ""),)


_NORMS = {
    "pre": ("input_layernorm", "", "post_attention_layernorm", ""),
    "post": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "sandwich": ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
}


def norm(b: BlockBuilder, x: Variable, module: str, spec: ModelSpec) -> Variable:
    """The family's norm."""
    if spec.norm == "olmo":
        wide = norms.layer_norm(b, ops.cast(b, x, module, "fp32"), module, affine=False)
        return ops.cast(b, wide, module, x.dtype)
    return norms.rms_norm(b, x, module, style=spec.norm)


def self_attention(
    b: BlockBuilder, x: Variable, spec: ModelSpec, tables: tuple[Variable, ...], mask: Variable | None, window: int
) -> Variable:
    """Grouped-query attention with rotary positions. Gradients of q and k leave the rotation transposed and are copied before the projections' backward."""
    path = "self_attn"
    axis, kv_axis = _head_axes(spec)
    q, k, v = _projections(b, x, spec)
    q = _placed(b, q, f"{path}.q_norm", spec, spec.heads, axis)
    k = _placed(b, k, f"{path}.k_norm", spec, spec.kv_heads, kv_axis)
    turn = attention.rotate_part if spec.fused else attention.rotate_pairs if spec.rope == "chunks" else attention.rotate
    cos, sin = tables
    q, k = (turn(b, value, cos, sin, path) for value in (q, k))
    v = attention.heads(b, v, spec.kv_heads, kv_axis, path, clones=mask is not None)
    sinks = b.parameter(f"{path}.sinks", (spec.heads,), ("heads",), layout="column") if spec.sinks else None
    if spec.sinks:
        b.unsplit(f"{path}.sinks", "is a parameter beside the linears of its module")
    contiguous = spec.fused or spec.rope == "chunks"
    if mask is not None:
        out = scores.eager_attention(b, q, k, v, mask, path, capped=spec.score_softcap, sinks=sinks)
        return ops.linear(b, out, f"{path}.o_proj", spec.hidden, bias=spec.output_bias)
    out = attention.attention(b, q, k, v, path, causal=True, window=window, extra=sinks, clones=contiguous)
    return ops.linear(b, out, f"{path}.o_proj", spec.hidden, bias=spec.output_bias)


def _head_axes(spec: ModelSpec) -> tuple[str, str]:
    """Axes of query and key-value heads. A norm over all heads together (OLMo 2) needs them whole, so tensor parallelism leaves that attention alone."""
    return ("", "") if spec.qk_norm == "full" else ("heads", "kv_heads")


def _projections(b: BlockBuilder, x: Variable, spec: ModelSpec) -> tuple[Variable, Variable, Variable]:
    widths = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim)
    axis, kv_axis = _head_axes(spec)
    axes = (axis, kv_axis, kv_axis)
    if spec.fused:
        fused = ops.linear(b, x, "self_attn.qkv_proj", sum(widths), axis, bias=spec.attention_bias)
        b.unsplit("self_attn.qkv_proj", STACKED)
        q, k, v = b.slices(
            fused, [((*x.shape[:-1], width), (*x.axes[:-1], axis)) for width, axis in zip(widths, axes, strict=True)], "self_attn"
        )
        return q, k, v
    names = ("q_proj", "k_proj", "v_proj")
    q, k, v = (
        ops.linear(b, x, f"self_attn.{name}", width, axis, bias=spec.attention_bias)
        for name, width, axis in zip(names, widths, axes, strict=True)
    )
    return q, k, v


def _placed(b: BlockBuilder, x: Variable, module: str, spec: ModelSpec, count: int, axis: str) -> Variable:
    """Queries or keys as (batch, heads, sequence, d), normed before (all heads together) or after (each head) the split."""
    path = module.rpartition(".")[0]
    if spec.qk_norm == "full":
        x = norm(b, x, module, spec)
    if spec.qk_norm == "head_transposed":
        return norm(b, attention.heads(b, x, count, axis, path, clones=True), module, spec)
    if spec.qk_norm != "head":
        return attention.heads(b, x, count, axis, path, clones=True)
    batch, sequence, width = x.shape
    split = b.view(x, (batch, sequence, count, width // count), ("batch", "sequence", axis, ""), module=path, clones=True)
    x = norm(b, split, module, spec)
    return b.view(x, (batch, count, sequence, width // count), ("batch", axis, "sequence", ""))


def gated_ffn(b: BlockBuilder, x: Variable, module: str, spec: ModelSpec, width: int) -> Variable:
    """down(act(gate(x)) * up(x))."""
    if spec.fused:
        both = ops.linear(b, x, f"{module}.gate_up_proj", 2 * width, "ffn", bias=spec.ffn_bias)
        b.unsplit(f"{module}.gate_up_proj", STACKED)
        part = ((*x.shape[:-1], width), (*x.axes[:-1], "ffn"))
        gate, up = b.split(both, [part, part], module)
        y = ops.mul(b, up, ops.activation(b, gate, f"{module}.activation_fn", spec.activation), module)
    else:
        gate = ops.linear(b, x, f"{module}.gate_proj", width, "ffn", bias=spec.ffn_bias)
        gate = ops.activation(b, gate, f"{module}.act_fn", spec.activation)
        y = ops.mul(b, gate, ops.linear(b, x, f"{module}.up_proj", width, "ffn", bias=spec.ffn_bias), module)
    return ops.linear(b, y, f"{module}.down_proj", spec.hidden, bias=spec.ffn_bias)


def _mixture(b: BlockBuilder, x: Variable, spec: ModelSpec) -> Variable:
    """Routed experts beside the experts that every token visits (Qwen gates those, before routing; DeepSeek adds them as they are, after)."""
    experts = spec.experts
    assert experts is not None
    if not experts.shared_ffn:
        return moe.routed(b, x, "mlp", spec, experts)
    if not experts.shared_gate:
        return ops.add(b, moe.routed(b, x, "mlp", spec, experts), gated_ffn(b, x, "mlp.shared_experts", spec, experts.shared_ffn), "mlp")
    shared = gated_ffn(b, x, "mlp.shared_expert", spec, experts.shared_ffn)
    y = moe.routed(b, x, "mlp", spec, experts)
    gate = ops.activation(b, ops.linear(b, x, "mlp.shared_expert_gate", 1), "mlp", "sigmoid")
    return ops.add(b, y, ops.mul(b, gate, shared, "mlp"), "mlp")


def causal_head(b: BlockBuilder, program: Program, flows: bool) -> tuple[Variable, ...]:
    """Final norm, logits (capped by tanh for Gemma 2) and the shifted cross-entropy."""
    spec = program.spec
    x = norm(b, program.hidden(b, flows), "model.norm", spec)
    logits = ops.linear(b, x, "lm_head", spec.vocab, "vocab", bias=spec.head_bias)
    if spec.logit_softcap:
        logits = ops.scale(b, logits, "", "div")
        logits = ops.scale(b, ops.activation(b, logits, "", "tanh"), "")
    return (losses.causal_loss(b, logits, program.labels(b)),)
