"""Levers: one-step changes of a problem and strategy, each priced again. They answer "what would have to change" for a plan that exists and
"what is the smallest change that fits" when none does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from costmodel.engine import ENGINES
from costmodel.errors import InputError
from costmodel.hardware import Cluster
from costmodel.optimizers import OPTIMIZERS
from costmodel.units import format_bytes, format_seconds
from planner.outcome import Priced
from planner.plan import Alternative
from planner.pricer import GraphPricer
from planner.problem import Problem
from planner.restrict import Restrictions
from planner.search import first_that_fits
from planner.space import divisors
from planner.strategy import Strategy

MAX_NODE_FACTOR = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change under which a plan exists: what to change in words, and the first plan found under it (the fastest is at most as slow)."""

    change: str
    strategy: Strategy
    step_s: float
    peak_bytes: float

    def __str__(self) -> str:
        return f"{self.change}: then {format_bytes(self.peak_bytes)} at {format_seconds(self.step_s)} a step or faster"


def levers(problem: Problem, strategy: Strategy, pricer: GraphPricer) -> tuple[Alternative, ...]:
    """The neighbours of `strategy` in one choice, and the same strategy under another optimizer, precision or twice the nodes, that can run."""
    found = []
    for remark, changed in _neighbours(problem, strategy):
        found += _priced(remark, changed, pricer)
    for remark, other, changed in _other_problems(problem, strategy):
        found += _priced(remark, changed, GraphPricer(other))
    return tuple(found)


def zero_stages_that_fit(problem: Problem, strategy: Strategy) -> Iterator[tuple[int, float]]:
    """(stage, peak bytes) of the higher ZeRO stages, sharded over all data-parallel ranks, under which `strategy` fits."""
    mesh, pricer = replace(strategy.mesh, dp_replicate=1, dp_shard=strategy.mesh.dp), GraphPricer(problem)
    for stage in problem.engine.zero_stages:
        if stage > strategy.zero_stage:
            for found in _priced("", replace(strategy, mesh=mesh, zero_stage=stage), pricer):
                if found.fits:
                    yield stage, found.peak_bytes


def _priced(remark: str, strategy: Strategy, pricer: GraphPricer) -> list[Alternative]:
    try:
        estimate = pricer.estimate(strategy)
    except InputError:
        return []
    return [Alternative(strategy=strategy, step_s=estimate.step_s, peak_bytes=estimate.peak_bytes, remark=remark, fits=estimate.fits)]


def _neighbours(problem: Problem, strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    batch = problem.job.global_batch // strategy.mesh.dp
    sizes = divisors(batch)
    position = sizes.index(strategy.micro_batch)
    for size in sizes[max(0, position - 1) : position + 2]:
        if size != strategy.micro_batch:
            yield f"micro-batch {size} instead of {strategy.micro_batch}", replace(strategy, micro_batch=size)
    for recompute in ("none", "selective", "full"):
        if recompute != strategy.recompute:
            text = "no recompute" if recompute == "none" else f"{recompute} recompute"
            yield text, replace(strategy, recompute=recompute, recompute_layers=0)
    for zero in problem.engine.zero_stages:
        if zero != strategy.zero_stage:
            yield f"ZeRO-{zero} instead of ZeRO-{strategy.zero_stage}", replace(strategy, zero_stage=zero)
    if not strategy.compile:
        yield "torch.compile", replace(strategy, compile=True)
    if strategy.mesh.tp > 1:
        state = "without" if strategy.sequence_parallel else "with"
        yield f"{state} sequence parallelism", replace(strategy, sequence_parallel=not strategy.sequence_parallel)


def _other_problems(problem: Problem, strategy: Strategy) -> Iterator[tuple[str, Problem, Strategy]]:
    job = problem.job
    if job.optimizer == "adamw":
        yield "8-bit AdamW", replace(problem, job=replace(job, optimizer="adamw_8bit")), strategy
    if job.precision == "bf16" and problem.cluster.pool.device.peak("fp8"):
        yield "fp8 matmuls", replace(problem, job=replace(job, precision="fp8")), strategy
    mesh = strategy.mesh
    wider = replace(mesh, dp_replicate=2 * mesh.dp_replicate) if mesh.dp_shard == 1 else replace(mesh, dp_shard=2 * mesh.dp_shard)
    twice = with_nodes(problem.cluster, 2 * problem.cluster.pool.num_nodes)
    yield f"twice the devices ({twice.num_devices})", replace(problem, cluster=twice), replace(strategy, mesh=wider)


def with_nodes(cluster: Cluster, num_nodes: int) -> Cluster:
    """`cluster` with `num_nodes` nodes."""
    base = cluster.name.rpartition("*")[0] or cluster.name
    return replace(cluster, name=f"{base}*{num_nodes}", pools=(replace(cluster.pool, num_nodes=num_nodes),))


def remedies(problem: Problem, restrictions: Restrictions) -> Iterator[Remedy]:
    """Changes under which something fits, from the cheapest for the user to the dearest: no headroom, fewer restrictions, another engine, a smaller optimizer,
    more nodes (the fewest that do). Each was searched; what does not help is left out."""
    for change, changed, kept in _changes(problem, restrictions):
        found = any_that_fits(changed, kept)
        if found is not None:
            yield Remedy(change=change, strategy=found.strategy, step_s=found.estimate.step_s, peak_bytes=found.estimate.peak_bytes)
    more = fewest_nodes(problem, restrictions)
    if more is not None:
        yield more


def _changes(problem: Problem, restrictions: Restrictions) -> Iterator[tuple[str, Problem, Restrictions]]:
    if problem.headroom_frac:
        yield "use --headroom 0", replace(problem, headroom_frac=0.0), restrictions
    if restrictions.items:
        yield f"drop --fix {restrictions}", problem, Restrictions()
    for engine in ENGINES:
        if engine.name != problem.engine.name:
            yield f"use --engine {engine.name}", replace(problem, engine=engine), restrictions
    states = {row.name: row.state_bytes for row in OPTIMIZERS}
    for name in sorted(states, key=lambda name: -states[name]):
        if states[name] < states[problem.job.optimizer]:
            yield f"use --optimizer {name}", replace(problem, job=replace(problem.job, optimizer=name)), restrictions


def any_that_fits(problem: Problem, restrictions: Restrictions) -> Priced | None:
    """Some strategy of the problem that fits; None when none does."""
    return first_that_fits(problem.space(restrictions).branches(), GraphPricer(problem))


def fewest_nodes(problem: Problem, restrictions: Restrictions) -> Remedy | None:
    """The fewest nodes that hold a plan: doubled until one fits, then narrowed between the last two sizes."""
    nodes = problem.cluster.pool.num_nodes

    def attempt(count: int) -> Priced | None:
        return any_that_fits(replace(problem, cluster=with_nodes(problem.cluster, count)), restrictions)

    low, high = nodes, 2 * nodes
    found = attempt(high)
    while found is None and high < MAX_NODE_FACTOR * nodes:
        low, high = high, 2 * high
        found = attempt(high)
    if found is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        smaller = attempt(middle)
        low, high, found = (low, middle, smaller) if smaller is not None else (middle, high, found)
    return Remedy(
        change=f"use {high} nodes instead of {nodes}",
        strategy=found.strategy,
        step_s=found.estimate.step_s,
        peak_bytes=found.estimate.peak_bytes,
    )
