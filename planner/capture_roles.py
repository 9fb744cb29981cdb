"""Which logical axis a dimension is: decided from the equivalence classes of planner.capture_axes, as Megatron would decide, without knowing any model.

A factor of a dim is *batch* or *sequence* when it is one of the model inputs' (or, for sequence, attention's query and key dims). It is *vocab* when it is
the row dim of an embedding table looked up with token ids, or the class dim of a token loss; *experts* when it is the group dim of a grouped or batched
matmul with parameters, or the rows, as many, of a parameter that is looked up beside it (biases of experts).

Tensor parallelism divides a factor that (1) one matmul with a parameter makes (columns) and (2) another contracts (rows), unless the factor must stay
whole: it is reduced by a norm, softmax or sum, contracted between two activations, or belongs to the residual stream (the last dim of what enters and
leaves a layer). Only the major factor of a dim is divided. Where a matmul would have both its columns and its rows divided (low-rank adapters), the factor
with fewer parameters at stake stays whole. It is *heads* (*kv_heads*) where attention has it as its head dim, else *ffn*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import prod

from planner.capture_atoms import Leaves
from planner.capture_axes import Axes
from planner.capture_trace import Record, Strided


class Roles:
    """Names dims. `batch`, `sequence`, `residual`: known dims; `tokens`: values of token ids; `divide`: look for heads and ffn (layers only)."""

    def __init__(
        self, axes: Axes, records: list[Record], *, batch: list[Leaves], sequence: list[Leaves], residual: list[Leaves],
        tokens: list[Strided], divide: bool,
    ) -> None:  # fmt: skip
        self._axes = axes
        self._records = records
        self.batch = self._set(batch)
        self.sequence = self._set([*sequence, *axes.sequence]) - self.batch
        forward = [axes.matmuls[index] for index, record in enumerate(records) if record.phase == "forward" and index in axes.matmuls]
        self._weighted = [matmul for matmul in forward if matmul.weight >= 0]
        groups = self._set(dim for matmul in self._weighted for dim in (matmul.groups, matmul.batch)) - self.batch - self.sequence
        sizes = {axes.atoms.size(leaf) for leaf in groups}
        self.experts = groups | {leaf for leaf in self._set(axes.gathered) if axes.atoms.size(leaf) in sizes}
        self.vocab = self._vocab(tokens) - self.experts
        pairs = [matmul for matmul in forward if matmul.weight < 0]
        tokens_axes = self.batch | self.sequence | self.experts
        self.heads = (self._set(axes.heads) | self._set(matmul.batch for matmul in pairs)) - tokens_axes
        whole = self._set([*axes.whole, *residual, *(matmul.k for matmul in pairs)]) | tokens_axes | self.vocab
        self.divided = self._divided(whole) if divide else frozenset()
        counts = {self._heads_in(dim) for dim in (*(matmul.n for matmul in self._weighted), *axes.heads)} - {0}
        self.num_heads, self.num_kv_heads = max(counts, default=0), min(counts, default=0)

    def _set(self, dims: Iterable[Leaves]) -> frozenset[int]:
        return frozenset(leaf for dim in dims for leaf in self._axes.atoms.leaves(dim))

    def _vocab(self, tokens: list[Strided]) -> frozenset[int]:
        dims = [dim for rows, dim in self._axes.classes if self._is_token(rows)]
        known = _derived(self._records, tokens)
        for weight, ids in self._axes.tables:
            if weight.storage in self._axes.parameters and ids.storage in known:
                dims.append(self._axes.dims(weight)[0])
        return self._set(dims) - self.batch - self.sequence

    def _is_token(self, rows: Leaves) -> bool:
        return any(self._origin(leaf) & self.sequence for leaf in self._axes.atoms.leaves(rows))

    def _origin(self, leaf: int) -> set[int]:
        """The leaf and everything it was cropped from."""
        atoms, found, stack = self._axes.atoms, set[int](), [leaf]
        while stack:
            for item in atoms.leaves([stack.pop()]):
                if item not in found:
                    found.add(item)
                    if item in atoms.source:
                        stack.append(atoms.source[item])
        return found

    def _divided(self, whole: frozenset[int]) -> frozenset[int]:
        leaves = self._axes.atoms.leaves
        made = self._with_pieces(matmul.n for matmul in self._weighted)
        used = self._set(matmul.k for matmul in self._weighted)
        candidates = (made & used) - whole
        columns = {leaf for matmul in self._weighted for leaf in self._major(matmul.n, candidates, whole)}
        rows = {leaf for matmul in self._weighted for leaf in self._major(matmul.k, candidates, whole)}
        stake: Counter[int] = Counter()
        for matmul in self._weighted:
            size = prod(map(self._axes.atoms.size, [*leaves(matmul.n), *leaves(matmul.k), *leaves(matmul.groups)]))
            for dim in (matmul.n, matmul.k):
                stake.update(dict.fromkeys(columns.intersection(rows, self._major(dim, candidates, whole)), size))
        lead = set(stake)
        for leaf, _ in sorted(stake.items(), key=lambda item: (-item[1], item[0])):
            for matmul in self._weighted:
                if leaf not in lead:
                    break
                major = {found for dim in (matmul.n, matmul.k) for found in self._major(dim, lead, whole)}
                if leaf in major:
                    lead -= {other for other in major if other != leaf and (stake[other], -other) < (stake[leaf], -leaf)}
        return frozenset(lead)

    def _major(self, dim: Leaves, candidates: Iterable[int], whole: frozenset[int]) -> list[int]:
        """The first factor of `dim` that is no mere stack of parts (q, k and v in one weight), when it is a candidate."""
        for leaf in self._axes.atoms.leaves(dim):
            if leaf in candidates or leaf in whole:
                return [leaf] if leaf in candidates else []
            if pieces := self._axes.atoms.pieces(leaf):
                found = [self._major([piece], candidates, whole) for piece in pieces.values()]
                return [leaf for part in found for leaf in part] if all(found) else []
        return []

    def _with_pieces(self, dims: Iterable[Leaves]) -> frozenset[int]:
        leaves = self._set(dims)
        return leaves | self._set([piece] for leaf in leaves for piece in self._axes.atoms.pieces(leaf).values())

    def _heads_in(self, dim: Leaves) -> int:
        found = [leaf for leaf in self._axes.atoms.leaves(dim) if leaf in self.heads]
        return prod(map(self._axes.atoms.size, found)) if found else 0

    def axis(self, dim: Leaves) -> str:
        """The logical axis of one dim."""
        leaves = self._axes.atoms.leaves(dim)
        origins = set[int]().union(*(self._origin(leaf) for leaf in leaves))
        if origins & self.batch:
            return "tokens" if origins & self.sequence else "batch"
        if origins & self.sequence:
            return "sequence"
        if self.experts.intersection(leaves):
            return "experts"
        if self.vocab.intersection(leaves):
            return "vocab"
        if not self.divided.intersection(leaves):
            return self._pieces_axis(leaves)
        heads = self._heads_in(leaves)
        return "ffn" if not heads else "heads" if heads >= self.num_heads else "kv_heads"

    def _pieces_axis(self, leaves: Leaves) -> str:
        """The axis of the largest of a dim's unequal pieces, when all of them are divided."""
        for leaf in leaves:
            pieces = self._axes.atoms.pieces(leaf)
            axes = {length: self.axis([piece]) for (_, length), piece in sorted(pieces.items())}
            if axes and all(axes.values()):
                return axes[max(axes)]
        return ""

    def parts(self, dim: Leaves) -> list[Leaves]:
        """A merged dim taken apart where its factors have different axes: (batch x heads) and (batch x sequence), not tokens that were regrouped."""
        leaves = self._axes.atoms.leaves(dim)
        kinds = ["batch" if self.scales([leaf]) else "sequence" if self._origin(leaf) & self.sequence else "" for leaf in leaves]
        if kinds != sorted(kinds, key=("batch", "sequence", "").index):
            return [leaves]
        groups = [[leaf for leaf, found in zip(leaves, kinds, strict=True) if found == kind] for kind in ("batch", "sequence", "")]
        if groups[2] and not self.axis(groups[2]):
            return [leaves]
        return [group for group in groups if group] or [leaves]

    def size(self, leaf: int) -> int:
        """Size of a factor."""
        return self._axes.atoms.size(leaf)

    def scales(self, dim: Leaves) -> bool:
        """Whether the dim grows with the micro-batch."""
        return any(self._origin(leaf) & self.batch for leaf in self._axes.atoms.leaves(dim))


def _derived(records: list[Record], tokens: list[Strided]) -> set[int]:
    """Storages of integers computed from token ids; comparisons end it (a mask is no id)."""
    known = {value.storage for value in tokens}
    for record in records:
        if any(value.storage in known for value in record.inputs):
            known.update(value.storage for value in record.outputs if value.dtype.startswith(("int", "uint")))
    return known
