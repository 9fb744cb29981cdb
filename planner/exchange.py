"""Exchanges: the communication that dividing a block by the mesh makes necessary, inserted between its kernels.

    partial sum     a matmul that contracts a tp-divided loop (or a look-up in a tp-divided table) leaves one addend a rank: all-reduce, or
                    reduce-scatter over the tokens under sequence parallelism. Addends of one gradient (q, k, v; gate, up) are summed
                    before the exchange under sequence parallelism (the gather they belong to is one operation) and where the engine
                    fuses the weights; otherwise each is reduced by itself, as DTensor does.
    gather          under sequence parallelism a kernel with a tp axis needs its other inputs for all tokens: one all-gather a tensor and
                    phase. In backward it is gathered again unless the engine keeps the gathered tensor.
    statistics      a row statistic over a tp-divided row is an all-reduce of 4 bytes a token; a vocabulary-parallel cross-entropy needs three (maximum,
                    sum of exponentials, logit of the label: Megatron-LM core/tensor_parallel/cross_entropy.py).
    routing         with ep > 1 the rows that experts read and write cross an all-to-all: dispatch and combine, forward and backward.
                    Balanced routing is assumed.
    waits           what overlaps must have arrived before its first reader: a `wait` of no bytes stands there.
    context         ring: cp-1 steps that pass K and V on beside the attention of all steps but the last (backward passes K, V and their gradients, and
                    after the last step the gradients go home); all_to_all: q, k, v before and the output after attention (backward: the gradient
                    of the output before, those of q, k, v after).

Names: `t@whole` is the gathered copy of tensor t, `t@partial` its addend, `t@routed` its rows at the experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from costmodel.engine import Engine
from costmodel.work import DTYPE_BYTES
from planner.division import Division, has_tokens
from planner.graph import Block, Node, Tensor
from planner.sums import is_partial, partial_sums

MATMULS = frozenset({"gemm", "grouped_gemm", "conv"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One communication call: reads `inputs`, makes `outputs`. `count` equal calls follow one another."""

    node_id: str
    kind: str
    axis: str
    full_bytes: float
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    dtype: str = "bf16"
    overlaps: bool = False
    count: int = 1


Item = Node | Exchange


def base(name: str) -> str:
    """The tensor that a physical name belongs to."""
    stem, _, suffix = name.rpartition("@")
    return stem if suffix in ("whole", "partial", "routed") else name


def is_whole(name: str) -> bool:
    """Whether a physical name is held for all tokens of the sequence-parallel group."""
    return name.endswith(("@whole", "@partial"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanger:
    """Inserts exchanges into the nodes of one block.

    `partial`: tensor -> the axis over which it is summed ("tp" or "ep"); `deferred`: those of them that kernels add up before the
    exchange; `wgrads`: forward id -> its weight-gradient matmul; `normalised`: results of a softmax.
    """

    division: Division
    engine: Engine
    tensors: dict[str, Tensor]
    partial: dict[str, str]
    deferred: frozenset[str]
    wgrads: dict[str, Node] = field(default_factory=dict)
    normalised: frozenset[str] = frozenset()

    def insert(self, nodes: tuple[Node, ...], available: frozenset[str] = frozenset()) -> tuple[Item, ...]:
        """`nodes` of one phase with exchanges; `available` are physical names (`t@whole`, `t@routed`) that already exist."""
        items: list[Item] = []
        here = set(available)
        for node in nodes:
            for gather in self._gathers(node, here):
                items.append(gather)
                here.update(gather.outputs)
            before, after = self._context(node)
            items.extend(before)
            items.append(self._physical(node, here))
            items.extend(after)
            items.extend(self._statistics(node))
            items.extend(self._reduction(name, node.phase) for name in node.outputs if name in self.partial and name not in self.deferred)
        return _with_waits(items)

    def _is_split(self, node: Node) -> bool:
        if node.op in MATMULS or node.op == "attention":
            return self.division.is_whole(node)
        return any(self.division.is_split(self.division.axes(self.tensors[name])) for name in (*node.inputs, *node.outputs))

    def _wants(self, node: Node) -> Iterator[tuple[str, str]]:
        """(tensor, suffix) of the inputs that `node` needs in another form than their owner holds."""
        split = self.division.sequence_parallel and self._is_split(node)
        for name in node.inputs:
            tensor = self.tensors[name]
            if name in self.deferred or tensor.kind not in ("activation", "input") or not has_tokens(tensor):
                continue
            if node.op == "grouped_gemm" and self.division.ep > 1:
                if name not in self.division.routed:
                    yield name, "routed"
            elif split and tensor.dtype == "compute" and _per_row(tensor) and not self.division.is_split(self.division.axes(tensor)):
                yield name, "whole"

    def _gathers(self, node: Node, here: set[str]) -> Iterator[Exchange]:
        partner = self.wgrads.get(node.forward_id) if node.role == "dgrad" and self.engine.overlap_tensor_parallel else None
        wanted = [(name, suffix, False) for name, suffix in self._wants(node)]
        if partner is not None:
            now = {name for name, _, _ in wanted}
            wanted += [(name, suffix, suffix == "whole") for name, suffix in self._wants(partner) if name not in now]
        for name, suffix, overlaps in wanted:
            if f"{name}@{suffix}" in here:
                continue
            tensor = self.tensors[name]
            whole = suffix == "whole"
            yield Exchange(
                node_id=f"{name}/{'all_gather' if whole else 'dispatch'}", kind="all_gather" if whole else "all_to_all", axis="tp" if whole else "ep",
                full_bytes=self.division.num_bytes(tensor, whole=whole), inputs=(name,), outputs=(f"{name}@{suffix}",),
                dtype=self.division.compute_dtype, overlaps=overlaps,
            )  # fmt: skip

    def _physical(self, node: Node, here: set[str]) -> Node:
        """`node` reading and writing physical names."""
        forms = {name: f"{name}@{suffix}" for name, suffix in self._wants(node)}
        forms.update({name: f"{name}@partial" for name in (*node.inputs, *node.outputs) if name in self.deferred})
        written = {name: f"{name}@partial" for name in node.outputs if name in self.partial}
        return replace(
            node,
            inputs=tuple(forms.get(name, name) for name in node.inputs),
            outputs=tuple(written.get(name, name) for name in node.outputs),
        )

    def _reduction(self, name: str, phase: str) -> Exchange:
        axis, tensor = self.partial[name], self.tensors[name]
        scatter = self.division.sequence_parallel and _per_row(tensor)
        kind = "all_to_all" if axis == "ep" else "reduce_scatter" if scatter else "all_reduce"
        return Exchange(
            node_id=f"{name}/{'combine' if axis == 'ep' else kind}", kind=kind, axis=axis,
            full_bytes=self.division.num_bytes(tensor, whole=axis == "tp"), inputs=(f"{name}@partial",), outputs=(name,),
            dtype=self.division.compute_dtype, overlaps=axis == "tp" and self.engine.overlap_tensor_parallel and phase == "backward",
        )  # fmt: skip

    def _statistics(self, node: Node) -> Iterator[Exchange]:
        """All-reduces of per-row numbers of kernels that reduce over a tp-divided row."""
        if self.division.tp == 1 or node.op in MATMULS or node.op in ("attention", "embedding") or not self._is_split(node):
            return
        if node.op in ("cross_entropy", "softmax"):
            logits = next((self.tensors[name] for name in node.inputs if "vocab" in self.tensors[name].axes), None)
            if logits is not None and node.phase == "forward":
                rows = self.division.num_elements(logits) * self.division.tp / logits.shape[logits.axes.index("vocab")]
                parts = ("label",) if node.inputs[0] in self.normalised else ("maximum", "sum", "label")
                for what in parts if node.op == "cross_entropy" else parts[:2]:
                    yield Exchange(node_id=f"{node.node_id}/{what}", kind="all_reduce", axis="tp", full_bytes=4.0 * rows, dtype="fp32")
            return
        for name in node.outputs:
            tensor = self.tensors[name]
            if _per_row(tensor) and tensor.dtype == "fp32" and not self.division.is_split(self.division.axes(tensor)):
                size = self.division.num_bytes(tensor, whole=True)
                yield Exchange(node_id=f"{name}/all_reduce", kind="all_reduce", axis="tp", full_bytes=size, dtype="fp32")

    def _context(self, node: Node) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
        """Communication of context parallelism before and after an attention node."""
        if node.op != "attention" or self.division.cp == 1:
            return (), ()
        cp, backward = self.division.cp, node.phase == "backward"
        size, local = DTYPE_BYTES[self.division.compute_dtype], replace(self.division, all_to_all=False).loops(node)
        keys = local["batch"] * local["kv_heads"] * -(-local["kv"] // cp) * size
        key_bytes, value_bytes = float(keys * local["head_dim"]), float(keys * local["v_dim"])
        queries = float(local["batch"] * local["heads"] * local["q"] * size)
        if not self.division.all_to_all:
            scale = 2.0 if backward else 1.0
            ring = self._exchange(node, "ring", "p2p", scale * (key_bytes + value_bytes), overlaps=True)
            home = self._exchange(node, "home", "p2p", key_bytes + value_bytes)
            return (replace(ring, count=cp - 1),), ((home,) if backward else ())
        parts = (("q", queries * local["head_dim"]), ("k", key_bytes), ("v", value_bytes))
        projections = tuple(self._exchange(node, name, "all_to_all", amount) for name, amount in parts)
        output = (self._exchange(node, "out", "all_to_all", queries * local["v_dim"]),)
        return (output, projections) if backward else (projections, output)

    def _exchange(self, node: Node, what: str, kind: str, full_bytes: float, *, overlaps: bool = False) -> Exchange:
        return Exchange(
            node_id=f"{node.node_id}/{what}",
            kind=kind,
            axis="cp",
            full_bytes=full_bytes,
            dtype=self.division.compute_dtype,
            overlaps=overlaps,
        )


def _with_waits(items: list[Item]) -> tuple[Item, ...]:
    """`items` with a wait before the first reader of what an overlapping exchange makes."""
    pending: dict[str, str] = {}
    result: list[Item] = []
    for item in items:
        late = [name for name in item.inputs if name in pending]
        if late:
            result.append(_wait(item.node_id, pending[late[0]]))
            pending = {name: axis for name, axis in pending.items() if axis != pending[late[0]]}
        result.append(item)
        if isinstance(item, Exchange) and item.overlaps:
            pending.update(dict.fromkeys(item.outputs, item.axis))
    return tuple(result)


def _wait(node_id: str, axis: str) -> Exchange:
    return Exchange(node_id=f"{node_id}/wait", kind="wait", axis=axis, full_bytes=0.0)


def _per_row(tensor: Tensor) -> bool:
    """Whether sequence parallelism divides the tensor: it has a sequence dimension of a batch (a rope table has no batch)."""
    return "tokens" in tensor.axes or ("sequence" in tensor.axes and "batch" in tensor.axes)


def exchanger(block: Block, division: Division, engine: Engine) -> Exchanger:
    """The exchanges of `block` under `division`, by the rules of this module."""
    tensors = {tensor.tensor_id: tensor for tensor in block.tensors}
    sums = set(partial_sums(block))
    partial: dict[str, str] = {}
    deferred: set[str] = set()
    for node in block.nodes:
        routed = node.op == "grouped_gemm" and division.ep > 1
        if is_partial(node, tensors) or _reduces(node, tensors, division):
            axis = "ep" if routed else "tp" if division.tp > 1 else ""
            whole = [name for name in node.outputs if has_tokens(tensors[name]) and not division.is_split(tensors[name].axes)]
            partial.update({name: axis for name in whole if axis})
        elif node.node_id in sums and all(name in partial for name in node.inputs):
            axis = partial[node.inputs[0]]
            if axis == "ep" or division.sequence_parallel or engine.fused_input_gradient:
                deferred.update(node.inputs)
                partial.update(dict.fromkeys(node.outputs, axis))
    wgrads = {node.forward_id: node for node in block.nodes if node.role == "wgrad" and node.op in MATMULS}
    normalised = frozenset(name for node in block.nodes if node.op == "softmax" and node.phase == "forward" for name in node.outputs)
    return Exchanger(
        division=division,
        engine=engine,
        tensors=tensors,
        partial=partial,
        deferred=frozenset(deferred),
        wgrads=wgrads,
        normalised=normalised,
    )


def _reduces(node: Node, tensors: dict[str, Tensor], division: Division) -> bool:
    """Whether a kernel that is no matmul adds up over a tp-divided axis into rows of the compute dtype (the gradient of a broadcast over heads)."""
    if node.op in MATMULS or node.op in ("attention", "embedding", "cross_entropy") or division.tp == 1:
        return False
    split = any(division.is_split(division.axes(tensors[name])) for name in node.inputs)
    rows = (tensors[name] for name in node.outputs)
    return split and any(_per_row(t) and t.dtype == "compute" and not division.is_split(division.axes(t)) for t in rows)
