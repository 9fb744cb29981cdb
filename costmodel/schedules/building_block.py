"""V-shaped schedules that repeat one building block (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362).

A block is the six passes of one micro-batch on every rank (F, I, W of both chunks), each one slot long; micro-batch i runs the block 6 i slots later, so every
rank is always busy when its six slots differ modulo 6. Along the four diagonals of the V (F down, F up, I down, I up) a pass starts `slopes` slots after the
rank before. A micro-batch is then held for the sum of the slopes times pp slots on rank 0, that is sum/12 pp micro-batches of a whole rank:

    v_half  slopes 2, 1, 2, 1   pp/2 + 1 micro-batches     v_min  slopes 1, 1, 1, 1   pp/3 + 4/3 micro-batches

Equal sums down and up (F down + I up = F up + I down) hold the same amount on every rank. Squeezing the block's lists into in-order execution shortens fill and
drain; there weight gradients step aside: in an idle slot the oldest one owed runs early, and after a rank's last forward input gradients go first. Neither
raises the peak.
"""

from __future__ import annotations

from collections import deque
from itertools import product

from costmodel.schedules.action import Action, Orders

INTERVAL = 6
SLOPES = {"v_half": (2, 1, 2, 1), "v_min": (1, 1, 1, 1)}

Slots = dict[tuple[int, str], int]
Gaps = tuple[int, int, int]


def building_block(pp: int, slopes: tuple[int, int, int, int]) -> list[Slots]:
    """Per rank the slot of every (stage, kind) of micro-batch 0: of all turns of the V that keep the six apart, the one that holds least.

    Raises ValueError when there is none.
    """
    # Slots modulo 6, and with balanced slopes what is held, repeat every six ranks.
    few = range(min(pp, INTERVAL))
    best: tuple[int, Gaps] | None = None
    waits = range(1, INTERVAL + 1)
    for gaps in product(waits, waits, waits):
        if all(len({slot % INTERVAL for slot in _passes(rank, pp, slopes, gaps).values()}) == 4 for rank in few):
            held = max(_lifespan(_block(rank, pp, slopes, gaps)) for rank in few)
            best = min(best, (held, gaps)) if best else (held, gaps)
    if best is None:
        raise ValueError(f"no building block with slopes {slopes} on {pp} ranks")
    return [_block(rank, pp, slopes, best[1]) for rank in range(pp)]


def _block(rank: int, pp: int, slopes: tuple[int, int, int, int], gaps: Gaps) -> Slots:
    slots = _passes(rank, pp, slopes, gaps)
    return slots | _weight_slots(slots)


def _passes(rank: int, pp: int, slopes: tuple[int, int, int, int], gaps: Gaps) -> Slots:
    """Slots of F and I: down the V, `gaps[0]` later up again, `gaps[1]` later the input gradients the same way, turning after `gaps[2]`."""
    forward_down, forward_up, input_down, input_up = slopes
    far, after = pp - 1, pp - 1 - rank
    turn = forward_down * far + gaps[0]
    top = turn + forward_up * far + gaps[1]
    back = top + input_down * far + gaps[2]
    up = 2 * pp - 1 - rank
    return {
        (rank, "F"): forward_down * rank,
        (up, "F"): turn + forward_up * after,
        (up, "I"): top + input_down * rank,
        (rank, "I"): back + input_up * after,
    }


def _lifespan(slots: Slots) -> int:
    """Slots from forward to weight gradient, both chunks together."""
    return sum(slot * {"F": -1, "I": 0, "W": 1}[kind] for (_, kind), slot in slots.items())


def _weight_slots(slots: Slots) -> Slots:
    """The two slots left over, each weight gradient as soon after its input gradient as possible."""
    free = set(range(INTERVAL)) - {slot % INTERVAL for slot in slots.values()}
    found: Slots = {}
    for (stage, kind), slot in sorted(slots.items(), key=lambda item: item[1]):
        if kind == "I":
            wait = min((residue - slot) % INTERVAL for residue in free)
            free.remove((slot + wait) % INTERVAL)
            found[stage, "W"] = slot + wait
    return found


def repeated(pp: int, num_micro_batches: int, slopes: tuple[int, int, int, int]) -> Orders:
    """The lists of every rank."""
    lists = [
        sorted((slot + INTERVAL * micro, stage, kind, micro) for (stage, kind), slot in slots.items() for micro in range(num_micro_batches))
        for slots in building_block(pp, slopes)
    ]
    ranks = [_Rank([(stage, kind, micro) for _, stage, kind, micro in passes], num_micro_batches) for passes in lists]
    done: set[Action] = set()
    last = 2 * pp - 1
    while any(rank.steps or rank.owed for rank in ranks):
        ran = [action for rank in ranks if (action := rank.step(done, last)) is not None]
        done.update(ran)
    return tuple(tuple(rank.order) for rank in ranks)


class _Rank:
    """One rank of the slot-by-slot run: `steps` of its block still to come, weight gradients `owed`."""

    def __init__(self, passes: list[Action], num_micro_batches: int) -> None:
        self.steps = deque(passes)
        self.owed: deque[Action] = deque()
        self.forwards = 2 * num_micro_batches
        self.order: list[Action] = []

    def step(self, done: set[Action], last: int) -> Action | None:
        """What runs in this slot, given what was `done` before it; None when nothing can."""
        while self.steps and self.steps[0][1] == "W" and (self.steps[0] not in self.owed or not self.forwards):
            self.steps.popleft()
        action: Action | None = None
        if self.steps and (self.steps[0][1] == "W" or _is_ready(self.steps[0], done, last)):
            action = self.steps.popleft()
            if action[1] == "W":
                self.owed.remove(action)
        elif self.owed:
            action = self.owed.popleft()
        if action is not None:
            self.order.append(action)
            self.forwards -= action[1] == "F"
            if action[1] == "I":
                self.owed.append((action[0], "W", action[2]))
        return action


def _is_ready(action: Action, done: set[Action], last: int) -> bool:
    stage, kind, micro = action
    if kind == "F":
        return stage == 0 or (stage - 1, "F", micro) in done
    return stage == last or (stage + 1, "I", micro) in done
