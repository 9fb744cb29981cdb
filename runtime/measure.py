"""Measured beside predicted: seconds of a step and peak bytes of every rank, as one document next to the plan."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from planner.plan import Plan
from runtime.batch import Batch
from runtime.live_bytes import LiveBytes, live_tensors
from runtime.trainer import Trainer

REPORT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Peak bytes of one rank, as the estimate of its pipeline stage says and as measured."""

    rank: int
    pipeline_index: int
    predicted_peak_bytes: float
    measured_peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run under a plan.

    measured_step_s: median over the timed steps (all but the first, which warms up, and the one under the memory counter on CPU).
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
        if index == self.memory_step and not cuda:
            with self._counted():
                return self.trainer.step(batch)
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        loss = self.trainer.step(batch)
        if cuda:
            torch.cuda.synchronize()
            self.peak_bytes = float(torch.cuda.max_memory_allocated())
        if index > 0 or not self.times_s:
            self.times_s = [*(self.times_s if index > 1 else []), time.perf_counter() - start]
        return loss

    @contextmanager
    def _counted(self) -> Iterator[None]:
        fixed_bytes = sum(
            parameter.nbytes
            for module in self.trainer.modules
            if isinstance(module, DistributedDataParallel)
            for parameter in module.parameters()
            if parameter.requires_grad
        )
        counter = LiveBytes(live_tensors(), fixed_bytes=fixed_bytes)
        with counter:
            yield
        self.peak_bytes = float(counter.peak_bytes)


def build_meter(trainer: Trainer, num_steps: int) -> Meter:
    """A meter that counts memory in the second of `num_steps` steps, when the optimizer's state exists (the first, if there is one only)."""
    return Meter(trainer=trainer, memory_step=min(1, num_steps - 1), times_s=[])


def build_report(meter: Meter, losses: list[float]) -> Report:
    """The report of all ranks, the same on every rank. Collective."""
    trainer = meter.trainer
    plan, place = trainer.plan, trainer.place
    seconds = statistics.median(meter.times_s) if meter.times_s else 0.0
    mine = torch.tensor([float(place.pipeline_index), meter.peak_bytes, seconds], dtype=torch.float64, device=place.device)
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
    return next(stage.peak_bytes for stage in plan.estimate.stages if stage.rank_index == pipeline_index)
