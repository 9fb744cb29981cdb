"""How good the plan we rank first is: one JSON object on stdout, fractions of the measured best.

python -m tests.bench.regret --runs FILE [FILE ...] --json

A group is the runs of one model on the same devices with the same global batch, sequence, precision and source, three or more different plans of it measured.
Regret: measured time of the plan ranked first (fastest estimate among those that the estimate says fit) over the best measured, minus 1. Repeated runs of one
plan count once, by their median. Spearman: predicted against measured time, mean over groups.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from tests.bench.calibrated import add_flags, calibrate_and_rest
from tests.bench.price import Priced, price_rows
from tests.bench.runs import measured_step_s, read_rows
from tests.bench.stats import quantile, spearman

MIN_PLANS = 3
WITHIN_FRAC = 0.05


def groups_of(priced: Iterable[Priced]) -> dict[tuple[Any, ...], list[tuple[Priced, float]]]:
    """Group -> (run, measured seconds) of each different plan, groups of MIN_PLANS or more only."""
    found: dict[tuple[Any, ...], dict[Any, list[tuple[Priced, float]]]] = defaultdict(lambda: defaultdict(list))
    for item in priced:
        row = item.row
        seconds = measured_step_s(row) if row["use"]["time"] else None
        if seconds:
            cluster, model = row["cluster"], {key: value for key, value in row["model"].items() if key != "params_b"}
            group = (
                row["source"], row["model"].get("name"), json.dumps(model, sort_keys=True), cluster["gpu"], cluster["gpus"], item.problem.job,
            )  # fmt: skip
            found[group][item.problem.strategy, item.problem.engine].append((item, seconds))
    merged = {
        group: [(runs[0][0], statistics.median(seconds for _, seconds in runs)) for runs in plans.values()]
        for group, plans in found.items()
    }
    return {group: plans for group, plans in merged.items() if len(plans) >= MIN_PLANS}


def regret_of(plans: Sequence[tuple[Priced, float]]) -> float:
    """Measured time of the plan ranked first over the best, minus 1."""
    _, picked = min(plans, key=lambda plan: (not plan[0].estimate.fits, plan[0].estimate.step_s))
    return picked / min(seconds for _, seconds in plans) - 1.0


def score(priced: Iterable[Priced]) -> dict[str, Any]:
    """The benchmark's object (see docs/accuracy.md); figures of no groups are null."""
    groups = groups_of(priced)
    regrets = sorted(map(regret_of, groups.values()))
    ranks = [spearman([item.estimate.step_s for item, _ in plans], [seconds for _, seconds in plans]) for plans in groups.values()]
    known = [rank for rank in ranks if rank is not None]
    return {
        "groups": len(regrets), "mean": statistics.fmean(regrets) if regrets else None, "p90": quantile(regrets, 0.9) if regrets else None,
        "max": regrets[-1] if regrets else None,
        "within_5pct_frac": sum(regret <= WITHIN_FRAC for regret in regrets) / len(regrets) if regrets else None,
        "spearman": statistics.fmean(known) if known else None,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.regret", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", nargs="+", required=True, metavar="FILE", help=".jsonl or .jsonl.gz files of measured runs")
    add_flags(parser)
    parser.add_argument("--rows", action="store_true", help="a line a group: regret, Spearman, picked and best run")
    parser.add_argument("--json", action="store_true", help="one line of JSON (the default output is indented)")
    options = parser.parse_args(argv)
    priced, _ = price_rows(read_rows(options.runs))
    priced = calibrate_and_rest(priced, options.calibrate_on, options.seed)
    if options.rows:
        for group, plans in groups_of(priced).items():
            picked, _ = min(plans, key=lambda plan: (not plan[0].estimate.fits, plan[0].estimate.step_s))
            best, _ = min(plans, key=lambda plan: plan[1])
            rank = spearman([item.estimate.step_s for item, _ in plans], [seconds for _, seconds in plans])
            ranked = "-" if rank is None else f"{rank:.3f}"
            head = f"{group[0]} {group[1]} {group[4]}x{group[3]} batch {group[5].global_batch}: {len(plans)} plans"
            sys.stdout.write(
                f"{head}, regret {regret_of(plans):.1%}, spearman {ranked}, picked {picked.row['id']}, best {best.row['id']}\n"
            )
        return 0
    sys.stdout.write(json.dumps(score(priced), indent=None if options.json else 2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
