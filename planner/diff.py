"""What differs between two plans: every choice, then seconds by cause and bytes by class with their change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from costmodel.estimate import Estimate, Line
from planner.explain import fullest
from planner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One field of two plans: `unit` is "s", "bytes" or "" for anything that is shown as it is."""

    field: str
    before: Any
    after: Any
    unit: str = ""

    @property
    def ratio(self) -> float | None:
        """after / before - 1 for amounts, None where it means nothing."""
        if not self.unit or not self.before:
            return None
        return float(self.after / self.before - 1)


def diff_plans(before: Plan, after: Plan) -> tuple[Change, ...]:
    """All differences; () for plans that decide and cost the same."""
    return (*_choices(before, after), *_amounts(before.estimate, after.estimate))


def _choices(before: Plan, after: Plan) -> Iterator[Change]:
    for name in ("model", "graph_id", "engine"):
        if getattr(before, name) != getattr(after, name):
            yield Change(field=name, before=getattr(before, name), after=getattr(after, name))
    if before.cluster != after.cluster:
        yield Change(field="cluster", before=before.cluster.name, after=after.cluster.name)
    yield from _fields(before.job, after.job, "job")
    yield from _fields(before.strategy, after.strategy, "strategy")
    layers = [[len(stage.layer_paths) for stage in plan.stages] for plan in (before, after)]
    if layers[0] != layers[1]:
        yield Change(field="layers per stage", before=layers[0], after=layers[1])


def _fields(before: Any, after: Any, path: str) -> Iterator[Change]:
    for field in fields(before):
        mine, theirs = getattr(before, field.name), getattr(after, field.name)
        if is_dataclass(mine):
            yield from _fields(mine, theirs, f"{path}.{field.name}")
        elif mine != theirs:
            yield Change(field=f"{path}.{field.name}", before=mine, after=theirs)


def _amounts(before: Estimate, after: Estimate) -> Iterator[Change]:
    if before.step_s != after.step_s:
        yield Change(field="step", before=before.step_s, after=after.step_s, unit="s")
    yield from _lines(before.time, after.time, "s")
    if before.peak_bytes != after.peak_bytes:
        yield Change(field="peak", before=before.peak_bytes, after=after.peak_bytes, unit="bytes")
    yield from _lines(fullest(before).classes, fullest(after).classes, "bytes")


def _lines(before: tuple[Line, ...], after: tuple[Line, ...], unit: str) -> Iterator[Change]:
    mine, theirs = ({line.name: line.amount for line in lines} for lines in (before, after))
    for name in dict.fromkeys((*mine, *theirs)):
        if mine.get(name, 0.0) != theirs.get(name, 0.0):
            yield Change(field=name, before=mine.get(name, 0.0), after=theirs.get(name, 0.0), unit=unit)
