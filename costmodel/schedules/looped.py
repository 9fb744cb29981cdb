"""Schedules on looped stages: chunk c of rank r is stage c * pp + r."""

from __future__ import annotations

from costmodel.schedules.action import Action, Order


def gpipe(rank: int, num_micro_batches: int) -> Order:
    """All forwards, then all backwards in the same order (Huang et al. 2019, arXiv 1811.06965)."""
    return tuple((rank, kind, micro) for kind in "FB" for micro in range(num_micro_batches))


def breadth_first(rank: int, pp: int, vpp: int, num_micro_batches: int) -> Order:
    """Every micro-batch through a chunk before the next chunk; backward is the mirror image (Lamy-Poirier 2022, arXiv 2211.05953)."""
    forward = [(chunk * pp + rank, micro) for chunk in range(vpp) for micro in range(num_micro_batches)]
    return (*((stage, "F", micro) for stage, micro in forward), *((stage, "B", micro) for stage, micro in reversed(forward)))


def alternating(rank: int, pp: int, vpp: int, num_micro_batches: int, *, lead: int, lag: int | None = None) -> Order:
    """One forward, one backward in turn, after (vpp - 1) pp + `lead` forwards. Micro-batches go through the chunks in rounds of pp.

    `lag` None: full backwards. Else input gradients, and from the `lag`-th on after each the oldest weight gradient; the rest follow at the end.
    """
    total = num_micro_batches * vpp
    warmup = min(total, (vpp - 1) * pp + lead)
    order: list[Action] = []

    def place(step: int, kind: str) -> None:
        turn, within = divmod(step, pp * vpp)
        chunk, offset = divmod(within, pp)
        order.append(((chunk if kind == "F" else vpp - 1 - chunk) * pp + rank, kind, turn * pp + offset))

    for step in range(warmup):
        place(step, "F")
    for step in range(total):
        if warmup + step < total:
            place(warmup + step, "F")
        place(step, "B" if lag is None else "I")
        if lag is not None and step >= lag:
            place(step - lag, "W")
    for step in range(max(0, total - lag) if lag is not None else total, total):
        place(step, "W")
    return tuple(order)
