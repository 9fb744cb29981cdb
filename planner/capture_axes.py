"""Dimensions of all values of a trace as equivalence classes of factors, and the facts that matter about them: what is contracted, reduced, looked up.

planner.capture_rules fills an `Axes` from a trace, planner.capture_roles reads from it which dims are batch, sequence, heads, ffn, vocab or experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from planner.capture_atoms import Atoms, Leaves, Storage
from planner.capture_trace import Record, Strided

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

    def knows(self, value: Strided) -> bool:
        """Whether the storage of `value` has dims already."""
        return value.storage in self._storages

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

    def cut(self, record: Record) -> None:
        """A view that takes one of several unequal pieces of a dim."""
        for key, (_, length), out in _slices(record):
            if key in self._unequal:
                self.dims(record.inputs[0])
                storage, size, stride = key
                self._storages[storage].cut(size, stride, out.offset, length)

    # -- rules -----------------------------------------------------------------------------------------------------------------------

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

    def matmul(self, index: int, record: Record) -> None:
        """(groups or batch) m x k times k x n, with a bias of n."""
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

    def attention(self, record: Record) -> None:
        """softmax(q k^T) v on (batch, heads, sequence, d); key-value heads are the major factor of query heads."""
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
