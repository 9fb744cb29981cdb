"""Pricing: a graph under a strategy on a cluster becomes an Estimate."""

from __future__ import annotations

from costmodel.engine import Engine
from costmodel.estimate import Estimate
from costmodel.hardware import Cluster
from costmodel.simulate import estimate_step
from planner.graph import Graph
from planner.job import Job
from planner.lower import LoweringCache, lower
from planner.strategy import Strategy
from planner.validity import validate


def estimate_graph(
    graph: Graph, cluster: Cluster, job: Job, strategy: Strategy, engine: Engine, cache: LoweringCache | None = None
) -> Estimate:
    """Seconds and bytes of one optimizer step.

    `cache` keeps lowered blocks between calls on the same graph: pass one object to many estimates. Raises InputError naming the field when the strategy
    cannot run (planner.validity).
    """
    validate(graph, cluster, job, strategy, engine)
    return estimate_step(lower(graph, job, strategy, engine, cache), cluster, engine)
