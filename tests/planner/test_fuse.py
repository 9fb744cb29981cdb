"""Fusion: fewer kernels and saved tensors, the same dataflow and flops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.fuse import fuse
from planner.graph import Block, Node, Tensor
from planner.models.resolve import resolve, spec_graph
from tests.planner.graphs import gpt_layer

ROWS = ("batch", "sequence", "")


def _tensor(name: str, width: int = 64, dtype: str = "compute", kind: str = "activation", axes: tuple[str, ...] = ROWS) -> Tensor:
    return Tensor(tensor_id=name, shape=(1, 8, width), axes=axes, dtype=dtype, kind=kind)


def _node(name: str, inputs: str, outputs: str, op: str = "elementwise", phase: str = "forward") -> Node:
    return Node(node_id=name, op=op, phase=phase, inputs=tuple(inputs.split()), outputs=tuple(outputs.split()))


def _rms_norm() -> Block:
    """x -> fp32 copy -> mean square -> 1/rms -> normal -> y, then a matmul that reads y, and the backward kernels of the norm."""
    nodes = (
        _node("cast", "x", "wide", "copy"), _node("square", "wide", "square"), _node("mean", "square", "mean", "reduce"),
        _node("rsqrt", "mean", "rstd"), _node("scale", "wide rstd", "normal"), _node("down", "normal", "y", "copy"),
        _node("mm", "y", "out", "gemm"), _node("dgrad", "out.grad", "y.grad", "gemm", "backward"), _node("wgrad", "out.grad y", "w.grad", "gemm", "backward"),
        _node("d1", "y.grad rstd", "a", phase="backward"), _node("d2", "y.grad wide", "b", "reduce", "backward"),
        _node("d3", "a b wide rstd", "x.grad", phase="backward"),
    )  # fmt: skip
    tensors = (
        _tensor("x", kind="input"), _tensor("wide", dtype="fp32"), _tensor("square", dtype="fp32"), _tensor("mean", 1, "fp32"),
        _tensor("rstd", 1, "fp32"), _tensor("normal", dtype="fp32"), _tensor("y"), _tensor("out"), _tensor("out.grad", kind="input"), _tensor("y.grad"),
        Tensor(tensor_id="w.grad", shape=(64, 64), axes=("", "")), _tensor("a", dtype="fp32"), _tensor("b", 1, "fp32"), _tensor("x.grad"),
    )  # fmt: skip
    return Block(
        kind_id="n", role="layer", nodes=nodes, tensors=tensors, inputs=("x",), outputs=("out",), saved=("wide", "rstd", "y"),
    )  # fmt: skip


def test_rms_norm_becomes_one_kernel_that_keeps_its_input_and_a_statistic():
    fused = fuse(_rms_norm())
    forward = [node for node in fused.nodes if node.phase == "forward"]
    assert [(node.op, set(node.inputs), set(node.outputs)) for node in forward] == [
        ("norm", {"x"}, {"rstd", "y"}),
        ("gemm", {"y"}, {"out"}),
    ]
    assert set(fused.saved) == {"x", "rstd", "y"}
    last = fused.nodes[-1]
    assert set(last.inputs) == {"y.grad", "x", "rstd"}
    assert last.outputs == ("x.grad",)


def test_what_a_matmul_of_the_backward_reads_stays_saved():
    block = fuse(_rms_norm())
    assert "y" in block.saved


def test_a_factor_of_a_saved_tensor_joins_the_kernel_that_reads_it():
    """3 x^2 waits for no gradient, but a kernel of its own would write it out and read it back."""
    block = _rms_norm()
    early = _node("cube", "wide", "factor", phase="backward")
    nodes = [replace(node, inputs=(*node.inputs, "factor")) if node.node_id == "d3" else node for node in block.nodes]
    first = next(index for index, node in enumerate(nodes) if node.phase == "backward")
    nodes.insert(first, early)
    fused = fuse(replace(block, nodes=tuple(nodes), tensors=(*block.tensors, _tensor("factor", dtype="fp32"))))
    assert not any("factor" in (*node.inputs, *node.outputs) for node in fused.nodes)


def test_saved_tensor_stays_when_its_sources_weigh_more():
    """The product of two wide tensors, reduced: keeping both factors would cost more than keeping the product."""
    nodes = (
        _node("mul", "p q", "r"), _node("sum", "r", "out", "reduce"), _node("back", "out.grad r", "x.grad", phase="backward"),
    )  # fmt: skip
    tensors = (
        *(_tensor(name) for name in ("r", "x.grad", "out")),
        *(_tensor(name, 64, "fp32") for name in ("p", "q")),
        _tensor("out.grad", kind="input"),
    )
    makers = (_node("mp", "x", "p", "gemm"), _node("mq", "x", "q", "gemm"))
    block = Block(
        kind_id="b", role="layer", nodes=(*makers, *nodes), tensors=(*tensors, _tensor("x", kind="input")), inputs=("x",), outputs=("out",), saved=("r",)
    )  # fmt: skip
    assert fuse(block).saved == ("r",)
    cheap = replace(block, saved=("r", "p", "q"))
    assert set(fuse(cheap).saved) == {"p", "q"}


def test_a_group_never_spans_a_matmul_it_depends_on():
    """a -> mm -> c with a also read by c: one group would have to run before and after the matmul."""
    nodes = (_node("a", "x", "a"), _node("mm", "a", "m", "gemm"), _node("c", "a m", "out"))
    block = Block(
        kind_id="b", role="layer", nodes=nodes, tensors=(_tensor("x", kind="input"), *map(_tensor, ("a", "m", "out"))), inputs=("x",),
        outputs=("out",), saved=(),
    )  # fmt: skip
    assert len(fuse(block).nodes) == 3


def test_sums_of_partial_gradients_stay_apart():
    fused = fuse(gpt_layer(separate=True))
    ids = {node.node_id for node in fused.nodes}
    assert {"n1.grad:qk/accumulate", "n1.grad/accumulate"} <= ids
    assert len(fused.nodes) < len(gpt_layer(separate=True).nodes)


def _blocks():
    yield from ((f"gpt-{separate}", gpt_layer(separate=separate)) for separate in (False, True))
    for name in ("llama3-8b", "gpt2"):
        yield from ((f"{name}-{block.kind_id}", block) for block in spec_graph(resolve(name), sequence=128).kinds)


@pytest.mark.parametrize(("name", "block"), list(_blocks()))
def test_fused_blocks_are_whole_programs(name: str, block: Block):
    """Every kernel reads what exists; backward reads nothing of forward that is not saved; flops and results are unchanged."""
    fused = fuse(block)
    made = {tensor for node in block.nodes for tensor in node.outputs}
    given = {tensor.tensor_id for tensor in fused.tensors} - made
    exist = set(given)
    for node in (node for node in fused.nodes if node.phase == "forward"):
        assert set(node.inputs) <= exist, node
        exist |= set(node.outputs)
    assert set(fused.saved) <= exist
    assert set(block.outputs) <= exist
    exist = given | set(fused.saved)
    for node in (node for node in fused.nodes if node.phase == "backward"):
        assert set(node.inputs) <= exist, node
        exist |= set(node.outputs)
    read = {tensor for node in block.nodes for tensor in node.inputs}
    results = {tensor for node in block.nodes if node.phase == "backward" for tensor in node.outputs if tensor not in read}
    assert results <= exist
    for phase in ("forward", "backward"):
        assert fused.flops(phase) == block.flops(phase)
        assert sum(node.phase == phase for node in fused.nodes) <= sum(node.phase == phase for node in block.nodes)


def _saved_bytes(block: Block) -> float:
    sizes = {"compute": 2, "fp32": 4, "int64": 8, "bool": 1}
    return sum(block.tensor(name).num_elements * sizes[block.tensor(name).dtype] for name in block.saved)


def test_llama_layer_saves_what_hand_written_kernels_save():
    """Per token of a Llama layer: both norm inputs and outputs, q, k, v, attention output, gate, up and their product, 2 bytes each; three fp32 statistics."""
    block = next(block for block in spec_graph(resolve("llama3-8b"), sequence=128).kinds if block.role == "layer")
    hidden, ffn, kv, heads = 4096, 14336, 1024, 32
    per_token = 2 * (4 * hidden + 2 * hidden + 2 * kv + 3 * ffn) + 4 * (2 + heads)
    assert _saved_bytes(fuse(block)) == 128 * per_token
    assert _saved_bytes(block) > 1.2 * 128 * per_token


def test_both_gradients_of_a_gated_mlp_are_one_kernel():
    block = fuse(next(block for block in spec_graph(resolve("llama3-8b"), sequence=128).kinds if block.role == "layer"))
    gate, up = "mlp.gate_proj/mm.0.grad", "mlp.up_proj/mm.0.grad"
    assert any({gate, up} <= set(node.outputs) for node in block.nodes)
