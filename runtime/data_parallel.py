"""Data parallelism: DDP (ZeRO 0), fully_shard (ZeRO 2 and 3), HSDP, and the averaging of replicated gradients where DDP does not reach.

zero_stage 0, pp = tp = 1   DistributedDataParallel over dp_replicate x dp_shard: reduction overlaps backward
zero_stage 0, else          one bucketed all-reduce after the last backward (DDP neither takes DTensors nor survives pipeline shape inference)
zero_stage 2                fully_shard(reshard_after_forward=False), block by block, then the rest
zero_stage 3                fully_shard, parameters gathered again for backward
dp_replicate > 1            the same on a 2-D mesh (HSDP)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from passes.chain import ModelPart
from planner.plan import Plan
from runtime.mesh import DATA_AXES, Place
from runtime.stage import StageModule

BUCKET_BYTES = 25 * 2**20


def uses_ddp(plan: Plan) -> bool:
    """Whether gradients are averaged by DistributedDataParallel."""
    mesh = plan.strategy.mesh
    return plan.strategy.zero_stage == 0 and mesh.dp > 1 and mesh.tp == 1 and mesh.pp == 1


def distribute(stage: StageModule, chunk: ModelPart, plan: Plan, place: Place) -> nn.Module:
    """The stage under the plan's data parallelism. Parameter names of `chunk.module` do not change."""
    if plan.strategy.zero_stage >= 2:
        _shard(stage, chunk, plan, place)
        return stage
    if uses_ddp(plan):
        device_ids = [place.device] if place.device.type == "cuda" else None
        group = place.data_mesh.get_group()
        return DistributedDataParallel(
            stage, device_ids=device_ids, process_group=group, forward_sync_buffers=False, gradient_as_bucket_view=True
        )
    return stage


def _shard(stage: StageModule, chunk: ModelPart, plan: Plan, place: Place) -> None:
    strategy = plan.strategy
    mesh = place.mesh[DATA_AXES] if strategy.mesh.dp_replicate > 1 else place.mesh["dp_shard"]
    policy = MixedPrecisionPolicy()
    if plan.job.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reshard = None if strategy.zero_stage == 3 else False
    for path in chunk.blocks:
        fully_shard(chunk.module.get_submodule(path), mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(stage, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)


def settle_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Bring every DTensor gradient into its parameter's placements: partial sums over tp become sums."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace every gradient by its mean over `group`, in buckets of one dtype and at most BUCKET_BYTES (or one larger tensor)."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    size = dist.get_world_size(group)
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        flat /= size
        offset = 0
        for gradient in bucket:
            gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
            offset += gradient.numel()


def local(tensor: Tensor) -> Tensor:
    """The rank's own part of a tensor, sharing its storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """This rank's `part` of a tensor that is laid out as `parameter`."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def _buckets(gradients: list[Tensor]) -> Iterable[list[Tensor]]:
    bucket: list[Tensor] = []
    filled_bytes = 0
    for gradient in gradients:
        if bucket and (gradient.dtype != bucket[0].dtype or filled_bytes + gradient.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, filled_bytes = [], 0
        bucket.append(gradient)
        filled_bytes += gradient.nbytes
    if bucket:
        yield bucket
