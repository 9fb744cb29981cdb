"""Actions of pipeline schedules.

An action is (stage, kind, micro-batch). Kinds, with the letters of torch.distributed.pipelining:

    F   forward
    B   full backward: the gradients of the stage's input and of its weights
    I   gradient of the input alone, all that the stage before waits for
    W   gradients of the weights alone, any time after I
"""

from __future__ import annotations

Action = tuple[int, str, int]
Order = tuple[Action, ...]
Orders = tuple[Order, ...]


class OrderWriter:
    """Writes one rank's order down; `put` gives every (stage, kind) its micro-batches in turn. B counts as I and W."""

    def __init__(self) -> None:
        self.order: list[Action] = []
        self._next: dict[tuple[int, str], int] = {}

    def count(self, stage: int, kind: str) -> int:
        """How often (stage, kind) was put."""
        return self._next.get((stage, kind), 0)

    def put(self, *steps: tuple[int, str]) -> None:
        """Append the next micro-batch of every (stage, kind)."""
        for stage, kind in steps:
            self.order.append((stage, kind, self.count(stage, "I" if kind == "B" else kind)))
            for part in "IW" if kind == "B" else kind:
                self._next[stage, part] = self.count(stage, part) + 1
