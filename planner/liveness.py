"""Liveness: the most bytes alive at once inside a block's forward and backward.

A tensor is alive from the kernel that makes it to the last one that reads it; while a kernel runs its inputs and outputs are alive together. Tensors
kept for backward are freed after their last reader there, as autograd does. Parameters, buffers and the gradients of parameters are not counted here: the cost
model accounts for those classes whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from planner.exchange import Item


def peak_bytes(
    items: Sequence[Item],
    size: Callable[[str], float],
    *,
    initial: Collection[str] = (),
    pinned: Collection[str] = (),
    passing: Callable[[str], float] | None = None,
) -> float:
    """Most bytes alive while `items` run.

    `size` gives the bytes of a physical tensor name. `initial` is alive at the start and freed after its last reader; `pinned` is never freed (block outputs,
    saved tensors). What nobody reads (a result) stays.
    `passing` gives bytes that an output holds only while its item runs. Bytes of tensors that are neither initial nor made by an item are not counted.
    """
    last = {name: index for index, item in enumerate(items) for name in item.inputs}
    alive = {name: size(name) for name in initial}
    total = peak = sum(alive.values())
    for index, item in enumerate(items):
        for name in item.outputs:
            if name not in alive:
                alive[name] = size(name)
                total += alive[name]
        peak = max(peak, total + (sum(map(passing, item.outputs)) if passing else 0.0))
        for name in set(item.inputs):
            if last[name] == index and name not in pinned and name in alive:
                total -= alive.pop(name)
    return peak
