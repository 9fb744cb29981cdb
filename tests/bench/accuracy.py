"""How far estimates are from measured runs: one JSON object on stdout, errors as fractions.

python -m tests.bench.accuracy --runs FILE [FILE ...] [--by source,gpu,engine,model] --json
python -m tests.bench.accuracy --runs FILE --rows        one line a row: predicted, measured, error, seconds by cause, bytes by class
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from costmodel.estimate import Estimate
from tests.bench.calibrated import add_flags, calibrate_and_rest
from tests.bench.memory_kinds import kind_of, measured_gib, predicted_bytes
from tests.bench.price import Priced, price_rows
from tests.bench.runs import measured_step_s, read_rows
from tests.bench.stats import summary

GIB = 2.0**30
LABELS = ("source", "gpu", "engine", "model")


def time_error(item: Priced) -> float | None:
    """predicted / measured - 1 of a row that is fit for time."""
    measured = measured_step_s(item.row) if item.row["use"]["time"] else None
    return item.estimate.step_s / measured - 1.0 if measured else None


def memory_error(item: Priced) -> tuple[str, float] | None:
    """(kind, predicted / measured - 1) of a row that is fit for memory: the same kind of bytes on the same rank."""
    measured = item.row["measured"]
    if not (item.row["use"]["memory"] and measured.get("peak_memory_gib")):
        return None
    kind = kind_of(measured.get("peak_memory_kind"))
    gib = measured_gib(measured["peak_memory_gib"], measured.get("peak_memory_unit"))
    return ", ".join(kind), predicted_bytes(item.estimate, kind) / GIB / gib - 1.0


def labels(item: Priced) -> dict[str, str]:
    """What --by may group by."""
    row = item.row
    return {
        "source": row["source"],
        "gpu": row["cluster"]["gpu"],
        "engine": item.problem.engine.name,
        "model": row["model"].get("name") or "unnamed",
    }


def score(priced: Sequence[Priced], refused: Counter[str], by: Sequence[str]) -> dict[str, Any]:
    """The benchmark's object (see docs/accuracy.md)."""
    groups: dict[str, list[Priced]] = defaultdict(list)
    for item in priced:
        for name in by:
            groups[f"{name}={labels(item)[name]}"].append(item)
    return {
        "rows": len(priced) + sum(refused.values()), "priced": len(priced), "refused": dict(refused.most_common()), **_figures(priced),
        "by": {key: _figures(groups[key]) for key in sorted(groups)},
    }  # fmt: skip


def _figures(items: Sequence[Priced]) -> dict[str, Any]:
    times = [error for item in items if (error := time_error(item)) is not None]
    memories = [found for item in items if (found := memory_error(item)) is not None]
    kinds: dict[str, list[float]] = defaultdict(list)
    for kind, error in memories:
        kinds[kind].append(error)
    by_kind = {kind: summary(errors) for kind, errors in sorted(kinds.items())}
    return {
        "time": summary(times), "memory": {**summary([error for _, error in memories]), "by_kind": by_kind}, "feasibility": _feasibility(items),
        "coverage": {"time_frac": _coverage(items, "time"), "memory_frac": _coverage(items, "memory")},
    }  # fmt: skip


def _feasibility(items: Sequence[Priced]) -> dict[str, Any]:
    wanted = [item for item in items if item.row["use"]["feasibility"] and item.row["measured"].get("oom") is not None]
    outcomes = Counter((fits(item.estimate), not item.row["measured"]["oom"]) for item in wanted)
    right = outcomes[True, True] + outcomes[False, False]
    return {
        "n": len(wanted), "right_frac": right / len(wanted) if wanted else None, "false_fit": outcomes[True, False],
        "false_oom": outcomes[False, True],
    }  # fmt: skip


def fits(estimate: Estimate) -> bool:
    """Whether the estimate says that the plan fits."""
    return bool(estimate.fits)


def _coverage(items: Sequence[Priced], what: str) -> float | None:
    """Share of measured figures inside the estimate's 90 % interval; None while estimates carry none (Estimate.step_interval_s, peak_interval_bytes)."""
    inside = []
    for item in items:
        error = time_error(item) if what == "time" else (found[1] if (found := memory_error(item)) else None)
        interval = getattr(item.estimate, "step_interval_s" if what == "time" else "peak_interval_bytes", None)
        if error is None or not interval:
            continue
        center = item.estimate.step_s if what == "time" else item.estimate.peak_bytes
        inside.append(interval[0] <= center / (1.0 + error) <= interval[1])
    return sum(inside) / len(inside) if inside else None


def line(item: Priced) -> str:
    """One row of --rows."""
    estimate, row = item.estimate, item.row
    text = [row["id"]]
    if (error := time_error(item)) is not None:
        causes = " ".join(
            f"{part.name}={part.amount:.4g}" for part in (*estimate.time, *estimate.communication_by_axis) if part.amount > 0.0
        )
        text.append(f"time {estimate.step_s:.4g}s of {estimate.step_s / (1 + error):.4g}s ({error:+.1%}) [{causes}]")
    if (found := memory_error(item)) is not None:
        fullest = max(estimate.stages, key=lambda stage: stage.peak_bytes)
        classes = " ".join(f"{part.name}={part.amount / GIB:.3g}" for part in fullest.classes if part.amount > 0.0)
        text.append(f"memory ({found[0]}) {found[1]:+.1%} of {row['measured']['peak_memory_gib']:.4g}GiB [{classes}]")
    if row["use"]["feasibility"] and row["measured"].get("oom") is not None:
        text.append(f"{'fits' if fits(estimate) else 'does not fit'}, measured {'oom' if row['measured']['oom'] else 'fits'}")
    return "  ".join(text)


def main(argv: list[str] | None = None) -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.accuracy", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", nargs="+", required=True, metavar="FILE", help=".jsonl or .jsonl.gz files of measured runs")
    parser.add_argument("--by", default="source", help=f"comma-separated: {', '.join(LABELS)}")
    add_flags(parser)
    parser.add_argument("--rows", action="store_true", help="a line a row instead of the summary")
    parser.add_argument("--json", action="store_true", help="one line of JSON (the default output is indented)")
    options = parser.parse_args(argv)
    by = tuple(name for name in options.by.split(",") if name)
    if set(by) - set(LABELS):
        parser.error(f"--by takes {', '.join(LABELS)}")
    priced, refused = price_rows(read_rows(options.runs))
    priced = calibrate_and_rest(priced, options.calibrate_on, options.seed)
    if options.rows:
        sys.stdout.write("".join(f"{line(item)}\n" for item in priced))
        return 0
    sys.stdout.write(json.dumps(score(priced, refused, by), indent=None if options.json else 2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
