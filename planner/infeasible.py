"""Nothing fits: the error that says by how much, why, and what the smallest change is."""

from __future__ import annotations

from costmodel.errors import InfeasibleError
from costmodel.estimate import Line
from costmodel.units import format_bytes, format_percent
from planner.explain import binding_class, fullest
from planner.levers import Remedy, remedies
from planner.outcome import Limits, Priced
from planner.plan import Rejection
from planner.pricer import GraphPricer
from planner.problem import Problem
from planner.restrict import Restrictions
from planner.search import search
from planner.space import describe


class NoPlanError(InfeasibleError):
    """No plan fits. `nearest` is the strategy with the smallest peak (None when nothing can run at all), `memory` its bytes by class on the fullest
    rank, `binding` the largest class, `remedies` the changes that were searched and found to fit, `rejections` what cannot run and why."""

    def __init__(
        self, what: str, *, where: str, nearest: Priced | None, found: tuple[Remedy, ...], rejections: tuple[Rejection, ...]
    ) -> None:
        remedy = (
            "; or ".join(str(item) for item in found) or "no single change of restrictions, engine, optimizer or nodes was found to help"
        )
        super().__init__(what, where=where, remedy=remedy)
        self.nearest, self.remedies, self.rejections = nearest, found, rejections
        self.memory: tuple[Line, ...] = fullest(nearest.estimate).classes if nearest else ()
        self.binding = binding_class(nearest.estimate).name if nearest else ""


def no_plan(problem: Problem, restrictions: Restrictions, rejections: tuple[Rejection, ...]) -> NoPlanError:
    """The error for a problem whose search found nothing that fits: searches the nearest miss and the changes that help."""
    pricer = GraphPricer(problem)
    result = search(problem.space(restrictions).branches(), pricer, limits=Limits(keep=1), by_memory=True)
    found = tuple(remedies(problem, restrictions))
    where = f"{problem.model} on {problem.cluster.name}"
    if not result.best:
        reasons = "; ".join(f"{item.reason} ({item.example})" for item in rejections[:3]) or "the space is empty"
        return NoPlanError(f"no strategy can run: {reasons}", where=where, nearest=None, found=found, rejections=rejections)
    nearest = result.best[0]
    classes = sorted((line for line in fullest(nearest.estimate).classes if line.amount > 0), key=lambda line: -line.amount)
    shares = ", ".join(f"{line.name.replace('_', ' ')} {format_bytes(line.amount)}" for line in classes)
    count = problem.cluster.num_devices
    kept = f" (after a headroom of {format_percent(problem.headroom_frac)})" if problem.headroom_frac else ""
    what = (
        f"no plan fits {format_bytes(pricer.usable_bytes)} per device{kept} on {count} device{'s' if count > 1 else ''}: the smallest needs "
        f"{format_bytes(nearest.estimate.peak_bytes)} ({shares}) with {describe(nearest.strategy)}"
    )
    return NoPlanError(what, where=where, nearest=nearest, found=found, rejections=rejections)
