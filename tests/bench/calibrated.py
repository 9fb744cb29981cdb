"""--calibrate-on N --seed S: what a user gets after N short runs of his own. In every source N random rows are fitted as `autoplan calibrate --from-runs`
does, the others scored under the fit; a source of fewer than 2 N rows gives half of its rows."""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from costmodel.calibrate import Calibration, calibrate, calibrated
from tests.bench.memory_kinds import kind_of, measured_gib, stage_bytes, stage_of
from tests.bench.price import Priced
from tests.bench.runs import measured_step_s


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The two flags."""
    parser.add_argument(
        "--calibrate-on", type=int, default=0, metavar="N", help="fit the calibration on N random rows of each source, score the rest"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the random rows (default 0)")


def calibrate_and_rest(priced: Sequence[Priced], count: int, seed: int) -> list[Priced]:
    """The rows left out of the fit, under the calibration of their source; all rows as they are when `count` is 0."""
    if count <= 0:
        return list(priced)
    sources: dict[str, list[Priced]] = defaultdict(list)
    for item in priced:
        sources[item.row["source"]].append(item)
    rest = []
    for source in sorted(sources):
        items = [item for item in sources[source] if item.row["use"]["time"] or item.row["use"]["memory"]]
        chosen = random.Random(f"{seed} {source}").sample(range(len(items)), min(count, len(items) // 2))
        fitted = {id(items[index]) for index in chosen}
        left = [item for item in sources[source] if id(item) not in fitted]
        if not chosen:
            rest += left
            continue
        found = fit([items[index] for index in sorted(chosen)])
        rest += [replace(item, estimate=calibrated(item.estimate, found)) for item in left]
    return rest


def fit(items: Sequence[Priced]) -> Calibration:
    """The calibration of measured rows of one stack."""
    steps, peaks = [], []
    for item in items:
        use, measured = item.row["use"], item.row["measured"]
        seconds = measured_step_s(item.row)
        if use["time"] and seconds:
            steps.append((item.estimate, seconds))
        if use["memory"] and measured.get("peak_memory_gib"):
            kind = kind_of(measured.get("peak_memory_kind"))
            stage = stage_of(item.estimate, kind)
            other = stage_bytes(stage, kind[0]) - stage.allocated_bytes
            gib = measured_gib(measured["peak_memory_gib"], measured.get("peak_memory_unit"))
            peaks.append((stage.allocated_bytes, other, gib * 2.0**30))
    return calibrate(items[0].problem.engine.name if items else "", steps, peaks)
