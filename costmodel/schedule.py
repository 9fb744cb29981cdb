"""Pipeline schedules as lists of actions per rank, and their simulator.

An action is (stage_index, kind, micro_batch): kind "F" or "B". Chunk c of rank r is stage c * pp + r (loop placement).

- gpipe: all forwards, then all backwards. Bubble (pp - 1)/m of the ideal time, m micro-batches in flight.
- 1f1b (PipeDream-flush, Narayanan et al. 2019): rank r runs min(m, pp - r) forwards first, then one backward, one forward in turn.
  Same bubble, pp - r in flight.
- interleaved_1f1b (Megatron-LM, Narayanan et al. 2021, arXiv 2104.04473): vpp chunks per rank, micro-batches in rounds of pp; (vpp - 1) pp + 2 (pp - 1 - r)
  forwards first. Bubble (pp - 1)/(m vpp). Needs m to be a multiple of pp.

`simulate` runs the actions in order on every rank: F(s, i) waits for F(s - 1, i) and B(s, i) for B(s + 1, i), plus `p2p_s` when the two stages are on
different ranks. `in_flight` walks one rank's list and needs no times.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.errors import InputError

Action = tuple[int, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """finish_s and busy_s per rank; makespan_s is the last finish. Idle of a rank until the end is makespan_s - busy_s."""

    finish_s: tuple[float, ...]
    busy_s: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        """When the last rank is done."""
        return max(self.finish_s)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Per rank: seconds without an action before its own last action ends."""
        return tuple(finish - busy for finish, busy in zip(self.finish_s, self.busy_s, strict=True))


def actions(schedule: str, *, pp: int, vpp: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of every rank in execution order. Raises InputError for a schedule that cannot run with these numbers."""
    check(schedule, pp=pp, vpp=vpp, num_micro_batches=num_micro_batches)
    if schedule == "interleaved_1f1b":
        return tuple(_interleaved(rank, pp, vpp, num_micro_batches) for rank in range(pp))
    if schedule == "gpipe":
        return tuple(_one_chunk(rank, num_micro_batches, num_micro_batches) for rank in range(pp))
    return tuple(_one_chunk(rank, min(num_micro_batches, pp - rank), num_micro_batches) for rank in range(pp))


def check(schedule: str, *, pp: int, vpp: int, num_micro_batches: int) -> None:
    """Raise InputError when `schedule` cannot run with these numbers."""
    if schedule not in ("none", "gpipe", "1f1b", "interleaved_1f1b"):
        raise InputError(
            f"unknown schedule {schedule!r}", where="Strategy.schedule", remedy="use one of none, gpipe, 1f1b, interleaved_1f1b"
        )
    if schedule != "interleaved_1f1b" and vpp != 1:
        raise InputError(f"{schedule} runs one chunk per rank, not vpp {vpp}", where="Strategy.vpp", remedy="use interleaved_1f1b or vpp 1")
    if schedule == "interleaved_1f1b" and num_micro_batches % pp:
        raise InputError(
            f"interleaved_1f1b needs micro-batches in multiples of pp: {num_micro_batches} is not a multiple of {pp}",
            where="Strategy.schedule",
            remedy="change the micro-batch, the global batch or pp, or use 1f1b",
        )


def _one_chunk(rank: int, warmup: int, num_micro_batches: int) -> tuple[Action, ...]:
    order: list[Action] = [(rank, "F", index) for index in range(warmup)]
    for index in range(num_micro_batches):
        order.append((rank, "B", index))
        if warmup + index < num_micro_batches:
            order.append((rank, "F", warmup + index))
    return tuple(order)


def _interleaved(rank: int, pp: int, vpp: int, num_micro_batches: int) -> tuple[Action, ...]:
    total = num_micro_batches * vpp
    warmup = min(total, (vpp - 1) * pp + 2 * (pp - 1 - rank))
    order: list[Action] = []

    def place(step: int, forward: bool) -> Action:
        turn, within = divmod(step, pp * vpp)
        chunk, offset = divmod(within, pp)
        if forward:
            return chunk * pp + rank, "F", turn * pp + offset
        return (vpp - 1 - chunk) * pp + rank, "B", turn * pp + offset

    order.extend(place(step, True) for step in range(warmup))
    for step in range(total):
        if warmup + step < total:
            order.append(place(warmup + step, True))
        order.append(place(step, False))
    return tuple(order)


def simulate(
    orders: tuple[tuple[Action, ...], ...], *, forward_s: tuple[float, ...], backward_s: tuple[float, ...], p2p_s: float = 0.0
) -> Timeline:
    """Run `orders` with per-stage times. Raises ValueError when the order deadlocks (a bug of the schedule, not of the user)."""
    pp, num_stages = len(orders), len(forward_s)
    wait = 0.0 if pp == 1 else p2p_s
    # done[2 (micro num_stages + stage)] is when F ends, the entry after it when B does; stage + 1 is two entries on.
    width = 2 * num_stages
    done: list[float] = [-1.0] * (width * (1 + max((micro for order in orders for _, _, micro in order), default=0)))
    clock, busy, position = [0.0] * pp, [0.0] * pp, [0] * pp
    pending = sum(map(len, orders))
    last = num_stages - 1
    while pending:
        before = pending
        for rank, order in enumerate(orders):
            now, index, count = clock[rank], position[rank], len(order)
            while index < count:
                stage, kind, micro = order[index]
                slot = micro * width + 2 * stage
                if kind == "F":
                    cost = forward_s[stage]
                    ready = done[slot - 2] if stage else 0.0
                    arrival = ready + wait if stage else 0.0
                else:
                    cost = backward_s[stage]
                    slot += 1
                    ready = done[slot - 1] if stage == last else done[slot + 2]
                    arrival = ready if stage == last else ready + wait
                if ready < 0.0:
                    break
                now = (now if now > arrival else arrival) + cost
                done[slot] = now
                index += 1
            pending -= index - position[rank]
            clock[rank], position[rank] = now, index
        if pending == before:
            raise ValueError(f"schedule deadlocks with {pending} actions left")
    for rank, order in enumerate(orders):
        busy[rank] = sum(forward_s[stage] if kind == "F" else backward_s[stage] for stage, kind, _ in order)
    return Timeline(finish_s=tuple(clock), busy_s=tuple(busy))


def peak_in_flight(order: tuple[Action, ...], weights: dict[int, float]) -> tuple[float, dict[int, int]]:
    """The largest sum of `weights[stage]` over micro-batches between F and B on one rank, and the count per stage at that moment."""
    live = dict.fromkeys(weights, 0)
    held, best, at_best = 0.0, -1.0, dict(live)
    for stage, kind, _ in order:
        if kind == "F":
            live[stage] += 1
            held += weights[stage]
            if held > best:
                best, at_best = held, dict(live)
        else:
            live[stage] -= 1
            held -= weights[stage]
    return max(best, 0.0), at_best
