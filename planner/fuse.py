"""Kernel fusion: what TransformerEngine, Liger or torch.compile make of a block of eager kernels.

*Groups.* Memory-bound kernels (norm, softmax, elementwise, reduce, cross-entropy, copy) that feed one another become one kernel that reads what comes from
outside the group and writes what is read outside it. Matmuls, attention, embeddings and gathers are barriers; so is a place where tensor parallelism may
communicate: between a tensor with a tp axis and one without, and around the sum of partial input gradients. A group is maximal and *convex* (no path leaves
and re-enters it): with depth(n) = max over producers p in the same pass of depth(p) + [p -> n may not fuse], the groups are the connected
components of fusable edges, all at one depth, and a path that leaves a component can only come back at a greater depth. Components of one depth that read the
same activation are joined too (the two gradients of SwiGLU): for the same reason no path leads from one to the other.

*Saved tensors.* What eager autograd keeps inside a group need not be kept when backward can compute it again inside its own kernel from what the group reads:
such tensors are replaced by the inputs of the group they depend on, if those weigh less than what they replace (inputs that are kept anyway weigh nothing). Row
statistics (at most 1/16 of the elements of the largest tensor of their group) and random masks are kept, since another pass over the row, or the same random
numbers, would be needed. So an RMSNorm keeps its input and one statistic a row, SwiGLU keeps gate and up, cross-entropy keeps the logits: the
min-cut of torch.compile (torch._functorch.partitioners) restricted to single kernels, and what the hand-written kernels do.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace

from planner.graph import TENSOR_PARALLEL_AXES, Block, Node, Tensor
from planner.sums import partial_sums

FUSABLE = frozenset({"norm", "softmax", "elementwise", "reduce", "cross_entropy", "copy"})
_PRECEDENCE = ("cross_entropy", "softmax", "norm", "reduce", "elementwise", "copy")
_STATISTIC_RATIO = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """Lookups over one block."""

    tensors: dict[str, Tensor]
    makers: dict[str, Node]
    readers: dict[str, tuple[Node, ...]]
    sums: frozenset[str]

    def is_split(self, node: Node) -> bool:
        names = (*node.inputs, *node.outputs)
        return any(not TENSOR_PARALLEL_AXES.isdisjoint(self.tensors[name].axes) for name in names)

    def fusable(self, node: Node) -> bool:
        return node.op in FUSABLE and node.node_id not in self.sums


def fuse(block: Block) -> Block:
    """`block` after fusion: fewer kernels, fewer saved tensors, the same flops."""
    view = _view(block)
    group_of = _groups(block.nodes, view)
    saved, substitutes = _shed(block, view, group_of)
    nodes = tuple(_substitute(node, substitutes) for node in block.nodes)
    keep = {name for node in nodes for name in node.inputs} | set(block.outputs) | set(saved)
    fused: list[Node] = []
    for phase in ("forward", "backward"):
        members: dict[int, list[Node]] = {}
        for node in nodes:
            if node.phase == phase:
                members.setdefault(group_of[node.node_id], []).append(node)
        fused.extend(_ordered([_kernel(group, nodes, keep) for group in members.values()]))
    used = {name for node in fused for name in (*node.inputs, *node.outputs)} | set(saved) | set(block.inputs) | set(block.outputs)
    tensors = tuple(tensor for tensor in block.tensors if tensor.tensor_id in used or tensor.kind == "parameter")
    return replace(block, nodes=tuple(fused), tensors=tensors, saved=saved)


def _view(block: Block) -> _View:
    readers: dict[str, list[Node]] = {}
    for node in block.nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    return _View(
        tensors={tensor.tensor_id: tensor for tensor in block.tensors},
        makers={name: node for node in block.nodes for name in node.outputs},
        readers={name: tuple(nodes) for name, nodes in readers.items()},
        sums=frozenset(partial_sums(block)),
    )


def _groups(nodes: tuple[Node, ...], view: _View) -> dict[str, int]:
    """Group number of every node: the index of its first member."""
    depth: dict[str, int] = {}
    parent: dict[str, str] = {node.node_id: node.node_id for node in nodes}

    def root(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    def joins(maker: Node, node: Node) -> bool:
        return view.is_split(maker) == view.is_split(node) and view.fusable(maker) and view.fusable(node)

    index = {node.node_id: position for position, node in enumerate(nodes)}
    makers_of: dict[str, list[Node]] = {}
    for node in nodes:
        makers = [view.makers[name] for name in node.inputs if name in view.makers]
        makers_of[node.node_id] = [maker for maker in makers if maker.phase == node.phase and index[maker.node_id] < index[node.node_id]]
        depth[node.node_id] = max((depth[maker.node_id] + (not joins(maker, node)) for maker in makers_of[node.node_id]), default=0)
    _sink(nodes, makers_of, depth, joins)
    for node in nodes:
        for maker in makers_of[node.node_id]:
            if joins(maker, node) and depth[maker.node_id] == depth[node.node_id]:
                first, second = sorted((root(maker.node_id), root(node.node_id)), key=index.__getitem__)
                parent[second] = first
    readers: dict[tuple[str, str, int, bool], str] = {}
    for node in nodes:
        for name in node.inputs:
            if view.fusable(node) and _is_activation(view.tensors[name]):
                key = (name, node.phase, depth[node.node_id], view.is_split(node))
                first, second = sorted((root(readers.setdefault(key, node.node_id)), root(node.node_id)), key=index.__getitem__)
                parent[second] = first
    return {node.node_id: index[root(node.node_id)] for node in nodes}


def _sink(nodes: tuple[Node, ...], makers_of: dict[str, list[Node]], depth: dict[str, int], joins: Callable[[Node, Node], bool]) -> None:
    """Lower kernels that wait for nothing of their pass (a factor computed from a saved tensor) to where their result is first read."""
    free: set[str] = set()
    latest: dict[str, int] = {}
    for node in nodes:
        if node.op in FUSABLE and all(maker.node_id in free for maker in makers_of[node.node_id]):
            free.add(node.node_id)
    for node in reversed(nodes):
        if node.node_id in free:
            depth[node.node_id] = max(depth[node.node_id], latest.get(node.node_id, 0))
        for maker in makers_of[node.node_id]:
            bound = depth[node.node_id] - (not joins(maker, node))
            latest[maker.node_id] = min(latest.get(maker.node_id, bound), bound)


def _is_activation(tensor: Tensor) -> bool:
    """Per token of a batch: not a parameter, mask or table."""
    return tensor.kind in ("activation", "input") and not {"batch", "tokens"}.isdisjoint(tensor.axes)


def _kernel(group: list[Node], nodes: tuple[Node, ...], keep: set[str]) -> Node:
    """One kernel for `group`: reads what it does not make, writes what somebody else reads or nobody does (a result of the block)."""
    if len(group) == 1:
        return group[0]
    ids = {node.node_id for node in group}
    made = [name for node in group for name in node.outputs]
    outside = {name for node in nodes if node.node_id not in ids for name in node.inputs}
    written = tuple(name for name in made if name in outside or name not in keep)
    saved_only = tuple(name for name in made if name in keep and name not in written and name not in {n for g in group for n in g.inputs})
    reads = tuple(dict.fromkeys(name for node in group for name in node.inputs if name not in made))
    main = min(group, key=lambda node: _PRECEDENCE.index(node.op))
    return replace(
        main,
        op="norm" if main.op == "reduce" else main.op,
        inputs=reads,
        outputs=written + saved_only,
        flops=sum(node.flops for node in group),
        role="wgrad" if any(node.role == "wgrad" for node in group) else main.role,
    )


def _ordered(nodes: list[Node]) -> list[Node]:
    """Topological order that stays as close to the given one as possible."""
    position = {node.node_id: index for index, node in enumerate(nodes)}
    makers = {name: node for node in nodes for name in node.outputs}
    waiting = {node.node_id: {makers[name].node_id for name in node.inputs if name in makers} - {node.node_id} for node in nodes}
    readers: dict[str, list[Node]] = {}
    for node in nodes:
        for source in waiting[node.node_id]:
            readers.setdefault(source, []).append(node)
    ready = [position[node.node_id] for node in nodes if not waiting[node.node_id]]
    heapq.heapify(ready)
    ordered: list[Node] = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        ordered.append(node)
        for reader in readers.get(node.node_id, ()):
            waiting[reader.node_id].discard(node.node_id)
            if not waiting[reader.node_id]:
                heapq.heappush(ready, position[reader.node_id])
    assert len(ordered) == len(nodes), "fused kernels depend on one another in a circle"
    return ordered


def _shed(block: Block, view: _View, group_of: dict[str, int]) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """The saved tensors after fusion and, for every one given up, what backward reads instead."""
    candidates: dict[int, list[str]] = {}
    for name in block.saved:
        maker = view.makers.get(name)
        if maker is not None and _can_go(name, maker, view, group_of):
            candidates.setdefault(group_of[maker.node_id], []).append(name)
    saved = dict.fromkeys(block.saved)
    substitutes: dict[str, tuple[str, ...]] = {}
    for names in candidates.values():
        for batch in (names, *([name] for name in names)):
            live = [name for name in batch if name in saved]
            sources = {name: _sources(name, view, group_of, set(saved) - set(live)) for name in live}
            added = {source for found in sources.values() for source in found if source not in saved and _counts(view.tensors[source])}
            if live and _weight(added, view) < _weight(set(live), view):
                for name in live:
                    del saved[name]
                saved.update(dict.fromkeys(sorted(added)))
                substitutes.update(sources)
    return tuple(saved), substitutes


def _can_go(name: str, maker: Node, view: _View, group_of: dict[str, int]) -> bool:
    readers = view.readers.get(name, ())
    inside = all(group_of[node.node_id] == group_of[maker.node_id] for node in readers if node.phase == "forward")
    kernels = all(view.fusable(node) for node in readers if node.phase == "backward")
    return view.fusable(maker) and inside and kernels and not _is_kept(name, view, group_of)


def _is_kept(name: str, view: _View, group_of: dict[str, int]) -> bool:
    """Random masks and row statistics stay."""
    tensor, group = view.tensors[name], group_of[view.makers[name].node_id]
    if tensor.dtype == "bool":
        return True
    around = (other for maker in view.makers.values() if group_of[maker.node_id] == group for other in (*maker.inputs, *maker.outputs))
    return tensor.num_elements * _STATISTIC_RATIO <= max(view.tensors[other].num_elements for other in around)


def _counts(tensor: Tensor) -> bool:
    """Parameters and buffers are alive anyway."""
    return tensor.kind in ("activation", "input")


def _sources(name: str, view: _View, group_of: dict[str, int], saved: set[str]) -> tuple[str, ...]:
    """Inputs of the group, tensors it writes and statistics it keeps, from which `name` can be computed again."""
    group, found, stack = group_of[view.makers[name].node_id], dict[str, None](), [name]
    while stack:
        for source in view.makers[stack.pop()].inputs:
            maker = view.makers.get(source)
            inside = maker is not None and group_of[maker.node_id] == group and not _is_written(source, view, group_of)
            if inside and not (source in saved and _is_kept(source, view, group_of)):
                stack.append(source)
            else:
                found[source] = None
    return tuple(found)


def _is_written(name: str, view: _View, group_of: dict[str, int]) -> bool:
    """Whether the kernel of the group writes `name` to memory anyway, for a forward kernel of another group."""
    group = group_of[view.makers[name].node_id]
    return any(node.phase == "forward" and group_of[node.node_id] != group for node in view.readers.get(name, ()))


def _weight(names: set[str], view: _View) -> float:
    """Bytes, counting two for the compute dtype."""
    size = {"compute": 2, "fp32": 4, "int64": 8, "int32": 4, "fp64": 8}
    return float(sum(view.tensors[name].num_elements * size.get(view.tensors[name].dtype, 1) for name in names))


def _substitute(node: Node, substitutes: dict[str, tuple[str, ...]]) -> Node:
    if node.phase == "forward" or substitutes.keys().isdisjoint(node.inputs):
        return node
    inputs = dict.fromkeys(source for name in node.inputs for source in substitutes.get(name, (name,)))
    return replace(node, inputs=tuple(inputs))
