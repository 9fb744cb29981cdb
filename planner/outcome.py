"""What a search asks of a pricer, where it stands, when it stops and what it returns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from costmodel.errors import InputError, require_whole
from costmodel.estimate import Estimate
from costmodel.mesh import Mesh
from planner.plan import Proof, Rejection
from planner.space import Branch, Rejected
from planner.strategy import Strategy

CLOSE, TIGHT = 1, 2
"""Levels of a branch's bound (Pricer.least_branch_s), above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes that the fullest device needs at least. `reason` says it when they are too many."""

    peak_bytes: float
    reason: str = "the peak does not fit"


class Pricer(Protocol):
    """Prices strategies. `least_*` never exceed what `estimate` returns; for what cannot run `least_s` and `estimate` raise InputError."""

    @property
    def usable_bytes(self) -> float:
        """Device memory a strategy may use."""

    def least_states_bytes(self, mesh: Mesh, zero_stage: int) -> Need:
        """A bound for every strategy of this mesh and ZeRO stage (lower stages need no less), in microseconds."""

    def least_branch_s(self, branch: Branch, level: int) -> float:
        """A bound for every strategy of the branch: 0 in microseconds, CLOSE for its mesh, TIGHT for the branches that matter."""

    def least_s(self, strategy: Strategy) -> float:
        """A bound for one strategy, the same for every split of dp and every ZeRO stage."""

    def sharp_s(self, strategy: Strategy) -> float:
        """A closer bound for one strategy, in a fraction of the time of an estimate."""

    def least_bytes(self, strategy: Strategy, limit_bytes: float) -> Need:
        """A bound for one strategy; once above the limit it need not be any tighter."""

    def estimate(self, strategy: Strategy) -> Estimate:
        """The full estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A strategy with its estimate."""

    strategy: Strategy
    estimate: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a search stands, for a progress line. `bound_s`: nothing is faster (0 when memory is searched)."""

    num_evaluated: int
    num_rejected: int
    num_open: int
    best: Priced | None
    bound_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a search found. `best` is sorted by objective, at most `keep` long, and empty when nothing fits; `bound_s` as in Progress."""

    best: tuple[Priced, ...]
    proof: Proof | None
    status: str
    rejections: tuple[Rejection, ...]
    num_candidates: int
    num_evaluated: int
    bound_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to stop: after `top_k` proven results, or after `time_limit_s` on `clock_s`. `keep` results are returned at most."""

    top_k: int = 1
    keep: int = 4
    time_limit_s: float | None = None
    clock_s: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        for name in ("top_k", "keep"):
            require_whole(getattr(self, name), f"search.{name}")
        limit = self.time_limit_s
        if limit is not None and not (isinstance(limit, int | float) and limit > 0):
            raise InputError(f"time_limit_s is {limit!r}", where="search.time_limit_s", remedy="give a positive number of seconds, or None")


class Rejections:
    """Counts and first examples by reason."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.examples: dict[str, str] = {}

    def add(self, rejected: Rejected) -> None:
        """Count `rejected` under its reason; the first of a reason is its example."""
        self.counts[rejected.reason] = self.counts.get(rejected.reason, 0) + rejected.count
        self.examples.setdefault(rejected.reason, rejected.what)

    def tuple(self) -> tuple[Rejection, ...]:
        """By reason, the most frequent first."""
        order = sorted(self.counts, key=lambda reason: (-self.counts[reason], reason))
        return tuple(Rejection(reason=reason, count=self.counts[reason], example=self.examples[reason]) for reason in order)
