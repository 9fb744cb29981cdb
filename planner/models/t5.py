"""T5: encoder and decoder with learned relative position biases (transformers 5.24 models/t5/modeling_t5.py).

The biases are made by the first layer of each stack and read by the others, so attention always has an additive bias:
scaled_dot_product_attention then runs the memory-efficient kernel over all query-key pairs and differentiates the bias too. Between the
stacks stands a block of role "embedding": the norm behind the encoder, which every decoder layer reads, and the decoder's embedding of the
labels shifted right.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.models import attention, losses, norms, ops
from planner.models.assemble import Program
from planner.models.builder import BlockBuilder, Variable
from planner.models.spec import ModelSpec


def build_t5(program: Program) -> None:
    """Write T5ForConditionalGeneration with sequences of equal length on both sides."""
    spec = program.spec
    flows = program.block("embed", "embedding", "", _embedding)
    biased = not spec.frozen
    for index in range(spec.encoder_layers):
        key = f"encoder{'' if index else '_first'}{'' if flows else '_frozen_input'}"
        flows = program.block(key, "layer", f"encoder.block.{index}", _encoder_layer, index == 0, flows, biased)
    encoded = program.block("embed_decoder", "embedding", "", _bridge, flows)
    flows = biased
    for index in range(spec.num_layers):
        key = f"decoder{'' if index else '_first'}{'' if flows else '_frozen_input'}"
        flows = program.block(key, "layer", f"decoder.block.{index}", _decoder_layer, index == 0, flows, encoded, biased)
    program.block("head", "head", "", _head, flows)
    program.tie("shared.weight", "decoder.embed_tokens.weight")
    program.tie("shared.weight", "lm_head.weight")


def _embedding(b: BlockBuilder, program: Program) -> tuple[Variable, ...]:
    spec = program.spec
    table = b.parameter("shared.weight", (spec.vocab, spec.hidden), ("vocab", ""))
    b.layout("encoder.embed_tokens", "vocab")
    return (ops.lookup(b, program.ids(b), table, "encoder.embed_tokens"),)


def _encoder_layer(b: BlockBuilder, program: Program, first: bool, flows: bool, biased: bool) -> tuple[Variable, ...]:
    x = program.hidden(b, flows)
    path = "layer.0.SelfAttention"
    bias = _position_bias(b, program, path, both_ways=True) if first else _shared_bias(b, program, biased)
    x = _attend(b, x, x, program.spec, "layer.0", "SelfAttention", _contiguous(b, bias, path))
    return (_feed_forward(b, x, program.spec, "layer.1"), *((bias,) if first else ()))


def _bridge(b: BlockBuilder, program: Program, flows: bool) -> tuple[Variable, ...]:
    spec = program.spec
    memory = norms.rms_norm(b, program.hidden(b, flows), "encoder.final_layer_norm", style="t5")
    if memory.grad or not spec.frozen:
        b.save(memory)
    labels = program.labels(b)
    shifted = ops.copy(b, labels, "", labels.shape, labels.axes)
    return memory, ops.embedding(b, shifted, "decoder.embed_tokens", spec.vocab, spec.hidden)


def _decoder_layer(b: BlockBuilder, program: Program, first: bool, flows: bool, encoded: bool, biased: bool) -> tuple[Variable, ...]:
    spec, path = program.spec, "layer.0.SelfAttention"
    x = program.hidden(b, flows)
    memory = program.hidden(b, encoded, "encoder_hidden_states", shared=True)
    bias = _position_bias(b, program, path, both_ways=False) if first else _shared_bias(b, program, biased)
    x = _attend(b, x, x, spec, "layer.0", "SelfAttention", _contiguous(b, _masked(b, bias, path), path))
    shape, axes = (1, spec.heads, program.sequence, program.sequence), ("", "heads", "sequence", "")
    if first:
        none = b.kernel("layer.1.EncDecAttention", "elementwise", "zeros", [], [(shape, axes, "compute")])[0]
    else:
        none = b.input("encoder_decoder_bias", shape, axes, grad=False, shared=True)
    x = _attend(b, x, memory, spec, "layer.1", "EncDecAttention", none)
    return (_feed_forward(b, x, spec, "layer.2"), *((bias, none) if first else ()))


def _head(b: BlockBuilder, program: Program, flows: bool) -> tuple[Variable, ...]:
    spec = program.spec
    x = norms.rms_norm(b, program.hidden(b, flows), "decoder.final_layer_norm", style="t5")
    if spec.tied:
        x = ops.scale(b, x, "")
    logits = ops.linear(b, x, "lm_head", spec.vocab, "vocab")
    return (losses.plain_loss(b, logits, program.labels(b)),)


def _attend(b: BlockBuilder, x: Variable, memory: Variable, spec: ModelSpec, layer: str, name: str, bias: Variable) -> Variable:
    """x + o(attention(norm(x), memory)); self-attention when memory is x."""
    path, width = f"{layer}.{name}", spec.heads * spec.head_dim
    y = norms.rms_norm(b, x, f"{layer}.layer_norm", style="t5")
    source = y if memory is x else memory
    q, k, v = (
        attention.heads(b, ops.linear(b, value, f"{path}.{part}", width, "heads"), spec.heads, "heads")
        for value, part in ((y, "q"), (source, "k"), (source, "v"))
    )
    out = attention.attention(b, q, k, v, path, causal=False, extra=_spread(b, bias, x.shape[0], path))
    return ops.add(b, x, ops.linear(b, out, f"{path}.o", spec.hidden), layer)


def _feed_forward(b: BlockBuilder, x: Variable, spec: ModelSpec, layer: str) -> Variable:
    path = f"{layer}.DenseReluDense"
    y = norms.rms_norm(b, x, f"{layer}.layer_norm", style="t5")
    if spec.gated:
        gate = ops.activation(b, ops.linear(b, y, f"{path}.wi_0", spec.ffn, "ffn"), f"{path}.act", spec.activation)
        y = ops.mul(b, gate, ops.linear(b, y, f"{path}.wi_1", spec.ffn, "ffn"), path)
    else:
        y = ops.activation(b, ops.linear(b, y, f"{path}.wi", spec.ffn, "ffn"), f"{path}.act", spec.activation)
    return ops.add(b, x, ops.linear(b, y, f"{path}.wo", spec.hidden), layer)


def _position_bias(b: BlockBuilder, program: Program, path: str, *, both_ways: bool) -> Variable:
    """Bias by distance bucket: integer arithmetic on query x key, then a lookup of (query, key, heads) seen as (1, heads, query, key)."""
    length, spec = program.sequence, program.spec
    square, axes = (length, length), ("sequence", "")
    value = b.kernel(path, "elementwise", "sub", [], [(square, axes, "int64")])[0]
    signs = ("gt", "_to_copy", "mul", "add", "abs") if both_ways else ("zeros_like", "minimum", "neg")
    for name in (*signs, "lt", "_to_copy", "div", "log", "div", "mul", "_to_copy", "add", "full_like", "minimum", "where", "add"):
        value = b.kernel(path, "elementwise", name, [value], [(square, axes, "int64")])[0]
    module = f"{path}.relative_attention_bias"
    table = b.parameter(f"{module}.weight", (spec.position_buckets, spec.heads), ("", "heads"), layout="column")
    b.unsplit(module, "is a table of all heads inside a layer")
    made = ops.lookup(b, value, table, module)
    return b.view(made, (1, spec.heads, length, length), ("", "heads", "sequence", ""))


def _shared_bias(b: BlockBuilder, program: Program, grad: bool) -> Variable:
    length, heads = program.sequence, program.spec.heads
    stored = b.input("position_bias", (length, length, heads), ("sequence", "", "heads"), grad=grad, shared=True)
    return b.view(stored, (1, heads, length, length), ("", "heads", "sequence", ""))


def _contiguous(b: BlockBuilder, bias: Variable, path: str) -> Variable:
    return ops.copy(b, bias, path, bias.shape, bias.axes)


def _masked(b: BlockBuilder, bias: Variable, path: str) -> Variable:
    """The bias where a query may look, the lowest number elsewhere: keeps the bool mask."""
    length = bias.shape[-1]
    mask = b.kernel(path, "elementwise", "ge", [], [((length, length), ("sequence", ""), "bool")])[0]

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        return None, b.back("elementwise", "where", [gradient], bias, saved=[mask])

    return b.kernel(path, "elementwise", "where", [mask, bias], [(bias.shape, bias.axes, bias.dtype)], rule)[0]


def _spread(b: BlockBuilder, bias: Variable, batch: int, path: str) -> Variable:
    """The bias broadcast over the batch: no kernel forward, the sum over the batch backward."""
    shape = (batch, *bias.shape[1:])
    return b.expand(bias, shape, ("batch", *bias.axes[1:]), path)
