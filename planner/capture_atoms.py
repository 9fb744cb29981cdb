"""Factors of dimensions, and which of them are the same: union-find over the prime structure that views reveal.

A dimension is a list of *atoms*, major to minor, whose sizes multiply to it; a dimension of size 1 is the empty list. A view that cuts a dimension (heads *
head_dim seen as two dims) splits an atom, and everything that shares the atom is split with it. Two dimensions that an operator makes equal are unified
factor by factor. Views need no rules: the atoms of a storage carry strides, and a view's dims are found again by their strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

Leaves = list[int]


class Atoms:
    """The union-find. Atoms are ints; `leaves` resolves an atom to its current unsplit representatives."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._size: list[int] = []
        self._children: dict[int, tuple[int, int]] = {}
        self.source: dict[int, int] = {}
        self._pieces: dict[int, dict[tuple[int, int], int]] = {}

    def fresh(self, size: int, source: int | None = None) -> int:
        """A new atom. `source`: the atom it was cropped or padded from; it inherits batch and sequence from there."""
        self._parent.append(len(self._parent))
        self._size.append(size)
        if source is not None:
            self.source[len(self._parent) - 1] = source
        return len(self._parent) - 1

    def new_dim(self, size: int) -> Leaves:
        """The leaves of a dimension nothing is known about."""
        return [] if size == 1 else [self.fresh(size)]

    def find(self, atom: int) -> int:
        """The representative of the atom's class."""
        while self._parent[atom] != atom:
            self._parent[atom] = self._parent[self._parent[atom]]
            atom = self._parent[atom]
        return atom

    def size(self, atom: int) -> int:
        """Its size."""
        return self._size[self.find(atom)]

    def leaves(self, atoms: Sequence[int]) -> Leaves:
        """Unsplit representatives, major to minor."""
        found: Leaves = []
        stack = list(reversed(atoms))
        while stack:
            atom = self.find(stack.pop())
            if atom in self._children:
                stack.extend(reversed(self._children[atom]))
            else:
                found.append(atom)
        return found

    def split(self, leaf: int, minor: int) -> tuple[int, int]:
        """Split a leaf of size n into (n / minor, minor). `minor` divides n and is neither 1 nor n."""
        leaf = self.find(leaf)
        self._children[leaf] = (self.fresh(self._size[leaf] // minor), self.fresh(minor))
        return self._children[leaf]

    def unify(self, left: Sequence[int], right: Sequence[int]) -> bool:
        """Make two dims one, factor by factor from the major side. Stops (False) where neither factor divides the other."""
        one, two = self.leaves(left), self.leaves(right)
        if prod(map(self.size, one)) != prod(map(self.size, two)):
            return False
        while one and two:
            a, b = self.find(one[0]), self.find(two[0])
            if a == b:
                one, two = one[1:], two[1:]
            elif self._size[a] == self._size[b]:
                self._merge(a, b)
                one, two = one[1:], two[1:]
            elif self._size[a] % self._size[b] == 0:
                self.split(a, self._size[a] // self._size[b])
            elif self._size[b] % self._size[a] == 0:
                self.split(b, self._size[b] // self._size[a])
            else:
                return False
            one, two = self.leaves(one), self.leaves(two)
        return True

    def _merge(self, a: int, b: int) -> None:
        keep, drop = (b, a) if a in self.source and b not in self.source else (a, b)
        self._parent[drop] = keep
        self.source.pop(drop, None)
        for place, atom in self._pieces.pop(drop, {}).items():
            self.unify([atom], [self.piece(keep, *place)])

    def piece(self, leaf: int, start: int, length: int) -> int:
        """The atom of elements start .. start + length of an unsplit leaf that is cut into unequal pieces."""
        places = self._pieces.setdefault(self.find(leaf), {})
        if (start, length) not in places:
            places[start, length] = self.fresh(length, leaf)
        return places[start, length]

    def pieces(self, leaf: int) -> dict[tuple[int, int], int]:
        """All pieces of a leaf by (start, length)."""
        return self._pieces.get(self.find(leaf), {})

    def cut(self, dim: Sequence[int], major: int) -> tuple[Leaves, Leaves] | None:
        """Split a dim of n into (major, n / major), or None where its factors do not allow it."""
        left: Leaves = []
        right = self.leaves(dim)
        while right and major > 1:
            size = self.size(right[0])
            if major % size == 0:
                left.append(right.pop(0))
                major //= size
            elif size % major == 0:
                self.split(right[0], size // major)
                right = self.leaves(right)
            else:
                return None
        return (left, right) if major == 1 else None


class Storage:
    """A storage's atoms by stride, so that every view of it finds its dims."""

    def __init__(self, atoms: Atoms, shape: Sequence[int], strides: Sequence[int], dims: Sequence[Leaves]) -> None:
        self._atoms = atoms
        self._runs: list[tuple[int, int]] = []
        for size, stride, dim in zip(shape, strides, dims, strict=True):
            if size > 1 and stride > 0:
                self._runs.extend(self._strided(dim, stride))
        self._derived: dict[tuple[int, ...], int] = {}

    def _strided(self, dim: Sequence[int], stride: int) -> list[tuple[int, int]]:
        runs = []
        for leaf in reversed(self._atoms.leaves(dim)):
            runs.append((leaf, stride))
            stride *= self._atoms.size(leaf)
        return runs[::-1]

    def _leaves(self) -> list[tuple[int, int]]:
        """(leaf, stride), largest stride first."""
        self._runs = [run for atom, stride in self._runs for run in self._strided([atom], stride)]
        self._runs.sort(key=lambda run: -run[1])
        return self._runs

    def cut(self, size: int, stride: int, offset: int, length: int) -> None:
        """Note that a dim of `size` at `stride` is cut into unequal pieces, one of which has `length` and begins at `offset`."""
        for leaf, at in self._leaves():
            if at == stride and self._atoms.size(leaf) == size:
                self._atoms.piece(leaf, offset // stride % size, length)

    def dims(self, shape: Sequence[int], strides: Sequence[int], offset: int) -> list[Leaves]:
        """The atoms of every dim of a view."""
        view = list(zip(shape, strides, strict=True))
        return [self._dim(size, stride, offset, view) for size, stride in view]

    def _seen(self, view: Sequence[tuple[int, int]], offset: int) -> tuple[list[tuple[int, int]], int]:
        """The leaves a view sees: a piece in place of the leaf it is cut from; and the offset inside them."""
        found = []
        for leaf, at in self._leaves():
            pieces = self._atoms.pieces(leaf)
            size = self._atoms.size(leaf)
            first = offset // at % size
            last = first + sum((count - 1) * stride // at for count, stride in view if at <= stride < at * size)
            around = [place for place in pieces if place[0] <= first and last < sum(place)]
            if around:
                place = min(around, key=lambda item: item[1])
                found += self._strided([pieces[place]], at)
                offset -= place[0] * at
            else:
                found.append((leaf, at))
        return sorted(found, key=lambda run: -run[1]), offset

    def _dim(self, size: int, stride: int, offset: int, view: Sequence[tuple[int, int]]) -> Leaves:
        if size == 1:
            return []
        if stride == 0:
            return [self._derive(size, 0, 0, None)]
        for edge in (stride, stride * size):
            self._boundary(edge, *self._seen(view, offset))
        leaves, inner = self._seen(view, offset)
        inside = [(leaf, at) for leaf, at in leaves if stride <= at < stride * size]
        expected = stride * size
        for leaf, at in inside:
            if at * self._atoms.size(leaf) != expected:
                break
            expected = at
        if inside and expected == stride:
            return [leaf for leaf, _ in inside]
        source = next((leaf for leaf, at in leaves if at <= stride < at * self._atoms.size(leaf)), None)
        return [self._derive(size, stride, inner // stride if source is not None else 0, source)]

    def _derive(self, size: int, stride: int, offset: int, source: int | None) -> int:
        key = (size, stride, offset)
        if key not in self._derived:
            self._derived[key] = self._atoms.fresh(size, source)
        return self._derived[key]

    def _boundary(self, stride: int, leaves: list[tuple[int, int]], offset: int) -> None:
        """Split the leaf that straddles `stride` there, when sizes and the view's offset allow it."""
        for leaf, at in leaves:
            size = self._atoms.size(leaf)
            if at < stride < at * size and stride % at == 0:
                minor = stride // at
                if size % minor == 0 and (offset // at) % minor == 0:
                    self._atoms.split(leaf, minor)
                return
