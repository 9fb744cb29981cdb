"""Siblings: linears that read the same input become one matmul, as engines with fused weights run them (Megatron's linear_qkv, and gate and up in linear_fc1).

Forward: one matmul whose columns are those of all siblings. Backward: one input gradient, which contracts all their columns and so needs no kernels that add up
the parts, followed by one weight gradient. Only matmuls divided by tensor parallelism in the same way are siblings: (q, k, v) and (gate, up). The sizes
of the merged loop add up, so heads and kv_heads must be divided alike (tp at most the number of kv heads; the caller sees to it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.graph import Block, Loop, Node, Tensor

_GROUP = {"heads": "heads", "kv_heads": "heads", "ffn": "ffn"}


def merge_siblings(block: Block) -> Block:
    """`block` with sibling linears merged: the same flops and saved tensors, fewer kernels."""
    tensors = {tensor.tensor_id: tensor for tensor in block.tensors}
    nodes = block.nodes
    for group in _siblings(nodes, tensors):
        nodes = _merged(nodes, group)
    used = {name for node in nodes for name in (*node.inputs, *node.outputs)} | set(block.saved) | set(block.inputs) | set(block.outputs)
    kept = tuple(tensor for tensor in block.tensors if tensor.tensor_id in used or tensor.kind == "parameter")
    return replace(block, nodes=nodes, tensors=kept)


def _siblings(nodes: tuple[Node, ...], tensors: dict[str, Tensor]) -> list[tuple[Node, ...]]:
    groups: dict[tuple[str, str, Loop], list[Node]] = {}
    for node in nodes:
        loop = {item.name: item for item in node.loops}
        weights = [name for name in node.inputs if tensors[name].kind == "parameter"]
        sources = [name for name in node.inputs if tensors[name].kind != "parameter"]
        if node.op == "gemm" and node.phase == "forward" and weights and len(sources) == 1 and loop["n"].axis in _GROUP:
            groups.setdefault((sources[0], _GROUP[loop["n"].axis], loop["m"]), []).append(node)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _merged(nodes: tuple[Node, ...], group: tuple[Node, ...]) -> tuple[Node, ...]:
    ids = {node.node_id for node in group}
    name = "+".join(node.node_id for node in group)
    dgrads = [node for node in nodes if node.forward_id in ids and node.op == "gemm" and node.role == "dgrad"]
    wgrads = [node for node in nodes if node.forward_id in ids and node.op == "gemm" and node.role == "wgrad"]
    sums, total = _sums(nodes, dgrads)
    if len(dgrads) > 1 and not total:
        dgrads = []
    backward = []
    if dgrads:
        backward.append(_one(dgrads, "k", f"{name}:dgrad", name, outputs=(total,)))
    if wgrads:
        backward.append(_one(wgrads, "m", f"{name}:wgrad", name))
    gone = {node.node_id for node in (*dgrads, *wgrads, *sums)}
    last = max((index for index, node in enumerate(nodes) if node in (dgrads or wgrads)), default=-1)
    result: list[Node] = []
    for index, node in enumerate(nodes):
        if node.node_id == group[0].node_id:
            result.append(_one(group, "n", name, ""))
        elif node.node_id not in ids and node.node_id not in gone:
            result.append(replace(node, forward_id=name) if node.forward_id in ids else node)
        if index == last:
            result.extend(backward)
    return tuple(result)


def _one(nodes: Sequence[Node], loop: str, node_id: str, forward_id: str, outputs: tuple[str, ...] = ()) -> Node:
    """The merged node; `loop` is the one whose sizes add up."""
    size = sum(item.size for node in nodes for item in node.loops if item.name == loop)
    return replace(
        nodes[0],
        node_id=node_id,
        inputs=tuple(dict.fromkeys(name for node in nodes for name in node.inputs)),
        outputs=outputs or tuple(name for node in nodes for name in node.outputs),
        loops=tuple(replace(item, size=size) if item.name == loop else item for item in nodes[0].loops),
        flops=sum(node.flops for node in nodes),
        forward_id=forward_id,
    )


def _sums(nodes: tuple[Node, ...], dgrads: Sequence[Node]) -> tuple[list[Node], str]:
    """The kernels that add up the outputs of `dgrads` and nothing else, and the total ("" when they do not all meet in one)."""
    loose = {name for node in dgrads for name in node.outputs}
    if len(loose) == 1:
        return [], next(iter(loose))
    absorbed = []
    for node in nodes:
        if node.op == "elementwise" and len(node.inputs) > 1 and loose.issuperset(node.inputs):
            absorbed.append(node)
            loose = loose - set(node.inputs) | set(node.outputs)
    return (absorbed, next(iter(loose))) if len(loose) == 1 else ([], "")
