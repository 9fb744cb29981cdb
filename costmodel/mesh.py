"""The device mesh: axes outer to inner, and which ranks of an axis sit in one fast domain.

Rank r of a mesh with axes (pp, dp_replicate, dp_shard, cp, tp) is the row-major index, so tp neighbours are adjacent ranks.
`ep` is folded: the experts of a layer are spread over `ep` ranks taken from dp_shard x cp x tp (innermost first), as Megatron-core
and torchtitan do.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.errors import require_whole

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ranks of one communicator: `size` ranks, `per_fast_domain` of them share NVLink, `per_node` share a host.

    `stride` is the distance in global ranks between neighbours: ranks of a strided group share the node's network cards
    with the other groups of the same axis.
    """

    size: int
    per_fast_domain: int
    per_node: int
    stride: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of the parallel axes: whole numbers, else InputError.

    Invariant, checked where a mesh is used: every size >= 1 and `ep` divides dp_shard * cp * tp.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in (*AXES, "ep"):
            require_whole(getattr(self, name), f"Mesh.{name}", least=None)

    @property
    def num_devices(self) -> int:
        """Ranks in the mesh."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Data-parallel degree: how many different micro-batches run at once."""
        return self.dp_replicate * self.dp_shard

    def size(self, axis: str) -> int:
        """Number of ranks along `axis` (one of AXES, 'ep', 'dp'), 'dp_cp' (the group gradients are averaged over), 'dp_shard_cp'
        (the group ZeRO shards over), 'edp' and 'edp_shard' (the same two for expert parameters)."""
        if axis == "dp_cp":
            return self.dp * self.cp
        if axis == "dp_shard_cp":
            return self.dp_shard * self.cp
        if axis == "edp_shard":
            return self.dp_shard * self.cp * self.tp // self.ep
        if axis == "edp":
            return self.dp * self.cp * self.tp // self.ep
        return int(getattr(self, axis))

    def stride(self, axis: str) -> int:
        """Distance in global ranks between neighbours along `axis`."""
        strides = {"tp": 1, "cp": self.tp, "dp_shard": self.tp * self.cp, "dp_shard_cp": self.tp, "dp_cp": self.tp, "ep": 1}
        strides["dp"] = strides["dp_shard"]
        strides["dp_replicate"] = strides["dp_shard"] * self.dp_shard
        strides["pp"] = strides["dp_replicate"] * self.dp_replicate
        strides["edp"] = strides["edp_shard"] = self.ep
        return strides[axis]

    def group(self, axis: str, *, fast_domain: int, per_node: int) -> Group:
        """The communicator of rank 0 along `axis` on hosts of `per_node` devices and NVLink domains of `fast_domain`."""
        size, stride = self.size(axis), self.stride(axis)

        def within(width: int) -> int:
            return max(1, min(size, width // stride))

        return Group(size=size, per_fast_domain=within(fast_domain), per_node=within(per_node), stride=stride)
