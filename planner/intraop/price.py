"""Seconds of kernels and collectives under a placement, by the cost model that prices plans (costmodel.compute, costmodel.collectives).

A divided kernel is the same kernel on local shapes: planner.emit turns it into work and costmodel.compute prices that.

    kernel_s      compute_s(local kernel) + all-reduces of the row statistics that the rule asks for
    reshard_s     R->S, R->P local copy   S->R all_gather(bytes)   Si->Sj all_to_all(bytes / n)   P->R all_reduce(bytes)   P->S reduce_scatter(bytes)

`bytes` are those of the whole tensor, n the ranks of the axis. An addend of a replicated tensor is the tensor on one rank and zero on the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from costmodel.blocks import Machine
from costmodel.compute import compute_s
from costmodel.engine import Engine
from costmodel.work import DTYPE_BYTES, Compute
from planner.division import Division
from planner.emit import Emitter
from planner.graph import Node, Tensor
from planner.intraop.layout import PARTIAL, REPLICATE, shard_dim
from planner.intraop.rules import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What prices one block on mesh axis `axis`. `compute_dtype`: what dtype "compute" is stored in."""

    machine: Machine
    engine: Engine
    compute_dtype: str = "bf16"
    axis: str = "tp"

    @property
    def size(self) -> int:
        """Ranks of the axis."""
        return self.machine.mesh.size(self.axis)

    def num_bytes(self, tensor: Tensor, placement: str = REPLICATE) -> float:
        """Bytes of `tensor` on one rank."""
        dtype = self.compute_dtype if tensor.dtype == "compute" else tensor.dtype
        share = 1 if shard_dim(placement) is None else self.size
        return float(tensor.num_elements * DTYPE_BYTES[dtype]) / share

    def kernel_s(self, node: Node, rule: Rule, tensors: dict[str, Tensor]) -> float:
        """Seconds of `node` on one rank under `rule`."""
        local = {
            name: _local(tensors[name], placement, self.size)
            for name, placement in (*zip(node.inputs, rule.inputs, strict=True), *zip(node.outputs, rule.outputs, strict=True))
        }
        loops = tuple(replace(loop, size=loop.size // self.size) if loop.name in rule.loops else loop for loop in node.loops)
        kernel = replace(node, loops=loops, flops=node.flops * rule.flops_frac)
        emitter = Emitter(division=Division(compute_dtype=self.compute_dtype), engine=self.engine, tensors=local)
        device, kernels = self.machine.pool.device, self.machine.kernels
        seconds = sum(compute_s(work, device, kernels) for work in emitter.works((kernel,)) if isinstance(work, Compute))
        return seconds + rule.num_statistics * self.machine.collective_s("all_reduce", rule.statistics_bytes, self.axis)

    def reshard_s(self, tensor: Tensor, source: str, target: str) -> float:
        """Seconds of turning `source` into `target`; 0 when they are equal. Raises KeyError for what cannot be done (see `reshard_kind`)."""
        kind = reshard_kind(source, target)
        full = self.num_bytes(tensor)
        if kind == "":
            return 0.0
        if kind == "local":
            part = self.num_bytes(tensor, target)
            work = Compute(name="slice", op_class="copy", read_bytes=part, write_bytes=part, dtype=self.compute_dtype)
            return compute_s(work, self.machine.pool.device, self.machine.kernels)
        return self.machine.collective_s(kind, full / self.size if kind == "all_to_all" else full, self.axis)


def reshard_kind(source: str, target: str) -> str:
    """The collective, "local", or "" when nothing is to be done. Raises KeyError for S -> P and P -> P of other tensors, which no layout needs."""
    if source == target:
        return ""
    kinds = {
        ("R", "S"): "local", ("R", "P"): "local", ("S", "R"): "all_gather", ("S", "S"): "all_to_all",
        ("P", "R"): "all_reduce", ("P", "S"): "reduce_scatter",
    }  # fmt: skip
    return kinds[source[0], target[0]]


def can_reshard(source: str, target: str) -> bool:
    """Whether `reshard_kind` has an answer."""
    return target != PARTIAL or source in (PARTIAL, REPLICATE)


def _local(tensor: Tensor, placement: str, size: int) -> Tensor:
    dim = shard_dim(placement)
    if dim is None:
        return tensor
    return replace(tensor, shape=(*tensor.shape[:dim], tensor.shape[dim] // size, *tensor.shape[dim + 1 :]))
