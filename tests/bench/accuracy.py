"""How far estimates are from measured runs: one JSON object on stdout, errors as fractions.

python -m tests.bench.accuracy --runs FILE [FILE ...] [--by source,gpu,engine] --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter, defaultdict
from typing import Any

from costmodel.engine import engine as engine_by_name
from costmodel.errors import AutoplanError
from costmodel.estimate import Estimate
from planner.graph import Graph
from planner.models import resolve, spec_graph
from planner.pricing import LoweringCache, estimate_graph
from tests.bench.runs import Problem, problem, read_rows, reason

GIB = 2**30


class Pricer:
    """Prices cases; graphs and lowering caches are shared between cases of one model."""

    def __init__(self) -> None:
        self.graphs: dict[str, Graph] = {}
        self.caches: dict[str, LoweringCache] = {}

    def price(self, case: Problem) -> Estimate:
        """The estimate of one case. Raises AutoplanError when it cannot be priced."""
        key = json.dumps([case.config, case.job.seq_len], sort_keys=True)
        if key not in self.graphs:
            self.graphs[key] = spec_graph(resolve(case.config), batch=1, sequence=case.job.seq_len)
        cache = self.caches.setdefault(key, LoweringCache())
        return estimate_graph(self.graphs[key], case.cluster, case.job, case.strategy, engine_by_name(case.engine), cache)


def summary(errors: list[float]) -> dict[str, Any]:
    """n, mape, median, p90, max of absolute relative errors, and the signed mean (bias)."""
    if not errors:
        return {"n": 0}
    sizes = sorted(map(abs, errors))
    return {
        "n": len(sizes),
        "mape": statistics.fmean(sizes),
        "median": statistics.median(sizes),
        "p90": sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        "max": sizes[-1],
        "bias": statistics.fmean(errors),
    }


def score(rows: list[dict[str, Any]], by: tuple[str, ...]) -> dict[str, Any]:
    """Prices every row with `use.full_plan` and compares with what was measured."""
    pricer = Pricer()
    refused: Counter[str] = Counter()
    time: dict[str, list[float]] = defaultdict(list)
    memory: dict[str, list[float]] = defaultdict(list)
    outcomes: Counter[tuple[bool, bool]] = Counter()
    wanted = [row for row in rows if row["use"]["full_plan"]]
    for row in wanted:
        measured, use = row["measured"], row["use"]
        try:
            case = problem(row)
            estimate = pricer.price(case)
        except AutoplanError as error:
            refused[reason(error)] += 1
            continue
        labels = {"source": case.source, "gpu": row["cluster"]["gpu"], "engine": case.engine}
        for key in ("all", *(f"{name}={labels[name]}" for name in by)):
            if use["time"] and measured.get("step_time_s"):
                time[key].append(estimate.step_s / measured["step_time_s"] - 1)
            if use["memory"] and measured.get("peak_memory_gib"):
                memory[key].append(estimate.peak_bytes / GIB / measured["peak_memory_gib"] - 1)
        if use["feasibility"] and measured.get("oom") is not None:
            outcomes[(estimate.fits, not measured["oom"])] += 1
    total = sum(outcomes.values())
    return {
        "rows": len(wanted),
        "priced": len(wanted) - sum(refused.values()),
        "refused": dict(refused),
        "time": summary(time["all"]),
        "memory": summary(memory["all"]),
        "feasibility": {
            "n": total,
            "right_frac": (outcomes[(True, True)] + outcomes[(False, False)]) / total if total else None,
            "false_fit": outcomes[(True, False)],
            "false_oom": outcomes[(False, True)],
        },
        "by": {key: {"time": summary(time[key]), "memory": summary(memory[key])} for key in sorted({*time, *memory} - {"all"})},
    }


def main(argv: list[str] | None = None) -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.accuracy", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", nargs="+", required=True, metavar="FILE", help=".jsonl or .jsonl.gz files of measured runs")
    parser.add_argument("--by", default="source", help="comma-separated: source, gpu, engine")
    parser.add_argument("--json", action="store_true", help="one line of JSON (the default output is indented)")
    options = parser.parse_args(argv)
    result = score(list(read_rows(options.runs)), tuple(name for name in options.by.split(",") if name))
    sys.stdout.write(json.dumps(result, indent=None if options.json else 2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
