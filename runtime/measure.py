"""Measured beside predicted: seconds of a step and peak bytes of every rank, as one document next to the plan."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from planner.plan import Plan
from runtime.batch import Batch
from runtime.live_bytes import LiveBytes, live_tensors
from runtime.trainer import Trainer

REPORT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Peak bytes of one rank's tensors, as the estimate of its pipeline stage says and as measured."""

    rank: int
    pipeline_index: int
    predicted_peak_bytes: float
    measured_peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run under a plan.

    measured_step_s: median, over ranks the largest (see Meter.median_s).
    memory_source: how measured_peak_bytes was taken: "live tensor bytes" or "torch.cuda.max_memory_allocated".
    """

    graph_id: str
    device: str
    num_steps: int
    losses: tuple[float, ...]
    predicted_step_s: float
    measured_step_s: float
    memory_source: str
    ranks: tuple[RankReport, ...]
    format_version: int = REPORT_VERSION

    def lines(self) -> list[str]:
        """The comparison as plain text."""
        table = [f"{'':22}{'predicted':>14}{'measured':>14}{'error':>9}"]
        table.append(_row("step time", self.predicted_step_s * 1e3, self.measured_step_s * 1e3, "ms"))
        for rank in self.ranks:
            name = f"rank {rank.rank} peak (stage {rank.pipeline_index})"
            table.append(_row(name, rank.predicted_peak_bytes / 2**20, rank.measured_peak_bytes / 2**20, "MiB"))
        table.append(f"peaks by {self.memory_source}; loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f} in {self.num_steps} steps")
        return table


def _row(name: str, predicted: float, measured: float, unit: str) -> str:
    return f"{name:22}{predicted:>10.2f} {unit:3}{measured:>10.2f} {unit:3}{predicted / measured - 1:>+8.1%}"


@dataclass(slots=True, kw_only=True)
class Meter:
    """Collects one rank's step times and peak while it trains."""

    trainer: Trainer
    memory_step: int
    times_s: list[float]
    peak_bytes: float = 0.0

    def step(self, index: int, batch: Batch) -> float:
        """trainer.step(batch), measured; `index` counts from 0."""
        cuda = self.trainer.place.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        with self._counted() if index == self.memory_step and not cuda else nullcontext():
            loss = self.trainer.step(batch)
        if cuda:
            torch.cuda.synchronize()
            self.peak_bytes = float(torch.cuda.max_memory_allocated())
        self.times_s.append(time.perf_counter() - start)
        return loss

    def median_s(self) -> float:
        """Median step time without the first step, which warms up, and the counted one; of all steps when none is left."""
        cuda = self.trainer.place.device.type == "cuda"
        kept = [value for index, value in enumerate(self.times_s) if index and (cuda or index != self.memory_step)]
        return statistics.median(kept or self.times_s)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        counter = LiveBytes(live_tensors())
        with counter:
            yield
        self.peak_bytes = float(counter.peak_bytes)


def build_meter(trainer: Trainer, num_steps: int) -> Meter:
    """A meter that counts memory in the third of `num_steps` steps (or the last), when optimizer state and gradient buckets exist."""
    return Meter(trainer=trainer, memory_step=min(2, num_steps - 1), times_s=[])


def build_report(meter: Meter, losses: list[float]) -> Report:
    """The report of all ranks, the same on every rank. Collective."""
    trainer = meter.trainer
    plan, place = trainer.plan, trainer.place
    mine = torch.tensor([float(place.pipeline_index), meter.peak_bytes, meter.median_s()], dtype=torch.float64, device=place.device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    rows = [part.tolist() for part in parts]
    return Report(
        graph_id=plan.graph_id,
        device=place.device.type,
        num_steps=len(losses),
        losses=tuple(losses),
        predicted_step_s=plan.estimate.step_s,
        measured_step_s=max(row[2] for row in rows),
        memory_source="torch.cuda.max_memory_allocated" if place.device.type == "cuda" else "live tensor bytes",
        ranks=tuple(
            RankReport(
                rank=rank,
                pipeline_index=int(row[0]),
                predicted_peak_bytes=_predicted(plan, int(row[0])),
                measured_peak_bytes=row[1],
            )
            for rank, row in enumerate(rows)
        ),
    )


def _predicted(plan: Plan, pipeline_index: int) -> float:
    """The stage's predicted peak of tensors: without what lies outside the allocator and its reserve, which are not measured either."""
    return next(stage for stage in plan.estimate.stages if stage.rank_index == pipeline_index).allocated_bytes
