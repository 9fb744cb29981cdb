"""Price measured runs: rows that the planner can price beside their estimates, the others by reason."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from costmodel.errors import AutoplanError
from costmodel.estimate import Estimate
from planner.graph import Graph
from planner.lower import LoweringCache
from planner.models import resolve, spec_graph
from planner.pricing import estimate_graph
from tests.bench.machines import Machines
from tests.bench.runs import LORA_RANK, LORA_TARGETS, Problem, Row, problem, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A row, what it became, and its estimate."""

    row: Row
    problem: Problem
    estimate: Estimate


class Pricer:
    """Graphs, lowered blocks and clusters are shared between the rows of a run of the benchmark."""

    def __init__(self) -> None:
        self.machines = Machines()
        self._graphs: dict[str, tuple[Graph, LoweringCache]] = {}

    def price(self, row: Row) -> Priced:
        """One row. Raises AutoplanError when it cannot be expressed or priced."""
        case = problem(row, self.machines)
        graph, cache = self._graph(case)
        estimate = estimate_graph(graph, case.cluster, case.job, case.strategy, case.engine, cache)
        return Priced(row=row, problem=case, estimate=estimate)

    def _graph(self, case: Problem) -> tuple[Graph, LoweringCache]:
        key = json.dumps([case.config, case.job.seq_len, case.lora], sort_keys=True)
        if key not in self._graphs:
            spec = resolve(case.config)
            spec = spec.lora(LORA_RANK, LORA_TARGETS) if case.lora else spec
            self._graphs[key] = (spec_graph(spec, batch=1, sequence=case.job.seq_len), LoweringCache())
        return self._graphs[key]


def price_rows(rows: Iterable[Row], pricer: Pricer | None = None) -> tuple[list[Priced], Counter[str]]:
    """Rows with use.full_plan: priced, and refusals counted by reason."""
    pricer = pricer or Pricer()
    priced, refused = [], Counter[str]()
    for row in rows:
        if not row["use"]["full_plan"]:
            continue
        try:
            priced.append(pricer.price(row))
        except AutoplanError as error:
            refused[reason(error)] += 1
    return priced, refused
