"""Partial sums: where tensor parallelism leaves every rank with one addend of a tensor, and where the addends may be added up before they are reduced."""

from __future__ import annotations

from dataclasses import replace

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


def sum_partials_first(block: Block) -> Block:
    """`block` with every tree of gradient additions reordered so that partial sums are added to one another before anything else is.

    Addition commutes, and engines do it so: the gradient of a gathered (or replicated) tensor is complete, and reduced once, before the residual's is added.
    """
    tensors = {tensor.tensor_id: tensor for tensor in block.tensors}
    partial = {name for node in block.nodes if is_partial(node, tensors) for name in node.outputs}
    adds = _additions(block, tensors)
    nodes = list(block.nodes)
    for root in [node for node in adds.values() if not _absorbed(node.outputs[0], adds, block)]:
        members, leaves = _tree(root, adds, block)
        if len(members) > 1 and 2 <= sum(name in partial for name in leaves) < len(leaves):
            nodes = _rebuilt(nodes, members, sorted(leaves, key=lambda name: name not in partial))
    return replace(block, nodes=tuple(nodes))


def _additions(block: Block, tensors: dict[str, Tensor]) -> dict[str, Node]:
    """Output -> kernel that adds two gradients: elementwise, backward, and neither operand is of the forward pass."""
    forward = {name for node in block.nodes if node.phase == "forward" for name in (*node.inputs, *node.outputs)}
    return {
        node.outputs[0]: node
        for node in block.nodes
        if node.phase == "backward"
        and node.op == "elementwise"
        and len(node.inputs) == 2
        and len(node.outputs) == 1
        and all(name not in forward and tensors[name].shape == tensors[node.outputs[0]].shape for name in node.inputs)
    }


def _absorbed(name: str, adds: dict[str, Node], block: Block) -> bool:
    """Whether `name` is read by one addition and nothing else."""
    readers = [node for node in block.nodes if name in node.inputs]
    return len(readers) == 1 and adds.get(readers[0].outputs[0]) is readers[0]


def _tree(root: Node, adds: dict[str, Node], block: Block) -> tuple[list[Node], list[str]]:
    """The additions that end in `root`, and what they add up."""
    members, leaves = [root], []
    for name in root.inputs:
        if name in adds and _absorbed(name, adds, block):
            inner, below = _tree(adds[name], adds, block)
            members = inner + members
            leaves += below
        else:
            leaves.append(name)
    return members, leaves


def _rebuilt(nodes: list[Node], members: list[Node], leaves: list[str]) -> list[Node]:
    """The same additions as a chain over `leaves`, each as early as its operands allow."""
    gone = {node.node_id for node in members}
    result = [node for node in nodes if node.node_id not in gone]
    total = leaves[0]
    for node, leaf in zip(members, leaves[1:], strict=True):
        made = replace(node, inputs=(total, leaf))
        last = max((index for index, other in enumerate(result) if not {total, leaf}.isdisjoint(other.outputs)), default=-1)
        first = next(index for index, other in enumerate(result) if other.phase == "backward")
        result.insert(max(last + 1, first), made)
        total = node.outputs[0]
    return result
