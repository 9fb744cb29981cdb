"""Decoder-only families with rotary positions and RMS norms: Llama, Mistral, Qwen, Gemma, Phi-3, OLMo and their mixtures of experts.

Module names are those of transformers 5.24 (models/*/modeling_*.py): `model.embed_tokens`, `model.layers.N`, `model.norm`, `lm_head`.
"""

from __future__ import annotations

from planner.models import layers, ops
from planner.models.assemble import Program
from planner.models.builder import BlockBuilder, Value
from planner.models.spec import ModelSpec


def build(program: Program) -> None:
    """Write a rotary decoder: embedding, layers, head with the shifted language-model loss."""
    spec = program.spec
    flows = program.block("embed", "embedding", "", _embedding)
    for index in range(spec.num_layers):
        window = spec.window if spec.slides(index) and spec.window < program.sequence else 0
        key = f"layer{'_sliding' if window else ''}{'_frozen_input' if not flows else ''}"
        flows = program.block(key, "layer", f"model.layers.{index}", _layer, window, flows)
    program.block("head", "head", "", causal_head, "model.norm", flows)
    if spec.tied:
        program.tie("model.embed_tokens.weight", "lm_head.weight")


def _embedding(b: BlockBuilder, program: Program) -> tuple[Value, ...]:
    spec = program.spec
    hidden = ops.embedding(b, program.ids(b), "model.embed_tokens", spec.vocab, spec.hidden)
    return hidden, *layers.rotary_tables(b, "model.rotary_emb", program.sequence, spec.rope_dim)


def _layer(b: BlockBuilder, program: Program, window: int, flows: bool) -> tuple[Value, ...]:
    spec = program.spec
    x = program.hidden(b, flows)
    tables = program.tables(b)
    y = norm(b, x, "input_layernorm", spec)
    x = ops.add(b, x, self_attention(b, y, spec, tables, window), "")
    y = norm(b, x, "post_attention_layernorm", spec)
    return (ops.add(b, x, gated_ffn(b, y, "mlp", spec, spec.ffn), ""),)


def norm(b: BlockBuilder, x: Value, module: str, spec: ModelSpec) -> Value:
    """The family's norm."""
    return layers.rms_norm(b, x, module, style=spec.norm)


def self_attention(b: BlockBuilder, x: Value, spec: ModelSpec, tables: tuple[Value, Value], window: int) -> Value:
    """Grouped-query attention with rotary positions. Gradients of q and k leave the rotation transposed and are copied before the projections' backward."""
    path = "self_attn"
    bias, dim = spec.attention_bias, spec.head_dim
    q = ops.linear(b, x, f"{path}.q_proj", spec.heads * dim, "heads", bias=bias)
    k = ops.linear(b, x, f"{path}.k_proj", spec.kv_heads * dim, "kv_heads", bias=bias)
    v = ops.linear(b, x, f"{path}.v_proj", spec.kv_heads * dim, "kv_heads", bias=bias)
    q = layers.rotate(b, layers.heads(b, q, spec.heads, "heads", path, clones=True), *tables, path)
    k = layers.rotate(b, layers.heads(b, k, spec.kv_heads, "kv_heads", path, clones=True), *tables, path)
    out = layers.attention(b, q, k, layers.heads(b, v, spec.kv_heads, "kv_heads"), path, causal=True, window=window)
    return ops.linear(b, out, f"{path}.o_proj", spec.hidden, bias=spec.output_bias)


def gated_ffn(b: BlockBuilder, x: Value, module: str, spec: ModelSpec, width: int) -> Value:
    """down(act(gate(x)) * up(x))."""
    gate = ops.activation(b, ops.linear(b, x, f"{module}.gate_proj", width, "ffn", bias=spec.ffn_bias), f"{module}.act_fn", spec.activation)
    up = ops.linear(b, x, f"{module}.up_proj", width, "ffn", bias=spec.ffn_bias)
    return ops.linear(b, ops.mul(b, gate, up, module), f"{module}.down_proj", spec.hidden, bias=spec.ffn_bias)


def causal_head(b: BlockBuilder, program: Program, norm_path: str, flows: bool) -> tuple[Value, ...]:
    """Final norm, logits and the shifted cross-entropy."""
    spec = program.spec
    x = norm(b, program.hidden(b, flows), norm_path, spec)
    logits = ops.linear(b, x, "lm_head", spec.vocab, "vocab", bias=spec.head_bias)
    return (layers.token_loss(b, logits, program.labels(b), shifts=True),)
