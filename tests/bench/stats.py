"""The few statistics that the benchmarks print. Errors are fractions: predicted / measured - 1."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any


def summary(errors: Sequence[float]) -> dict[str, Any]:
    """n, mape, median, p90, max of absolute errors, and the signed mean (bias); without errors every figure is null."""
    if not errors:
        return {"n": 0, "mape": None, "median": None, "p90": None, "max": None, "bias": None}
    sizes = sorted(map(abs, errors))
    return {
        "n": len(sizes), "mape": statistics.fmean(sizes), "median": statistics.median(sizes), "p90": quantile(sizes, 0.9), "max": sizes[-1],
        "bias": statistics.fmean(errors),
    }  # fmt: skip


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of `ordered` (ascending, not empty) do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Rank correlation, ties at their mean rank; None when one side is constant."""
    ranks = [_ranks(first), _ranks(second)]
    if any(len(set(rank)) < 2 for rank in ranks):
        return None
    return statistics.correlation(*ranks)


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks, start = [0.0] * len(values), 0
    while start < len(order):
        stop = start
        while stop < len(order) and values[order[stop]] == values[order[start]]:
            stop += 1
        for position in order[start:stop]:
            ranks[position] = (start + stop - 1) / 2.0
        start = stop
    return ranks
