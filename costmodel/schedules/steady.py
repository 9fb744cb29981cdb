"""The time of a whole schedule without playing every micro-batch: exact, because the middle of its lists repeats.

The lists for m + P micro-batches are those for m with one more repetition of a body on every rank (P micro-batches: one, or a round of pp when chunks
interleave). Cut every rank's list at one moment; what runs before the cut depends on nothing after it, and what runs after it depends on at most `depth`
repetitions before it. An end is a maximum of sums of earlier ends. So when, on all ranks, the ends of the last `depth` repetitions before the cut are those of
c repetitions earlier plus one constant L, the next c repetitions are again L later than their predecessors, and the rest of the list ends L later for every c P
micro-batches inserted at the cut. (Max-plus linear systems become periodic: Baccelli et al. 1992, "Synchronization and Linearity", theorem 3.109.) c is 1 when
a rank is the bottleneck, more when a round trip between ranks is: 1F1B on slow links repeats every second micro-batch.

gpipe and breadth_first have no such body, but each stage runs its micro-batches in one row, and a row is one running maximum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from costmodel.schedule import Order, Orders, actions, rank_of_stage, rules
from costmodel.schedules.timeline import StageSeconds, Timeline, finish_times, simulate, timeline

Times = npt.NDArray[np.float64]

# Two sums of the same numbers in another order differ by rounding; a transient that is still moving differs by far more.
TOLERANCE = 1e-11


def runs(
    schedule: str, seconds: StageSeconds, *, pp: int, vpp: int, num_micro_batches: int, transfers_s: tuple[float, ...] = (0.0,)
) -> tuple[Timeline, ...]:
    """`simulate(actions(schedule, ...), seconds, p2p_s=...)` for each of `transfers_s` without the cost of all its micro-batches, equal up to rounding.

    Raises InputError like `actions`.
    """

    made: dict[int, Orders] = {}

    def lists(count: int) -> Orders:
        if count not in made:
            made[count] = actions(schedule, pp=pp, vpp=vpp, num_micro_batches=count)
        return made[count]

    if rules(schedule).whole:
        return tuple(_rows(schedule, seconds, pp, vpp, num_micro_batches, p2p_s) for p2p_s in transfers_s)
    period = pp if rules(schedule).in_rounds and vpp > 1 else 1
    return tuple(_run(lists, rules(schedule).settles * pp, period, seconds, num_micro_batches, p2p_s) for p2p_s in transfers_s)


def _run(lists: Callable[[int], Orders], few: int, period: int, seconds: StageSeconds, num_micro_batches: int, p2p_s: float) -> Timeline:
    while few + period < num_micro_batches:
        short, longer = lists(few), lists(few + period)
        ends = finish_times(short, seconds, p2p_s=p2p_s)
        found = _repetition(short, longer, ends, period)
        if found is None:
            few += -(-few // (2 * period)) * period
            continue
        count, shift_s = found
        times, rest = divmod((num_micro_batches - few) // period, count)
        if not rest:
            return _extended(short, longer, ends, seconds, times * count, times * shift_s)
        few += rest * period
    return simulate(lists(num_micro_batches), seconds, p2p_s=p2p_s)


def _extended(short: Orders, longer: Orders, ends: list[list[float]], seconds: StageSeconds, repetitions: int, shift_s: float) -> Timeline:
    counts = []
    for few, more in zip(short, longer, strict=True):
        once, twice = (Counter((stage, kind) for stage, kind, _ in order) for order in (few, more))
        counts.append({key: times + repetitions * (twice[key] - times) for key, times in once.items()})
    return timeline(tuple(times[-1] + shift_s for times in ends), counts, seconds)


def _repetition(short: Orders, longer: Orders, ends: list[list[float]], period: int) -> tuple[int, float] | None:
    """(c, L) of the module docstring, None when the lists have no body or their times do not repeat yet."""
    lengths = [len(more) - len(few) for few, more in zip(short, longer, strict=True)]
    latest = [_latest_cut(few, more, length, period) for few, more, length in zip(short, longer, lengths, strict=True)]
    if min(latest) < 1:
        return None
    moment = min(times[cut - 1] for times, cut in zip(ends, latest, strict=True))
    cuts = [int(np.searchsorted(times, moment, side="right")) for times in ends]
    firsts = [_first_repeated(order, cut, length, period) for order, cut, length in zip(short, cuts, lengths, strict=True)]
    depth = _depth(longer, cuts, lengths, period)
    if depth is None:
        return None
    available = min((cut - first) // length for cut, first, length in zip(cuts, firsts, lengths, strict=True))
    if available <= depth:
        return None
    last = [
        np.asarray(times[cut - available * length : cut]).reshape(available, length)
        for times, cut, length in zip(ends, cuts, lengths, strict=True)
    ]
    table = np.concatenate(last, axis=1)
    for count in range(1, available - depth + 1):
        shifts = table[-depth:] - table[-depth - count : -count]
        if float(np.ptp(shifts)) <= TOLERANCE * moment:
            return count, float(np.mean(shifts))
    return None


def _latest_cut(short: Order, longer: Order, length: int, period: int) -> int:
    """The latest position where inserting the next `length` actions of `longer` into `short` makes `longer`, 0 if there is none."""
    cut = next((position for position, (few, more) in enumerate(zip(short, longer, strict=False)) if few != more), len(short))
    rest = tuple((stage, kind, micro + period) for stage, kind, micro in short[cut:])
    return cut if longer[cut + length :] == rest else 0


def _first_repeated(order: Order, cut: int, length: int, period: int) -> int:
    """The first position from which on, up to `cut`, every action is that of `length` positions earlier with `period` added; the earlier one counts."""
    position = cut - 1
    while position >= length and order[position - length] == (order[position][0], order[position][1], order[position][2] - period):
        position -= 1
    return position + 1 - length


def _depth(longer: Orders, cuts: list[int], lengths: list[int], period: int) -> int | None:
    """How many repetitions back an action can depend on, None when a body lacks a stage: micro-batches that lie between two stages, in repetitions."""
    firsts: dict[tuple[int, str], int] = {}
    for order, cut, length in zip(longer, cuts, lengths, strict=True):
        for stage, kind, micro in order[cut : cut + length]:
            firsts.setdefault((stage, "I" if kind == "B" else kind), micro)
    num_stages = 1 + max(stage for order in longer for stage, _, _ in order)
    if any((stage, kind) not in firsts for stage in range(num_stages) for kind in "FI"):
        return None
    between = [firsts[stage, "F"] - firsts[stage + 1, "F"] for stage in range(num_stages - 1)]
    between += [firsts[stage + 1, "I"] - firsts[stage, "I"] for stage in range(num_stages - 1)]
    return 2 + max((-(-max(0, count) // period) for count in between), default=0)


def _rows(schedule: str, seconds: StageSeconds, pp: int, vpp: int, num_micro_batches: int, p2p_s: float) -> Timeline:
    ranks = rank_of_stage(schedule, pp=pp, vpp=vpp)
    wait = p2p_s if pp > 1 else 0.0
    clock = [0.0] * pp
    for kind, stages in (("F", range(pp * vpp)), ("B", reversed(range(pp * vpp)))):
        arrivals: Times = np.zeros(num_micro_batches)
        for stage in stages:
            rank, cost = ranks[stage], seconds.by_kind()[kind][stage]
            before = np.arange(num_micro_batches) * cost
            ends = np.maximum.accumulate(np.maximum(arrivals, clock[rank]) - before) + before + cost
            clock[rank] = float(ends[-1])
            arrivals = ends + wait
    counts = [{(stage, kind): num_micro_batches for stage, at in enumerate(ranks) if at == rank for kind in "FB"} for rank in range(pp)]
    return timeline(tuple(clock), counts, seconds)
