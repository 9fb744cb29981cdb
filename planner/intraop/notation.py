"""Which dims of a kernel's tensors are one loop. A `Match` says, for a loop, which dim of every tensor it cuts; tensors without it do not depend on it.

`aligned` serves kernels without loops: the largest tensor is the reference, and a dim of another tensor is the same index when both carry the same
logical axis (a storage of heads x head_dim counts as heads), or both carry none and have the same size, which no other unlabelled dim of either has. What is
ambiguous is not matched. A tensor is constant along an index only if the indices it does have account for all its elements, so an index that hides inside
a dim is never taken for a broadcast.

`factored` serves matmuls: the dims of an operand are distributed over the loops it has so that the sizes multiply up and the labels agree; an operand with
several such distributions (an unlabelled square weight) gets none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

from planner.graph import TENSOR_PARALLEL_AXES, TOKEN_AXES, Loop, Tensor


def label_dims(tensor: Tensor, *labels: str) -> tuple[int, ...]:
    """Dims of `tensor` with one of the labels and more than one element."""
    return tuple(dim for dim, axis in enumerate(tensor.axes) if axis in labels and tensor.shape[dim] > 1)


def aligned(reference: Tensor, other: Tensor) -> dict[int, int]:
    """Dim of `reference` -> dim of `other` that is the same index; see the module docstring."""
    pairs = dict(_by_label(reference, other))
    counts = [Counter(size for size, axis in zip(t.shape, t.axes, strict=True) if not axis) for t in (reference, other)]
    for dim, (size, axis) in enumerate(zip(reference.shape, reference.axes, strict=True)):
        if not axis and size > 1 and counts[0][size] == 1 and counts[1][size] == 1:
            pairs[dim] = next(
                place for place, (n, label) in enumerate(zip(other.shape, other.axes, strict=True)) if n == size and not label
            )
    return pairs


def _by_label(reference: Tensor, other: Tensor) -> Iterator[tuple[int, int]]:
    for label in sorted({axis for axis in reference.axes if axis}):
        ours, theirs = label_dims(reference, label), label_dims(other, label)
        if label in ("tokens", "sequence") and not theirs:
            theirs = _rows(reference, other, label)
        if len(ours) != len(theirs):
            continue
        for dim, place in zip(ours, theirs, strict=True):
            sizes = reference.shape[dim], other.shape[place]
            same = sizes[0] == sizes[1] or "tokens" in (reference.axes[dim], other.axes[place])
            if same or (label in TENSOR_PARALLEL_AXES and max(sizes) % min(sizes) == 0):
                yield dim, place


def _rows(reference: Tensor, other: Tensor, label: str) -> tuple[int, ...]:
    """The dim that is cut along the sequence when one tensor has tokens and the other batch x sequence."""
    places = label_dims(other, "sequence" if label == "tokens" else "tokens")

    def rows(tensor: Tensor) -> int:
        return prod(size for size, axis in zip(tensor.shape, tensor.axes, strict=True) if axis in TOKEN_AXES)

    return places if rows(reference) == rows(other) else ()


def is_constant(reference: Tensor, other: Tensor, pairs: dict[int, int]) -> bool:
    """Whether `other` has no index but the matched ones."""
    return other.num_elements == prod(reference.shape[dim] for dim in pairs)


def factored(tensor: Tensor, loops: Sequence[Loop]) -> dict[str, tuple[int, ...]] | None:
    """Loop name -> the dims of `tensor` that it is made of, outermost first; None when there is no such distribution or more than one."""
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    found = []
    for choice in product(loops, repeat=len(dims)):
        if not all(_may(tensor.axes[dim], loop.axis) for dim, loop in zip(dims, choice, strict=True)):
            continue
        groups = {loop.name: tuple(dim for dim, taken in zip(dims, choice, strict=True) if taken is loop) for loop in loops}
        if all(prod(tensor.shape[dim] for dim in groups[loop.name]) == loop.size for loop in loops):
            found.append(groups)
    return found[0] if len(found) == 1 else None


def _may(axis: str, loop: str) -> bool:
    """Whether a dim labelled `axis` may be part of a loop labelled `loop`."""
    if axis in TOKEN_AXES:
        return loop in TOKEN_AXES
    return axis in ("", loop) and not (axis == "" and loop in TOKEN_AXES)
