"""Sources measure different bytes; like is compared with like.

allocated    what PyTorch's allocator has handed out: tensors, without its reserve, the context and NCCL
reserved     what it has taken from the device: tensors and reserve
device       what the device reports as used (nvidia-smi): all
Which rank: the largest, the first or the last pipeline stage.
"""

from __future__ import annotations

import re

from costmodel.estimate import Estimate, StageMemory

GB_PER_GIB = 1e9 / 2**30


def kind_of(text: str | None) -> tuple[str, str]:
    """(class, rank) that a row's `peak_memory_kind` names. A source that logs both, or does not say, is taken as allocated and marked unstated."""
    low = (text or "").lower()
    which = "last" if "last rank" in low else "first" if re.search(r"rank 0\b|first rank", low) else "max"
    if "smi" in low or "nvml" in low or "device memory" in low:
        return "device", which
    reserved, allocated = "reserved" in low, "alloc" in low
    if reserved and not allocated:
        return "reserved", which
    return ("allocated" if allocated and not reserved else "unstated"), which


def measured_gib(value: float, unit: str | None) -> float:
    """GiB of a printed figure whose unit text may say that it is decimal."""
    return value * GB_PER_GIB if re.search(r"1e9|10\^9|10\*\*9|decimal", (unit or "").lower()) else value


def predicted_bytes(estimate: Estimate, kind: tuple[str, str]) -> float:
    """The estimate's peak of that class on that rank."""
    return stage_bytes(stage_of(estimate, kind), kind[0])


def stage_of(estimate: Estimate, kind: tuple[str, str]) -> StageMemory:
    """The rank that the kind means."""
    stages = {"last": estimate.stages[-1:], "first": estimate.stages[:1]}.get(kind[1], estimate.stages)
    return max(stages, key=lambda stage: stage_bytes(stage, kind[0]))


def stage_bytes(stage: StageMemory, name: str) -> float:
    """The largest peak of one rank as that class; what a source does not state is taken as allocated."""
    return {"device": stage.device_bytes, "reserved": stage.reserved_bytes}.get(name, stage.allocated_bytes)
