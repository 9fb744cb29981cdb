"""What every ATen operator says about dimensions: which are equal, which are contracted, which must stay whole.

`Axes.visit` applies one rule per operator to a trace (forward and backward alike). Afterwards planner.capture_roles reads from the equivalence classes which
dims are batch, sequence, heads, ffn, vocab or experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from planner.capture_atoms import Atoms, Leaves, Storage
from planner.capture_trace import Record, Strided, Trace

GEMMS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "grouped_mm_fallback"})
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
EFFICIENT = "_scaled_dot_product_efficient_attention"
ATTENTION = (FLASH, EFFICIENT)
ATTENTION_BACKWARD = (FLASH + "_backward", EFFICIENT + "_backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """Dims of one matmul: out (batch, m, n), contracted k; `weight` is the storage of the operand that is a parameter, or -1."""

    batch: Leaves
    m: Leaves
    n: Leaves
    k: Leaves
    weight: int = -1
    groups: Leaves = field(default_factory=list)
    sizes: tuple[int, int, int, int] = (1, 1, 1, 1)


class Axes:
    """Dims of every value of a trace. `parameters`: storages that are parameters."""

    def __init__(self, parameters: frozenset[int]) -> None:
        self.atoms = Atoms()
        self.parameters = parameters
        self.matmuls: dict[int, Matmul] = {}
        self.whole: list[Leaves] = []
        self.heads: list[Leaves] = []
        self.sequence: list[Leaves] = []
        self.classes: list[tuple[Leaves, Leaves]] = []
        self.gathered: list[Leaves] = []
        self.tables: list[tuple[Strided, Strided]] = []
        self._storages: dict[int, Storage] = {}
        self._unequal: set[tuple[int, int, int]] = set()
        self._pieces: dict[tuple[int, int, int], set[tuple[int, int]]] = {}

    # -- dims of values --------------------------------------------------------------------------------------------------------------

    def dims(self, value: Strided) -> list[Leaves]:
        """Leaves of every dim; an unknown storage gets fresh atoms."""
        if value.storage not in self._storages:
            self.define(value, [self.atoms.new_dim(size) for size in value.shape])
        found = self._storages[value.storage].dims(value.shape, value.strides, value.offset)
        return [self.atoms.leaves(dim) for dim in found]

    def define(self, value: Strided, dims: Sequence[Sequence[int]]) -> None:
        """Say what the dims of a new storage are; where it is known already, unify."""
        if value.storage in self._storages:
            for known, given in zip(self.dims(value), dims, strict=True):
                self.atoms.unify(known, given)
        else:
            self._storages[value.storage] = Storage(self.atoms, value.shape, value.strides, [self.atoms.leaves(dim) for dim in dims])

    def same(self, left: Strided, right: Strided) -> None:
        """Unify two values dim by dim, trailing dims first; a dim of size 1 is broadcast."""
        for one, two in zip(reversed(self.dims(left)), reversed(self.dims(right)), strict=False):
            if one and two:
                self.atoms.unify(one, two)

    def define_pairs(self, record: Record) -> None:
        """Gradients at a block's border have the dims of what they are gradients of."""
        for grad, value in zip((*record.args[0], *record.outputs), record.args[2], strict=True):
            if grad.shape == value.shape:
                self.define(grad, self.dims(value))

    def expect_cuts(self, records: Iterable[Record]) -> None:
        """Find the dims that are cut into unequal pieces (q, k and v of grouped-query attention in one weight)."""
        places: dict[tuple[int, int, int], set[tuple[int, int]]] = {}
        for record in records:
            for key, place, _ in _slices(record):
                places.setdefault(key, set()).add(place)
        self._pieces = places
        self._unequal = {
            key
            for key, found in places.items()
            if len({length for _, length in found}) > 1 or any(start % length for start, length in found)
        }

    def cut_gradient(self, out: Strided, where: int, view: Strided) -> None:
        """`view` is the part of the gradient `out` that one of several unequal pieces of dim `where` has."""
        size, length = out.shape[where], view.shape[where]
        if any(key[1] == size and any(part == length for _, part in self._pieces[key]) for key in self._unequal):
            self._storages[out.storage].cut(size, out.strides[where], view.offset, length)

    def _cut(self, record: Record) -> None:
        for key, (_, length), out in _slices(record):
            if key in self._unequal:
                self.dims(record.inputs[0])
                storage, size, stride = key
                self._storages[storage].cut(size, stride, out.offset, length)

    # -- rules -----------------------------------------------------------------------------------------------------------------------

    def visit(self, index: int, record: Record) -> None:
        """Apply the rule of record number `index`."""
        if record.view:
            self._cut(record)
            return
        if record.op in GEMMS:
            self._matmul(index, record)
        elif record.op in ATTENTION:
            self._attention(record)
        elif record.op in ATTENTION_BACKWARD:
            for grad in record.outputs:
                like = next((value for value in record.args[1:5] if isinstance(value, Strided) and value.shape == grad.shape), None)
                self.define(grad, self.dims(like) if like else [self.atoms.new_dim(size) for size in grad.shape])
        elif record.op in _RULES:
            _RULES[record.op](self, record)
        elif record.pointwise:
            self.broadcast(record)
        else:
            self.alike(record)

    def broadcast(self, record: Record) -> None:
        """Elementwise: every output has the dims of its operands."""
        for out in record.outputs:
            if out.storage not in self._storages:
                self.define(out, self._widest(out, record.inputs))
            for value in record.inputs:
                if len(value.shape) <= len(out.shape):
                    self.same(value, out)

    def _widest(self, out: Strided, inputs: Iterable[Strided]) -> list[Leaves]:
        dims: list[Leaves] = [[] for _ in out.shape]
        for value in inputs:
            shift = len(out.shape) - len(value.shape)
            for position, dim in enumerate(self.dims(value) if shift >= 0 else []):
                if dim and not dims[shift + position] and value.shape[position] == out.shape[shift + position]:
                    dims[shift + position] = dim
        return [dim if dim or size == 1 else self.atoms.new_dim(size) for dim, size in zip(dims, out.shape, strict=True)]

    def alike(self, record: Record) -> None:
        """No rule: an output has the dims of the first input of its shape; else dims are fresh, cropped or padded versions of the input's."""
        for out in record.outputs:
            like = next((value for value in record.inputs if value.shape == out.shape), None)
            self.define(out, self.dims(like) if like else self.resized(out, record.inputs[:1]))

    def resized(self, out: Strided, sources: Sequence[Strided]) -> list[Leaves]:
        """Dims of `out` taken from a value of the same rank: equal sizes are equal dims, others derive from it."""
        source = sources[0] if sources and len(sources[0].shape) == len(out.shape) else None
        dims = []
        for position, size in enumerate(out.shape):
            known = self.dims(source)[position] if source else []
            if source and source.shape[position] == size:
                dims.append(known)
            else:
                dims.append([] if size == 1 else [self.atoms.fresh(size, known[0] if len(known) == 1 else None)])
        return dims

    def _matmul(self, index: int, record: Record) -> None:
        args = [value for value in record.args if isinstance(value, Strided)]
        bias = args.pop(0) if record.op in ("addmm", "baddbmm") else None
        left, right, out = args[0], args[1], record.outputs[0]
        a, b = self.dims(left), self.dims(right)
        groups: Leaves = []
        if len(right.shape) == 3 and len(left.shape) == 2:
            groups = b[0]
        self.atoms.unify(a[-1], b[-2])
        if len(left.shape) == 3 and len(right.shape) == 3:
            self.atoms.unify(a[0], b[0])
        dims = [*(a[:1] if len(out.shape) == 3 and len(left.shape) == 3 else []), a[-2], b[-1]]
        if len(out.shape) == 3 and len(left.shape) == 2:
            dims = [self.atoms.new_dim(out.shape[0]), a[-2], b[-1]]
            groups = dims[0]
        self.define(out, dims)
        if bias is not None:
            self.same(bias, out)
        weight = next((value.storage for value in (right, left) if value.storage in self.parameters), -1)
        batch = a[0] if len(left.shape) == 3 else []
        sizes = (left.shape[0] if batch or len(left.shape) == 3 else 1, left.shape[-2], right.shape[-1], left.shape[-1])
        self.matmuls[index] = Matmul(batch=batch, m=a[-2], n=b[-1], k=a[-1], weight=weight, groups=groups, sizes=sizes)

    def _attention(self, record: Record) -> None:
        q, k, v = record.args[:3]
        dq, dk, dv = self.dims(q), self.dims(k), self.dims(v)
        for one, two in ((dq[0], dk[0]), (dk[0], dv[0]), (dk[1], dv[1]), (dk[2], dv[2]), (dq[3], dk[3])):
            self.atoms.unify(one, two)
        shared = dq[1]
        if q.shape[1] != k.shape[1]:
            parts = self.atoms.cut(dq[1], k.shape[1])
            shared = parts[0] if parts else []
        self.atoms.unify(shared, dk[1])
        self.define(record.outputs[0], [*dq[:3], dv[3]])
        if len(record.outputs) > 1 and record.outputs[1].shape == q.shape[:3]:
            self.define(record.outputs[1], dq[:3])
        self.heads.extend((dq[1], dk[1]))
        self.sequence.extend((dq[2], dk[2]))
        self.whole.append(dq[3])
        mask = record.kwargs.get("attn_mask") if record.op == FLASH else record.args[3]
        if isinstance(mask, Strided) and len(mask.shape) == 4:
            for dim, wanted in zip(self.dims(mask), (dq[0], dq[1], dq[2], dk[2]), strict=True):
                if dim:
                    self.atoms.unify(dim, wanted)


def _slices(record: Record) -> Iterator[tuple[tuple[int, int, int], tuple[int, int], Strided]]:
    """((storage, size, stride) of the dim, (start, length), result) for every narrower part of a dim that a view takes."""
    if record.op not in ("slice", "split", "split_with_sizes", "narrow"):
        return
    source = record.inputs[0]
    for out in record.outputs:
        for size, stride, length, step in zip(source.shape, source.strides, out.shape, out.strides, strict=True):
            if 0 < length < size and step == stride > 0:
                yield (source.storage, size, stride), (out.offset // stride % size, length), out


def _reduced(ndim: int, dims: Any) -> tuple[int, ...]:
    if dims is None or dims == ():
        return tuple(range(ndim))
    return tuple(dim % ndim for dim in (dims if isinstance(dims, tuple) else (dims,))) if ndim else ()


def _reduce(axes: Axes, record: Record) -> None:
    source = record.args[0]
    dims = axes.dims(source)
    which = record.args[1] if len(record.args) > 1 and not isinstance(record.args[1], Strided) else None
    gone = _reduced(len(dims), record.kwargs.get("dim", which))
    if record.phase == "forward":
        axes.whole.extend(dims[position] for position in gone)
    kept = [dim for position, dim in enumerate(dims) if position not in gone]
    widened = [[] if position in gone else dim for position, dim in enumerate(dims)]
    for out in record.outputs:
        axes.define(out, widened if len(out.shape) == len(dims) else kept)


def _softmax(axes: Axes, record: Record) -> None:
    source, dim = record.args[0], record.args[1]
    dims = axes.dims(source)
    axes.define(record.outputs[0], dims)
    axes.whole.append(dims[dim])
    rows = [leaf for position, found in enumerate(dims) if position != dim % len(dims) for leaf in found]
    if record.op == "_log_softmax":
        axes.classes.append((rows, dims[dim]))


def _norm(axes: Axes, record: Record) -> None:
    source, count = record.args[0], len(record.args[1])
    dims = axes.dims(source)
    axes.whole.extend(dims[-count:])
    for value in record.args[2:4]:
        if isinstance(value, Strided):
            axes.define(value, dims[-count:])
    for out in record.outputs:
        axes.define(out, dims if out.shape == source.shape else [*dims[:-count], *([[]] * count)])


def _norm_backward(axes: Axes, record: Record) -> None:
    dims = axes.dims(record.args[0])
    axes.define(record.args[1], dims)
    for out in record.outputs:
        axes.define(out, dims if len(out.shape) == len(dims) else dims[-len(out.shape) :])


def _embedding(axes: Axes, record: Record) -> None:
    weight, ids = record.args[:2]
    axes.define(record.outputs[0], [*axes.dims(ids), *axes.dims(weight)[1:]])
    axes.tables.append((weight, ids))


def _embedding_backward(axes: Axes, record: Record) -> None:
    grad, ids = record.args[:2]
    for one, two in zip(axes.dims(grad), axes.dims(ids), strict=False):
        axes.atoms.unify(one, two)
    out = record.outputs[0]
    axes.define(out, [axes.atoms.new_dim(out.shape[0]), axes.dims(grad)[-1]])


def _cat(axes: Axes, record: Record) -> None:
    parts = [value for value in record.args[0] if prod(value.shape)]
    out = record.outputs[0]
    where = (record.args[1] if len(record.args) > 1 else 0) % len(out.shape)
    dims = axes.dims(parts[0])
    for part in parts[1:]:
        for position, dim in enumerate(axes.dims(part)):
            if position != where or part.shape[where] == parts[0].shape[where]:
                axes.atoms.unify(dim, dims[position])
    if len(parts) > 1:
        equal = all(part.shape[where] == parts[0].shape[where] for part in parts)
        largest = max(parts, key=lambda part: part.shape[where])
        source = axes.dims(largest)[where]
        lead = [axes.atoms.fresh(len(parts))]
        dims[where] = [*lead, *dims[where]] if equal else [axes.atoms.fresh(out.shape[where], source[0] if source else None)]
    axes.define(out, dims)


def _stack(axes: Axes, record: Record) -> None:
    parts, out = record.args[0], record.outputs[0]
    where = (record.args[1] if len(record.args) > 1 else 0) % len(out.shape)
    for part in parts[1:]:
        axes.same(part, parts[0])
    dims = axes.dims(parts[0])
    dims.insert(where, axes.atoms.new_dim(len(parts)))
    axes.define(out, dims)


def _slice_backward(axes: Axes, record: Record) -> None:
    """The gradient is a view of the output: dims by the view's strides."""
    grad, out = record.args[0], record.outputs[0]
    if out.storage not in axes._storages:
        axes.define(out, axes.resized(out, [grad]))
    dim = record.args[2]
    where = dim % len(out.shape)
    start = record.args[3] % out.shape[where] if isinstance(record.args[3], int) else 0
    strides = out.strides
    if record.op == "select_backward":
        strides = tuple(stride for position, stride in enumerate(strides) if position != where)
    view = replace(out, shape=grad.shape, strides=strides, offset=out.offset + start * out.strides[where])
    if record.op == "slice_backward":
        axes.cut_gradient(out, where, view)
    axes.same(view, grad)


def _index(axes: Axes, record: Record) -> None:
    source, indices = record.args[0], record.args[1]
    places = [position for position, item in enumerate(indices) if isinstance(item, Strided)]
    dims = axes.dims(source)
    out = record.outputs[0]
    chosen = axes.dims(max((indices[place] for place in places), key=lambda value: prod(value.shape)))
    if source.storage in axes.parameters:
        axes.gathered.append(dims[places[0]])
    result = [*dims[: places[0]], *chosen, *dims[places[-1] + 1 :]]
    axes.define(out, result if len(result) == len(out.shape) else axes.resized(out, []))


def _gather(axes: Axes, record: Record) -> None:
    source, where, index = record.args[:3]
    for position, (one, two) in enumerate(zip(axes.dims(source), axes.dims(index), strict=True)):
        if position != where % len(source.shape) and source.shape[position] == index.shape[position]:
            axes.atoms.unify(one, two)
    axes.define(record.outputs[0], axes.dims(index))


def _top(axes: Axes, record: Record) -> None:
    source = record.args[0]
    numbers = [item for item in record.args[1:] if isinstance(item, int) and not isinstance(item, bool)]
    where = (numbers[1] if record.op == "topk" and len(numbers) > 1 else -1) % len(source.shape)
    dims = axes.dims(source)
    axes.whole.append(dims[where])
    for out in record.outputs:
        axes.define(
            out, [*dims[:where], axes.dims(record.outputs[0])[where] if out.shape != source.shape else dims[where], *dims[where + 1 :]]
        )


def _loss(axes: Axes, record: Record) -> None:
    logits, target = (record.args[0], record.args[1]) if record.op == "nll_loss_forward" else (record.args[1], record.args[2])
    dims = axes.dims(logits)
    if target.shape:
        axes.atoms.unify(dims[0], axes.dims(target)[0])
    if record.op == "nll_loss_backward":
        axes.define(record.outputs[0], dims)


def _convolution(axes: Axes, record: Record) -> None:
    source, weight, out = record.args[0], record.args[1], record.outputs[0]
    dims, kernel = axes.dims(source), axes.dims(weight)
    if record.args[8] == 1:
        axes.atoms.unify(dims[1], kernel[1])
    spatial = []
    for position in range(2, len(out.shape)):
        same = out.shape[position] == source.shape[position]
        spatial.append(dims[position] if same else axes.atoms.new_dim(out.shape[position]))
    axes.define(out, [dims[0], kernel[0], *spatial])
    axes.whole.extend((dims[1], kernel[0]))


def _convolution_backward(axes: Axes, record: Record) -> None:
    likes = (record.args[1], record.args[2])
    for out in record.outputs:
        like = next((value for value in likes if value.shape == out.shape), None)
        axes.define(out, axes.dims(like) if like else [axes.dims(record.args[2])[0]])


def _block(axes: Axes, record: Record) -> None:
    """A block seen from outside: outputs of an input's shape have its dims; others share the leading dim."""
    for out in record.outputs:
        like = next((value for value in record.inputs if value.shape == out.shape), None)
        if like is not None:
            axes.define(out, axes.dims(like))
            continue
        dims = [axes.atoms.new_dim(size) for size in out.shape]
        source = next((value for value in record.inputs if len(value.shape) > 1), None)
        if source is not None and dims and source.shape[0] == out.shape[0]:
            dims[0] = axes.dims(source)[0]
        axes.define(out, dims)


_RULES = {
    **dict.fromkeys(("sum", "mean", "amax", "amin", "max", "min", "var", "std", "var_mean", "linalg_vector_norm", "norm", "any", "all", "prod",
                     "argmax", "logsumexp"), _reduce),
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _norm),
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), _norm_backward),
    **dict.fromkeys(("slice_backward", "select_backward"), _slice_backward),
    **dict.fromkeys(("index", "_unsafe_index"), _index),
    **dict.fromkeys(("topk", "sort"), _top),
    **dict.fromkeys(("nll_loss_forward", "nll_loss_backward"), _loss),
    "embedding": _embedding, "embedding_dense_backward": _embedding_backward, "cat": _cat, "stack": _stack, "gather": _gather,
    "convolution": _convolution, "convolution_backward": _convolution_backward, "block": _block,
}  # fmt: skip


def understand(trace: Trace) -> Axes:
    """Visit a whole trace; the gradient of everything has the dims of what it is the gradient of."""
    axes = Axes(frozenset(value.storage for value in trace.parameters.values()))
    axes.expect_cuts(trace.records)
    for value in (*trace.parameters.values(), *trace.inputs.values(), *trace.buffers.values()):
        axes.dims(value)
    for index, record in enumerate(trace.records):
        if record.op == "block_backward":
            axes.define_pairs(record)
        elif record.phase == "forward":
            axes.visit(index, record)
    for value, grad in trace.grad_outputs:
        axes.define(grad, axes.dims(value))
    for index, record in enumerate(trace.records):
        if record.phase == "backward" and record.op != "block_backward":
            axes.visit(index, record)
    for name, grad in trace.grads.items():
        owner = trace.inputs.get(name.removeprefix("input:")) if name.startswith("input:") else trace.parameters[name]
        if owner is not None and owner.shape == grad.shape:
            axes.define(grad, axes.dims(owner))
    return axes
