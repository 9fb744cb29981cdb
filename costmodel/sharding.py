"""What ZeRO and data parallelism do to the parameters of one rank: bytes held, and the collectives of one block.

Dense parameters are sharded over dp_shard x cp, expert parameters over what is left of dp_shard x cp x tp after ep; both are replicated over dp_replicate.
Stage 1 shards optimizer states, 2 also gradients, 3 also parameters (Rajbhandari et al. 2020, arXiv 1910.02054).
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.blocks import Machine
from costmodel.engine import Engine
from costmodel.work import DTYPE_BYTES, ParameterShard, StepWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Seconds to gather the parameters of one block whole and to reduce its gradients (shards are then all-reduced over dp_replicate)."""

    gather_s: float
    reduce_s: float


def compute_bytes(step: StepWork) -> float:
    """Bytes per element of parameters as matmuls see them (fp8 jobs keep bf16 weights and cast in the matmul)."""
    return 2.0 if step.compute_dtype == "fp8" else float(DTYPE_BYTES[step.compute_dtype])


def reduces_each_micro_batch(step: StepWork, engine: Engine) -> bool:
    """Whether ZeRO-2/3 gathers and reductions happen in every micro-batch rather than once a step."""
    return engine.fully_shard and step.zero_stage >= 2 and step.mesh.pp == 1


def parameter_stage(engine: Engine) -> int:
    """The ZeRO stage from which parameters at rest are sharded."""
    return 2 if engine.fully_shard else 3


def uses_torch_ddp(step: StepWork, engine: Engine) -> bool:
    """Whether torch's DistributedDataParallel reduces gradients: it takes neither tensor-parallel parameters nor pipeline stages."""
    return step.zero_stage == 0 and not engine.flat_gradient_buffer and step.mesh.tp == step.mesh.pp == 1 and step.mesh.size("dp_cp") > 1


def overlaps_reduction(step: StepWork, engine: Engine) -> bool:
    """Whether the once-a-step gradient reduction runs beside the last backward (without DDP, torch engines reduce after it)."""
    torch_after = step.zero_stage == 0 and not engine.flat_gradient_buffer and not uses_torch_ddp(step, engine)
    return engine.overlap_gradient_reduce and not torch_after


def shards(step: StepWork, stage: int) -> tuple[int, int]:
    """How many ways ZeRO divides (dense, expert) when it is at least `stage`, else (1, 1)."""
    if step.zero_stage < stage:
        return 1, 1
    return step.mesh.size("dp_shard_cp"), max(1, step.mesh.size("edp_shard"))


def local_elements(shard: ParameterShard, step: StepWork, stage: int, *, trainable: bool) -> float:
    """Elements one rank holds of `shard` when ZeRO divides from `stage` on."""
    dense_ways, expert_ways = shards(step, stage)
    dense, expert = shard.dense, shard.expert
    if not trainable:
        dense, expert = dense + shard.frozen_dense, expert + shard.frozen_expert
    return dense / dense_ways + expert / expert_ways


def traffic(shard: ParameterShard, step: StepWork, machine: Machine, engine: Engine) -> Traffic:
    """Collectives over the data-parallel group for one block: its share of the buckets it travels in, or (fully_shard) one call of its own."""
    size = compute_bytes(step) if engine.fully_shard and step.zero_stage >= 2 else float(DTYPE_BYTES[step.parameter_dtype])
    gradient = float(DTYPE_BYTES[step.gradient_dtype])
    bucket = max(engine.bucket_elements, engine.bucket_elements_per_rank * step.mesh.size("dp_cp"))
    by_block = bucket == 0 or (engine.fully_shard and step.zero_stage >= 2)

    def call_s(kind: str, elements: float, width: float, axis: str) -> float:
        if elements <= 0.0:
            return 0.0
        count = elements if by_block else float(bucket)
        return machine.collective_s(kind, count * width, axis) * elements / count

    gather = reduce = 0.0
    for trainable, frozen, shard_axis, whole_axis in (
        (shard.dense, shard.frozen_dense, "dp_shard_cp", "dp_cp"),
        (shard.expert, shard.frozen_expert, "edp_shard", "edp"),
    ):
        if step.zero_stage == 0:
            reduce += call_s("all_reduce", trainable, gradient, whole_axis)
            continue
        ways = max(1, step.mesh.size(shard_axis))
        gather += call_s("all_gather", trainable + frozen, size, shard_axis)
        reduce += call_s("reduce_scatter", trainable, gradient, shard_axis)
        reduce += call_s("all_reduce", trainable / ways, gradient, "dp_replicate")
    return Traffic(gather_s=gather, reduce_s=reduce)


def prefetched_s(compute: tuple[float, ...], gathers: tuple[float, ...]) -> float:
    """Exposed seconds when the gather of item i + 1 runs beside item i: g_0 + sum max(0, g_{i+1} - c_i)."""
    if not gathers:
        return 0.0
    return gathers[0] + sum(max(0.0, gather - seconds) for seconds, gather in zip(compute, gathers[1:], strict=False))


def prefetched_and_reduced_s(compute: tuple[float, ...], gathers: tuple[float, ...], reduces: tuple[float, ...]) -> float:
    """Exposed seconds when item i runs beside the gather of i + 1 and the reduction of i - 1: g_0 + sum max(0, g_{i+1} + r_{i-1} - c_i) + r_last."""
    if not compute:
        return 0.0
    total = gathers[0] + reduces[-1]
    for index, seconds in enumerate(compute):
        ahead = gathers[index + 1] if index + 1 < len(compute) else 0.0
        behind = reduces[index - 1] if index else 0.0
        total += max(0.0, ahead + behind - seconds)
    return total


def reduced_behind_s(compute: tuple[float, ...], reduces: tuple[float, ...]) -> float:
    """Seconds left over when every item's reduction queues behind its compute: end of the queue minus end of the compute."""
    clock = channel = 0.0
    for seconds, reduce in zip(compute, reduces, strict=True):
        clock += seconds
        channel = max(channel, clock) + reduce
    return max(0.0, channel - clock)
