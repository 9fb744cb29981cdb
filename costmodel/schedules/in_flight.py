"""What the micro-batches in flight on one rank hold. It follows from the rank's list alone; no times are needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from costmodel.schedules.action import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """Micro-batches per stage: `full` between F and I (or B), whose activations are all alive; `reduced` between I and W, of which only what weight
    gradients read is left."""

    full: dict[int, int]
    reduced: dict[int, int]

    @property
    def total(self) -> int:
        """All of them, over the rank's stages."""
        return sum(self.full.values()) + sum(self.reduced.values())


def in_flight(order: Order) -> Iterator[InFlight]:
    """The counts after every action of one rank."""
    full = dict.fromkeys((stage for stage, _, _ in order), 0)
    reduced = dict(full)
    for stage, kind, _ in order:
        if kind == "F":
            full[stage] += 1
        elif kind == "W":
            reduced[stage] -= 1
        else:
            full[stage] -= 1
            reduced[stage] += kind == "I"
        yield InFlight(full=dict(full), reduced=dict(reduced))


def peak_in_flight(order: Order, weights: Mapping[int, float], reduced: Mapping[int, float] | None = None) -> tuple[float, InFlight]:
    """The most that is held on one rank, and the counts at that moment.

    A micro-batch of stage s holds weights[s] from F to I or B, and reduced[s] from I to W (nothing if `reduced` is not given).
    """
    after = dict.fromkeys(weights, 0.0) | dict(reduced or {})
    change = {(stage, "F"): amount for stage, amount in weights.items()}
    change |= {(stage, "B"): -amount for stage, amount in weights.items()}
    change |= {(stage, "I"): after[stage] - amount for stage, amount in weights.items()}
    change |= {(stage, "W"): -after[stage] for stage in weights}
    held, best, at_best = 0.0, 0.0, 0
    for position, (stage, kind, _) in enumerate(order, 1):
        held += change[stage, kind]
        if held > best:
            best, at_best = held, position
    ran = Counter((stage, kind) for stage, kind, _ in order[:at_best])
    full = {stage: ran[stage, "F"] - ran[stage, "B"] - ran[stage, "I"] for stage in weights}
    return best, InFlight(full=full, reduced={stage: ran[stage, "I"] - ran[stage, "W"] for stage in weights})
