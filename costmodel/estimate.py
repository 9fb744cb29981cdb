"""Estimate: what a step costs, by cause and by class. Produced by `estimate_step`, printed by planner.render."""

from __future__ import annotations

from dataclasses import dataclass

TIME_CAUSES = ("compute", "exposed_communication", "exposed_copy", "bubble", "optimizer", "host")

MEMORY_CLASSES = (
    "parameters", "gradients", "optimizer_state", "activations", "recompute_workspace", "logits", "gather_buffers", "communicators",
    "framework", "reserve",
)  # fmt: skip

RISKS = ("OK", "TIGHT", "RISKY", "NO")
OK_FREE_FRAC, TIGHT_FREE_FRAC = 0.15, 0.05  # more than this share of the device stays free


def memory_risk(peak_bytes: float, usable_bytes: float) -> str:
    """OK | TIGHT | RISKY | NO: how much of the device the predicted peak leaves free, for what no prediction sees (fragmentation, other processes,
    drivers that take more). More than 15 % free is OK, the margin that public reports of "fits by formula, but out of memory" ask for; more than 5 %
    TIGHT; less RISKY; a peak beyond the device NO.
    """
    free_frac = 1.0 - peak_bytes / usable_bytes
    if free_frac < 0.0:
        return "NO"
    return "OK" if free_frac > OK_FREE_FRAC else "TIGHT" if free_frac > TIGHT_FREE_FRAC else "RISKY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One named amount of an itemised total: seconds or bytes, as the field that holds it says. `detail` is the arithmetic in words."""

    name: str
    amount: float
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Device memory of one pipeline rank: bytes by class (at the step peak) and the three peaks (init, step, optimizer) as the device reports them.

    Tools measure three kinds, all of the largest peak: `allocated_bytes` (tensors: torch.cuda.max_memory_allocated), `reserved_bytes` (what the allocator
    holds: max_memory_reserved), `device_bytes` (nvidia-smi: reserved, communicators and context). The classes "communicators" and "framework" lie outside the
    allocator, "reserve" is what it holds beyond tensors.

    `in_flight` is the largest number of micro-batches whose activations live at once on this rank (summed over its chunks).
    """

    rank_index: int
    classes: tuple[Line, ...]
    init_peak_bytes: float
    step_peak_bytes: float
    optimizer_peak_bytes: float
    in_flight: float

    @property
    def peak_bytes(self) -> float:
        """Largest of the three peaks."""
        return max(self.init_peak_bytes, self.step_peak_bytes, self.optimizer_peak_bytes)

    @property
    def device_bytes(self) -> float:
        """The largest peak as the device reports it (nvidia-smi)."""
        return self.peak_bytes

    @property
    def reserved_bytes(self) -> float:
        """The largest peak without context and communicators."""
        return self.peak_bytes - sum(line.amount for line in self.classes if line.name in ("communicators", "framework"))

    @property
    def allocated_bytes(self) -> float:
        """The largest peak in tensors."""
        return self.reserved_bytes - sum(line.amount for line in self.classes if line.name == "reserve")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds and bytes of one optimizer step under one strategy.

    step_s = sum of `time` over TIME_CAUSES, on the critical pipeline rank. `compute_by_class` splits compute by op class;
    `communication_by_axis` splits *exposed* communication by mesh axis; `hidden_communication_s` is what overlap hid.
    mfu_frac = model flops / (step_s * devices * peak) where `mfu_denominator` names the peak and the flop convention.
    `usable_bytes` is what the device offers; `fits` compares the largest peak with it.
    """

    step_s: float
    time: tuple[Line, ...]
    compute_by_class: tuple[Line, ...]
    communication_by_axis: tuple[Line, ...]
    hidden_communication_s: float
    tokens_per_s: float
    tokens_per_s_per_device: float
    mfu_frac: float
    hfu_frac: float
    mfu_denominator: str
    stages: tuple[StageMemory, ...]
    usable_bytes: float
    host_bytes_per_node: float
    storage_bytes_per_node: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> float:
        """Largest peak of any rank."""
        return max(stage.peak_bytes for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Whether the largest peak is within what the device offers."""
        return self.peak_bytes <= self.usable_bytes

    @property
    def risk(self) -> str:
        """memory_risk of the largest peak."""
        return memory_risk(self.peak_bytes, self.usable_bytes)
