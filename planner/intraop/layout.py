"""BlockLayout: the placement of every operand of every kernel of a block on one mesh axis, and the collectives between them.

A placement is what DTensor calls it, as a short string: "R" (every rank holds the whole tensor), "S2" (dim 2 of the storage is cut into equal parts) and
"P" (every rank holds an addend of the same shape). A dim that stands for several loops (tokens = batch x sequence, a feature dim of heads x head_dim)
is cut along the loop that the op divides: along the sequence, along the heads.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

REPLICATE, PARTIAL = "R", "P"


def shard(dim: int) -> str:
    """The placement that cuts dim `dim`."""
    return f"S{dim}"


def shard_dim(placement: str) -> int | None:
    """The dim a placement cuts, or None."""
    return int(placement[1:]) if placement.startswith("S") else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpLayout:
    """One kernel: the placement it wants of every input and gives every output, in the order of the node; `loop` names what the ranks divide ("" nothing)."""

    node_id: str
    loop: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    """A copy of a tensor in another placement, made once a phase for all its readers.

    kind: all_gather, reduce_scatter, all_reduce, all_to_all, or "local" (a slice, or an addend of a replicated tensor).
    """

    tensor_id: str
    phase: str
    source: str
    target: str
    kind: str
    reshard_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The layout of one block kind on `size` ranks. `owners`: the placement of every tensor where it is made or enters the block.

    objective_s: kernels and collectives of forward and backward of one micro-batch, without overlap. bound_s: no layout of the same kernels is faster.
    memory_bytes: parameters (with their states) and saved tensors of one rank. num_columns, num_rows: the size of the integer program.
    """

    kind_id: str
    size: int
    ops: tuple[OpLayout, ...]
    owners: tuple[tuple[str, str], ...]
    borders: tuple[tuple[str, str], ...]
    reshards: tuple[Reshard, ...]
    objective_s: float
    bound_s: float
    memory_bytes: float
    num_columns: int
    num_rows: int

    def owner(self, tensor_id: str) -> str:
        """The placement of a tensor. Raises KeyError."""
        return dict(self.owners)[tensor_id]

    def to_json(self) -> dict[str, object]:
        """Plain values for json.dumps."""
        return asdict(self)
