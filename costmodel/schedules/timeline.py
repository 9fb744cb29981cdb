"""Run action lists on the clock. Every rank runs its own list in order, and an action starts when its rank is free and its input has arrived:

    F(s, i)           after F(s - 1, i), plus p2p_s when the two stages are on different ranks
    B(s, i), I(s, i)  after B or I (s + 1, i), likewise; on the last stage after F(s, i)
    W(s, i)           after I(s, i)

Sending occupies no rank. What depends on an earlier action of the same rank needs no wait: lists are in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from costmodel.schedules.action import Orders

Seconds = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """finish_s and busy_s per rank; makespan_s is the last finish. Idle of a rank until the end is makespan_s - busy_s.

    `counts`: how often every (stage, kind) runs.
    """

    finish_s: Seconds
    busy_s: Seconds
    counts: dict[tuple[int, str], int]

    @property
    def makespan_s(self) -> float:
        """When the last rank is done."""
        return max(self.finish_s)

    @property
    def idle_s(self) -> Seconds:
        """Per rank: seconds without an action before its own last action ends."""
        return tuple(finish - busy for finish, busy in zip(self.finish_s, self.busy_s, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of one micro-batch in every stage: F, B, I and W. backward_s need not be input_s + weight_s: a split backward repeats some work."""

    forward_s: Seconds
    backward_s: Seconds
    input_s: Seconds
    weight_s: Seconds

    def by_kind(self) -> dict[str, Seconds]:
        """The four by their letters."""
        return {"F": self.forward_s, "B": self.backward_s, "I": self.input_s, "W": self.weight_s}


def simulate(orders: Orders, seconds: StageSeconds, *, p2p_s: float = 0.0) -> Timeline:
    """Run `orders`. Raises ValueError when they deadlock (a bug of the schedule, not of the user)."""
    ends = finish_times(orders, seconds, p2p_s=p2p_s)
    counts = [Counter((stage, kind) for stage, kind, _ in order) for order in orders]
    return timeline(tuple(times[-1] if times else 0.0 for times in ends), counts, seconds)


def timeline(finish_s: Seconds, counts: Sequence[Mapping[tuple[int, str], int]], seconds: StageSeconds) -> Timeline:
    """The timeline of ranks that end at `finish_s` after running each (stage, kind) `counts` times."""
    cost = seconds.by_kind()
    busy = tuple(sum(times * cost[kind][stage] for (stage, kind), times in rank.items()) for rank in counts)
    return Timeline(finish_s=finish_s, busy_s=busy, counts={key: times for rank in counts for key, times in rank.items()})


def finish_times(orders: Orders, seconds: StageSeconds, *, p2p_s: float = 0.0) -> list[list[float]]:
    """When every action of every rank ends, in the order of the lists. Raises ValueError on deadlock."""
    num_stages = len(seconds.forward_s)
    hops = _hops(orders, num_stages, p2p_s)
    # Row i of both tables is micro-batch i; stage s sits at s + 1. Input gradients and full backwards are one chain: the stage before waits for either.
    width = num_stages + 2
    num_rows = 1 + max((micro for order in orders for _, _, micro in order), default=0)
    forward, backward = [-1.0] * (width * num_rows), [-1.0] * (width * num_rows)
    forward[::width] = [0.0] * num_rows
    backward[width - 1 :: width] = [0.0] * num_rows
    cost = seconds.by_kind()
    forward_s, weight_s = seconds.forward_s, seconds.weight_s
    ends: list[list[float]] = [[] for _ in orders]
    pending = sum(map(len, orders))
    while pending:
        before = pending
        for order, done in zip(orders, ends, strict=True):
            start = len(done)
            now = done[-1] if done else 0.0
            for stage, kind, micro in order[start:] if start else order:
                slot = micro * width + stage + 1
                if kind == "F":
                    ready = forward[slot - 1]
                    if ready < 0.0:
                        break
                    ready += hops[stage]
                    now = (now if now > ready else ready) + forward_s[stage]
                    forward[slot] = now
                elif kind == "W":
                    now += weight_s[stage]
                else:
                    ready = backward[slot + 1]
                    if ready < 0.0:
                        break
                    ready += hops[stage + 1]
                    now = (now if now > ready else ready) + cost[kind][stage]
                    backward[slot] = now
                done.append(now)
            pending -= len(done) - start
        if pending == before:
            raise ValueError(f"schedule deadlocks with {pending} actions left")
    return ends


def _hops(orders: Orders, num_stages: int, p2p_s: float) -> list[float]:
    """Seconds between stage s - 1 and stage s at index s, 0 at both ends."""
    rank_of = {stage: rank for rank, order in enumerate(orders) for stage in {action[0] for action in order}}
    return [0.0, *(0.0 if rank_of[stage] == rank_of[stage - 1] else p2p_s for stage in range(1, num_stages)), 0.0]
