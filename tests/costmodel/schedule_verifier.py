"""Whether action lists are a schedule at all, checked without any of the code that makes or plays them."""

from __future__ import annotations

from collections.abc import Sequence

Action = tuple[int, str, int]


def verify(orders: Sequence[Sequence[Action]], *, num_stages: int, num_micro_batches: int, rank_of_stage: Sequence[int]) -> int:
    """Asserts that every stage runs F and (B, or I and then W) of every micro-batch exactly once, on its rank, and that all can be played.

    Gives the number of rounds when in every round each rank runs at most one action whose inputs earlier rounds made.
    """
    ran = [action for order in orders for action in order]
    assert len(ran) == len(set(ran)), "an action runs twice"
    kinds: dict[tuple[int, int], set[str]] = {}
    for rank, order in enumerate(orders):
        for stage, kind, micro in order:
            assert rank_of_stage[stage] == rank
            kinds.setdefault((stage, micro), set()).add(kind)
    assert set(kinds) == {(stage, micro) for stage in range(num_stages) for micro in range(num_micro_batches)}
    assert all(found in ({"F", "B"}, {"F", "I", "W"}) for found in kinds.values())
    return _play(orders, num_stages)


def _play(orders: Sequence[Sequence[Action]], num_stages: int) -> int:
    done: set[Action] = set()
    position = [0] * len(orders)
    rounds = 0
    while any(at < len(order) for at, order in zip(position, orders, strict=True)):
        ready = [
            rank for rank, order in enumerate(orders) if position[rank] < len(order) and _can_run(order[position[rank]], done, num_stages)
        ]
        assert ready, "deadlock"
        for rank in ready:
            done.add(orders[rank][position[rank]])
            position[rank] += 1
        rounds += 1
    return rounds


def _can_run(action: Action, done: set[Action], num_stages: int) -> bool:
    stage, kind, micro = action
    if kind == "F":
        return stage == 0 or (stage - 1, "F", micro) in done
    if kind == "W":
        return (stage, "I", micro) in done
    below = stage == num_stages - 1 or (stage + 1, "B", micro) in done or (stage + 1, "I", micro) in done
    return below and (stage, "F", micro) in done
