"""Pipeline schedules: which exist, what they need, where their stages sit, and their actions in order on every rank.

| schedule         | stages      | bubble (equal stages)                     | micro-batches held, of a whole rank              |
|------------------|-------------|-------------------------------------------|--------------------------------------------------|
| gpipe            | 1           | (pp - 1)(F + B)                           | m                                                |
| 1f1b             | 1           | (pp - 1)(F + B)                           | pp - rank                                        |
| interleaved_1f1b | vpp, looped | (pp - 1)(F + B)/vpp                       | ((vpp - 1) pp + 2 (pp - 1 - rank) + 1)/vpp       |
| breadth_first    | vpp, looped | (pp - 1)(F + B)/vpp                       | m                                                |
| zb_h1            | vpp, looped | (pp - 1)(F + I - W)/vpp                   | pp (vpp 1), pp - rank of them before I           |
| zb_h2            | 1           | (pp - 1)(F + I - 2 W), plus the stagger   | 2 pp - 1, 2 (pp - rank) - 1 of them before I     |
| zbv              | 2, V        | 0 for F = I = W, plus the stagger         | pp                                               |
| v_half           | 2, V        | about pp/2 (F + I + W) for F = I = W      | pp/2 + 1                                         |
| v_min            | 2, V        | about 2 pp/3 (F + I + W) for F = I = W    | pp/3 + 4/3                                       |
| dualpipev        | 2, V        | at most (pp - 1)(F + 2 B - 3 W)/2         | pp + 1/2                                         |

F, I, W are the seconds of a whole rank, B = I + W. The bubble is what a rank idles between its own first and last action. Rank r starts when r forwards
are done: schedules that also end in that order ("stagger") are free of bubbles only where the optimizer of one rank need not wait for the next.

Sources: gpipe Huang et al. 2019 (arXiv 1811.06965); 1f1b and interleaved Narayanan et al. 2021 (2104.04473); breadth_first Lamy-Poirier 2022 (2211.05953);
zb_h1, zb_h2, zbv Qi et al. 2023 (2401.10241); v_half, v_min Qi et al. 2024 (2405.15362); dualpipev DeepSeek-AI 2024 (2412.19437) and Sea AI Lab.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.errors import InputError
from costmodel.schedules.action import Action, Order, Orders
from costmodel.schedules.building_block import SLOPES, repeated
from costmodel.schedules.in_flight import InFlight, peak_in_flight
from costmodel.schedules.looped import alternating, breadth_first, gpipe
from costmodel.schedules.v_shaped import dual_pipe_v, zbv

__all__ = [
    "SCHEDULES",
    "Action",
    "InFlight",
    "Order",
    "Orders",
    "actions",
    "check",
    "fewest",
    "peak_in_flight",
    "problem",
    "rank_of_stage",
    "rules",
]


ANY = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a schedule needs. chunks: (fewest, most) model chunks per rank. v_shaped: stages go down the ranks and up again.

    splits_backward: has I and W. in_rounds: with several chunks, micro-batches in multiples of pp. fills: at least one micro-batch a stage.
    whole: keeps every micro-batch until the last forward, so that its lists have no repeating middle. settles: after how many times pp micro-batches its
    times repeat for stages as even as a model's (found by trying; costmodel.schedules.steady looks there first, whatever it finds is exact).
    """

    name: str
    chunks: tuple[int, int] = (1, 1)
    v_shaped: bool = False
    splits_backward: bool = False
    in_rounds: bool = False
    fills: bool = False
    whole: bool = False
    settles: int = 6


SCHEDULES = (
    Rules(name="none"),
    Rules(name="gpipe", whole=True),
    Rules(name="1f1b", settles=2),
    Rules(name="interleaved_1f1b", chunks=(2, ANY), in_rounds=True),
    Rules(name="breadth_first", chunks=(2, ANY), whole=True),
    Rules(name="zb_h1", chunks=(1, ANY), in_rounds=True, splits_backward=True, settles=8),
    Rules(name="zb_h2", splits_backward=True, settles=8),
    Rules(name="zbv", chunks=(2, 2), v_shaped=True, splits_backward=True),
    Rules(name="v_half", chunks=(2, 2), v_shaped=True, splits_backward=True, settles=3),
    Rules(name="v_min", chunks=(2, 2), v_shaped=True, splits_backward=True, settles=3),
    Rules(name="dualpipev", chunks=(2, 2), v_shaped=True, splits_backward=True, fills=True),
)


def rules(schedule: str) -> Rules:
    """The rules of `schedule`. Raises InputError for an unknown name."""
    for candidate in SCHEDULES:
        if candidate.name == schedule:
            return candidate
    known = ", ".join(candidate.name for candidate in SCHEDULES)
    raise InputError(f"unknown schedule {schedule!r}", where="Strategy.schedule", remedy=f"use one of {known}")


def check(schedule: str, *, pp: int, vpp: int, num_micro_batches: int) -> None:
    """Raise InputError when `schedule` cannot run with these numbers."""
    refused = problem(schedule, pp=pp, vpp=vpp, num_micro_batches=num_micro_batches)
    if refused is not None:
        raise refused


def problem(schedule: str, *, pp: int, vpp: int, num_micro_batches: int) -> InputError | None:
    """Why `schedule` cannot run with these numbers, None when it can. Raises InputError for an unknown name."""
    needs = rules(schedule)
    fewest, most = needs.chunks
    if not fewest <= vpp <= most:
        text = "one chunk" if most == 1 else f"{fewest} chunks" if fewest == most else f"{fewest} or more chunks"
        remedy = f"use vpp {fewest}" + ("" if most > 1 else ", or interleaved_1f1b")
        return InputError(f"schedule {schedule} with {vpp} chunks a rank; it runs {text}", where="Strategy.vpp", remedy=remedy)
    where, remedy = "Strategy.schedule", "change the micro-batch, the global batch or pp, or use 1f1b"
    if min(num_micro_batches, pp) < 1:
        return InputError(f"{num_micro_batches} micro-batches on pp {pp}", where=where, remedy="give at least 1 of each")
    if needs.in_rounds and vpp > 1 and num_micro_batches % pp:
        what = f"{num_micro_batches} micro-batches are not a multiple of pp {pp}, as {schedule} needs"
        return InputError(what, where=where, remedy=remedy)
    if needs.fills and num_micro_batches < pp * vpp:
        what = f"{num_micro_batches} micro-batches are fewer than {schedule} needs, one for each of {pp * vpp} stages"
        return InputError(what, where=where, remedy=remedy)
    return None


def rank_of_stage(schedule: str, *, pp: int, vpp: int) -> tuple[int, ...]:
    """The pipeline rank of every stage: s modulo pp, or down and up again for V-shaped schedules."""
    if rules(schedule).v_shaped:
        return (*range(pp), *reversed(range(pp)))
    return tuple(stage % pp for stage in range(pp * vpp))


def actions(schedule: str, *, pp: int, vpp: int, num_micro_batches: int) -> Orders:
    """The actions of every rank in execution order. Raises InputError for a schedule that cannot run with these numbers."""
    check(schedule, pp=pp, vpp=vpp, num_micro_batches=num_micro_batches)
    if schedule in SLOPES:
        return repeated(pp, num_micro_batches, SLOPES[schedule])
    return tuple(_order(schedule, rank, pp, vpp, num_micro_batches) for rank in range(pp))


def _order(schedule: str, rank: int, pp: int, vpp: int, num_micro_batches: int) -> Order:
    after = pp - 1 - rank
    match schedule:
        case "gpipe":
            return gpipe(rank, num_micro_batches)
        case "breadth_first":
            return breadth_first(rank, pp, vpp, num_micro_batches)
        case "interleaved_1f1b":
            return alternating(rank, pp, vpp, num_micro_batches, lead=2 * after)
        case "zb_h1":
            return alternating(rank, pp, vpp, num_micro_batches, lead=after, lag=rank)
        case "zb_h2":
            return alternating(rank, pp, vpp, num_micro_batches, lead=2 * after, lag=2 * rank)
        case "zbv":
            return zbv(rank, pp, num_micro_batches)
        case "dualpipev":
            return dual_pipe_v(rank, pp, num_micro_batches)
    return alternating(rank, pp, vpp, num_micro_batches, lead=after)


def fewest(schedule: str, *, pp: int, num_micro_batches: int) -> int:
    """The fewest micro-batches under which every rank's in-flight peak is that of `num_micro_batches`: later ones repeat the middle of the list."""
    return num_micro_batches if rules(schedule).whole else min(num_micro_batches, 3 * pp)
