"""BERT with its masked-language-model head (transformers 5.24 models/bert/modeling_bert.py): norms after each half, attention without a mask."""

from __future__ import annotations

from planner.models import attention, losses, norms, ops
from planner.models.assemble import Program
from planner.models.builder import BlockBuilder, Variable


def build_bert(program: Program) -> None:
    """Write BertForMaskedLM."""
    flows = program.block("embed", "embedding", "", _embedding)
    for index in range(program.spec.num_layers):
        key = "layer" if flows else "layer_frozen_input"
        flows = program.block(key, "layer", f"bert.encoder.layer.{index}", _layer, flows)
    program.block("head", "head", "", _head, flows)
    if program.spec.tied:
        program.tie("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight")


def _embedding(b: BlockBuilder, program: Program) -> tuple[Variable, ...]:
    spec, path = program.spec, "bert.embeddings"
    kinds = b.constant("token_type_ids", (1, program.sequence), ("", "sequence"), "int64", kind="activation")
    words = ops.embedding(b, program.ids(b), f"{path}.word_embeddings", spec.vocab, spec.hidden)
    table = b.parameter(f"{path}.token_type_embeddings.weight", (spec.type_vocab, spec.hidden), ("", ""), layout="replicate")
    spread = b.view(kinds, (program.batch, program.sequence), ("batch", "sequence"))
    x = ops.add(b, words, ops.lookup(b, spread, table, f"{path}.token_type_embeddings"), path)
    positions = b.constant("position_ids", (1, program.sequence), ("", "sequence"), "int64")
    places = ops.embedding(b, positions, f"{path}.position_embeddings", spec.max_sequence, spec.hidden, axis="", layout="replicate")
    return (norms.layer_norm(b, ops.add(b, x, places, path), f"{path}.LayerNorm"),)


def _layer(b: BlockBuilder, program: Program, flows: bool) -> tuple[Variable, ...]:
    spec, path = program.spec, "attention.self"
    x = program.hidden(b, flows)
    q, k, v = (
        attention.heads(b, ops.linear(b, x, f"{path}.{name}", spec.hidden, "heads", bias=True), spec.heads, "heads")
        for name in ("query", "key", "value")
    )
    y = attention.attention(b, q, k, v, path, causal=False)
    y = ops.add(b, ops.linear(b, y, "attention.output.dense", spec.hidden, bias=True), x, "attention.output")
    x = norms.layer_norm(b, y, "attention.output.LayerNorm")
    y = ops.linear(b, x, "intermediate.dense", spec.ffn, "ffn", bias=True)
    y = ops.activation(b, y, "intermediate.intermediate_act_fn", spec.activation)
    y = ops.add(b, ops.linear(b, y, "output.dense", spec.hidden, bias=True), x, "output")
    return (norms.layer_norm(b, y, "output.LayerNorm"),)


def _head(b: BlockBuilder, program: Program, flows: bool) -> tuple[Variable, ...]:
    spec, path = program.spec, "cls.predictions"
    x = ops.linear(b, program.hidden(b, flows), f"{path}.transform.dense", spec.hidden, bias=True)
    x = norms.layer_norm(b, ops.activation(b, x, f"{path}.transform.transform_act_fn", spec.activation), f"{path}.transform.LayerNorm")
    weight = b.parameter(f"{path}.decoder.weight", (spec.vocab, spec.hidden), ("vocab", ""), layout="vocab")
    bias = b.parameter(f"{path}.bias", (spec.vocab,), ("vocab",))
    logits = ops.matmul(b, x, weight, f"{path}.decoder", spec.vocab, "vocab", bias=bias)
    return (losses.plain_loss(b, logits, program.labels(b)),)
