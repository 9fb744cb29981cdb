"""Partial sums: where tensor parallelism leaves every rank with one addend of a tensor, and where the addends may be added up before they are reduced."""

from __future__ import annotations

from planner.graph import TENSOR_PARALLEL_AXES, Block, Node, Tensor


def is_partial(node: Node, tensors: dict[str, Tensor]) -> bool:
    """Whether `node` contracts a tp-divided loop (or looks up a tp-divided table) into an output without tp axis."""
    if any(not TENSOR_PARALLEL_AXES.isdisjoint(tensors[name].axes) for name in node.outputs):
        return False
    if node.op in ("gemm", "grouped_gemm", "conv"):
        return any(loop.name == "k" and loop.axis in TENSOR_PARALLEL_AXES for loop in node.loops)
    if node.op == "embedding" and node.phase == "forward":
        return any("vocab" in tensors[name].axes for name in node.inputs)
    return False


def partial_sums(block: Block) -> tuple[str, ...]:
    """Ids of the elementwise nodes that add partial sums of one phase, each addend read by nothing else (gradients of a tensor read by q, k and v)."""
    tensors = {tensor.tensor_id: tensor for tensor in block.tensors}
    readers: dict[str, int] = {}
    for node in block.nodes:
        for name in node.inputs:
            readers[name] = readers.get(name, 0) + 1
    partial: set[str] = set()
    found = []
    for node in block.nodes:
        if is_partial(node, tensors):
            partial.update(node.outputs)
        elif node.op == "elementwise" and len(node.inputs) > 1 and all(name in partial and readers[name] == 1 for name in node.inputs):
            partial.update(node.outputs)
            found.append(node.node_id)
    return tuple(found)
