"""A backward in two halves, for schedules that let the stage before go on early: the gradient of the block's inputs, then those of its weights.

The first half is everything that the input gradients depend on; what is left only makes gradients of parameters (a norm whose one kernel makes both stays in
the first half; an embedding is all second half). Communication without tensors (ring steps, statistics) belongs to the kernel beside it, which is never a
weight gradient; a wait goes with its reader.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.exchange import Exchange, Item, base
from planner.graph import Block


def split_backward(items: Sequence[Item], block: Block) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """(input half, weight half) of the backward `items` of `block`, each in program order."""
    wanted = {f"{name}.grad" for name in block.inputs}
    read: set[str] = set()
    first: list[bool] = []
    for item in reversed(items):
        if isinstance(item, Exchange) and not item.outputs:
            belongs = first[-1] if item.kind == "wait" and first else True
        else:
            belongs = any(name in read or base(name) in wanted for name in item.outputs)
        if belongs:
            read.update(item.inputs)
        first.append(belongs)
    first.reverse()
    halves = [tuple(item for item, belongs in zip(items, first, strict=True) if belongs is half) for half in (True, False)]
    return halves[0], halves[1]


def weight_inputs(items: Sequence[Item]) -> tuple[str, ...]:
    """What the weight half reads and does not make: alive until it runs."""
    made = {name for item in items for name in item.outputs}
    return tuple(dict.fromkeys(name for item in items for name in item.inputs if name not in made))
