"""GPT-2: learned positions, layer norms, fused query-key-value Conv1D (transformers 5.24 models/gpt2/modeling_gpt2.py)."""

from __future__ import annotations

from planner.models import attention, losses, norms, ops
from planner.models.assemble import Program
from planner.models.builder import BlockBuilder, Variable


def build_gpt2(program: Program) -> None:
    """Write GPT-2 with its language-model head."""
    flows = program.block("embed", "embedding", "", _embedding)
    for index in range(program.spec.num_layers):
        key = "layer" if flows else "layer_frozen_input"
        flows = program.block(key, "layer", f"transformer.h.{index}", _layer, flows)
    program.block("head", "head", "", _head, flows)
    if program.spec.tied:
        program.tie("transformer.wte.weight", "lm_head.weight")


def _embedding(b: BlockBuilder, program: Program) -> tuple[Variable, ...]:
    spec = program.spec
    tokens = ops.embedding(b, program.ids(b), "transformer.wte", spec.vocab, spec.hidden)
    positions = b.constant("position_ids", (1, program.sequence), ("", "sequence"), "int64", kind="activation")
    table = ops.embedding(b, positions, "transformer.wpe", spec.max_sequence, spec.hidden, axis="", layout="replicate")
    return (ops.add(b, tokens, table, "transformer"),)


def _layer(b: BlockBuilder, program: Program, flows: bool) -> tuple[Variable, ...]:
    spec = program.spec
    x = program.hidden(b, flows)
    batch, sequence, width = x.shape
    y = norms.layer_norm(b, x, "ln_1")
    fused = ops.linear(b, y, "attn.c_attn", 3 * width, "heads", bias=True, transposed=True)
    part = ((batch, sequence, width), ("batch", "sequence", "heads"))
    q, k, v = (attention.heads(b, item, spec.heads, "heads") for item in b.split(fused, [part] * 3, "attn"))
    out = attention.attention(b, q, k, v, "attn", causal=True)
    x = ops.add(b, ops.linear(b, out, "attn.c_proj", width, bias=True, transposed=True), x, "")
    y = norms.layer_norm(b, x, "ln_2")
    y = ops.linear(b, y, "mlp.c_fc", spec.ffn, "ffn", bias=True, transposed=True)
    y = ops.activation(b, y, "mlp.act", spec.activation)
    return (ops.add(b, x, ops.linear(b, y, "mlp.c_proj", width, bias=True, transposed=True), ""),)


def _head(b: BlockBuilder, program: Program, flows: bool) -> tuple[Variable, ...]:
    x = norms.layer_norm(b, program.hidden(b, flows), "transformer.ln_f")
    logits = ops.linear(b, x, "lm_head", program.spec.vocab, "vocab")
    return (losses.causal_loss(b, logits, program.labels(b)),)
