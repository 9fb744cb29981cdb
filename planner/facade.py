"""autoplan, estimate, plan_for: the three calls behind the facade and the command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from costmodel.engine import Engine
from costmodel.engine import engine as engine_of
from costmodel.errors import InputError, UnprovenError
from costmodel.estimate import Estimate
from costmodel.hardware import Cluster
from costmodel.units import format_percent
from planner.explain import compare
from planner.graph import Graph
from planner.infeasible import no_plan
from planner.job import Job
from planner.levers import levers
from planner.outcome import Limits, Priced, Progress
from planner.plan import Alternative, Plan, Proof, Rejection
from planner.pricer import GraphPricer
from planner.problem import Problem, problem_of
from planner.restrict import parse_restrictions
from planner.search import search
from planner.stages import split
from planner.strategy import Strategy

if TYPE_CHECKING:
    from planner.problem import Model

T = TypeVar("T")


def autoplan(
    model: Model,
    cluster: Cluster | str,
    job: Job,
    *,
    engine: Engine | str = "torch",
    fix: str | Mapping[str, object] | None = None,
    top_k: int = 1,
    time_limit_s: float | None = None,
    headroom_frac: float | None = None,
    require_optimal: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """The fastest plan that fits.

    model: a name, a config.json or its folder, a ModelSpec, a Graph, or an nn.Module (captured on fake tensors). fix: restrictions (planner.restrict).
    top_k: how many plans to prove; the best becomes the plan, the others its alternatives. time_limit_s: stop then with the best so far and a valid bound.
    Ctrl-C does the same. headroom_frac: the share of a device's memory to leave free (default: 0.05, of CPU ranks 0). require_optimal: an unproven plan is
    an error.

    Raises InputError for inputs that cannot be used, InfeasibleError (planner.infeasible.NoPlanError) when nothing fits, UnprovenError when stopped
    before the first plan, or before its proof with `require_optimal`.
    """
    problem = problem_of(model, cluster, job, _engine(engine)).with_headroom(headroom_frac)
    return solve(
        problem,
        fix=fix,
        limits=Limits(top_k=top_k, keep=max(4, top_k), time_limit_s=time_limit_s),
        require_optimal=require_optimal,
        progress=progress,
    )


def solve(
    problem: Problem,
    *,
    fix: str | Mapping[str, object] | None = None,
    limits: Limits | None = None,
    require_optimal: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """The plan of a Problem; see autoplan."""
    restrictions = parse_restrictions(fix)
    if problem.job.precision not in problem.engine.precisions:
        known = ", ".join(problem.engine.precisions)
        raise InputError(
            f"{problem.engine.name} does not train in {problem.job.precision}",
            where="Job.precision",
            remedy=f"use one of {known}, or another engine",
        )
    pricer = GraphPricer(problem)
    space = problem.space(restrictions)
    result = search(space.branches(), pricer, limits=limits, progress=progress)
    if result.proof is None:
        if result.status == "optimal":
            raise no_plan(problem, restrictions, result.rejections)
        raise UnprovenError(
            f"the search stopped ({result.status}) before it found a plan",
            where=problem.model,
            remedy="allow more time or fix some choices",
        )
    if require_optimal and result.proof.status != "optimal":
        raise UnprovenError(
            f"the search stopped ({result.status}) with a gap of {format_percent(result.proof.gap_frac)}", where=problem.model,
            remedy="allow more time, fix some choices, or accept an unproven plan",
        )  # fmt: skip
    best, *others = result.best
    alternatives = tuple(_alternative(best, other) for other in others)
    return _plan(problem, best, result.proof, alternatives, levers(problem, best.strategy, pricer), result.rejections, space.notes())


def estimate(model: Model, cluster: Cluster | str, job: Job, strategy: Strategy, engine: Engine | str = "torch") -> Estimate:
    """Seconds and bytes of one step under a given strategy. Raises InputError when it cannot run; whether it fits is `Estimate.fits`."""
    _a(strategy, Strategy, "strategy", "give a planner.Strategy")
    return GraphPricer(problem_of(model, cluster, job, _engine(engine))).estimate(strategy)


def plan_for(model: Model, cluster: Cluster | str, job: Job, strategy: Strategy, engine: Engine | str = "torch") -> Plan:
    """The plan of a given strategy: nothing is searched, its proof says so. Raises InputError when it cannot run."""
    _a(strategy, Strategy, "strategy", "give a planner.Strategy")
    return plan_of(problem_of(model, cluster, job, _engine(engine)), strategy)


def plan_of(problem: Problem, strategy: Strategy) -> Plan:
    """The plan of a Problem under a given strategy; see plan_for."""
    pricer = GraphPricer(problem)
    priced = Priced(strategy=strategy, estimate=pricer.estimate(strategy))
    step_s = priced.estimate.step_s
    proof = Proof(
        objective_s=step_s, bound_s=step_s, gap_frac=0.0, method="none", status="estimated", num_candidates=1, num_evaluated=1,
    )  # fmt: skip
    return _plan(problem, priced, proof, (), levers(problem, strategy, pricer), ())


def _engine(engine: Engine | str) -> Engine:
    if isinstance(engine, Engine):
        return engine
    return engine_of(_a(engine, str, "engine", "give a name such as torch, or an Engine"))


def _a(value: T, kind: type[T], where: str, remedy: str) -> T:
    """`value`, if it is a `kind`. Raises InputError."""
    if not isinstance(value, kind):
        raise InputError(f"{type(value).__name__} is not a {kind.__name__}", where=where, remedy=remedy)
    return value


def _alternative(best: Priced, other: Priced) -> Alternative:
    estimate = other.estimate
    remark = compare(best.estimate, estimate)
    return Alternative(strategy=other.strategy, step_s=estimate.step_s, peak_bytes=estimate.peak_bytes, remark=remark, fits=estimate.fits)


def _plan(
    problem: Problem,
    best: Priced,
    proof: Proof,
    alternatives: tuple[Alternative, ...],
    changes: tuple[Alternative, ...],
    rejections: tuple[Rejection, ...],
    notes: tuple[str, ...] = (),
) -> Plan:
    graph = problem.graph
    return Plan(
        model=problem.model,
        graph_id=graph.graph_id,
        cluster=problem.cluster,
        job=problem.job,
        engine=problem.engine.name,
        strategy=best.strategy,
        stages=split(graph, best.strategy, problem.engine),
        layouts=layouts(graph) if best.strategy.mesh.tp > 1 else (),
        estimate=best.estimate,
        proof=proof,
        assumptions=tuple(dict.fromkeys((*notes, *problem.assumptions(), *best.estimate.notes))),
        alternatives=alternatives,
        levers=changes,
        rejections=rejections,
        num_parameters=graph.num_parameters,
        num_layers=graph.num_layers,
        tied=graph.tied,
        spec=problem.spec,
    )


def layouts(graph: Graph) -> tuple[tuple[str, str], ...]:
    """(module-path pattern, tensor-parallel style) of every parameterised module; `*` stands for the layer index, equal patterns appear once."""
    found: dict[str, str] = {}
    kinds = {block.kind_id: block for block in graph.kinds}
    for layer in graph.layers:
        block = kinds[layer.kind_id]
        prefix = f"{layer.path}." if block.role == "layer" else ""
        for module, style in block.layouts:
            found.setdefault(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", prefix + module), style)
    return tuple(found.items())
