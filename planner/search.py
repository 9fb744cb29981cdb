"""Best-first branch and bound over a space of strategies, with a certificate.

One heap holds four kinds of entries, each under a lower bound of its objective:

    family      (mesh, micro-batch)     coarse bound of all members     bounded again, with its blocks priced
    family, tight                       tight bound of all members      expanded into chains of growing recompute
    chain                               bound of its first fit          priced by the full estimate
    priced      an estimate             its objective, exactly          popped: nothing left is better

The heap is popped smallest first, so when a priced entry comes out every open entry is bounded by its objective: it is optimal, and the bound is the
objective. Stopped early (time limit, Ctrl-C), the smallest open bound is what `Proof.bound_s` may claim. The bounds must never exceed the
estimate; tests/planner/test_search.py checks this against exhaustive pricing. Ties break by enumeration order, so equal inputs give equal plans.

A strategy whose *least* memory exceeds the device is rejected before pricing, one whose estimate exceeds it after; both are counted by reason. Of a
chain only the first member that fits is priced: those after it recompute more and are no faster (Family.chains).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from costmodel.errors import InputError
from costmodel.estimate import Estimate
from costmodel.units import format_bytes
from planner.plan import Proof, Rejection
from planner.space import Family, Rejected, describe
from planner.strategy import Strategy

METHOD = "best-first branch and bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What a family or strategy cannot beat: seconds per step and bytes on the fullest device. `binding` says what the bytes are."""

    step_s: float
    peak_bytes: float
    binding: str = "parameters, gradients and optimizer states"


class Pricer(Protocol):
    """Prices strategies. `bound_*` never exceed what `estimate` returns; `estimate` raises InputError for what cannot be lowered."""

    @property
    def usable_bytes(self) -> float:
        """Device memory a strategy may use."""

    def bound_family(self, family: Family) -> Bound:
        """A bound that holds for every strategy of the family, in microseconds."""

    def tighten_family(self, family: Family) -> Bound:
        """A tighter one, for the families that matter."""

    def bound(self, strategy: Strategy) -> Bound:
        """A bound for one strategy."""

    def estimate(self, strategy: Strategy) -> Estimate:
        """The full estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A strategy with its estimate."""

    strategy: Strategy
    estimate: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a search stands, for a progress line."""

    num_evaluated: int
    num_rejected: int
    num_open: int
    best: Priced | None
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a search found. `best` is sorted by objective, at most `keep` long, and empty when nothing fits; the first `num_proven` are exact."""

    best: tuple[Priced, ...]
    proof: Proof | None
    status: str
    rejections: tuple[Rejection, ...]
    num_candidates: int
    num_evaluated: int
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to stop: after `top_k` proven results, or after `time_limit_s` on `clock`. `keep` results are returned at most."""

    top_k: int = 1
    keep: int = 4
    time_limit_s: float | None = None
    clock: Callable[[], float] = time.monotonic


@dataclass(slots=True, kw_only=True)
class _Rejections:
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, rejected: Rejected) -> None:
        self.counts[rejected.reason] = self.counts.get(rejected.reason, 0) + rejected.count
        self.examples.setdefault(rejected.reason, rejected.what)

    def tuple(self) -> tuple[Rejection, ...]:
        order = sorted(self.counts, key=lambda reason: (-self.counts[reason], reason))
        return tuple(Rejection(reason=reason, count=self.counts[reason], example=self.examples[reason]) for reason in order)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """A family whose bound is `tight` or not, or the part of a chain that is still to be tried."""

    family: Family | None = None
    tight: bool = False
    chain: tuple[Strategy, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Search:
    """One run: the heap and the tallies. `by_memory` minimises the peak instead of the step time and lets everything fit."""

    pricer: Pricer
    limits: Limits
    by_memory: bool
    heap: list[tuple[float, int, int, _Open | Priced]] = field(default_factory=list)
    rejections: _Rejections = field(default_factory=_Rejections)
    found: list[tuple[float, int, Priced]] = field(default_factory=list)
    num_pushed: int = 0
    num_candidates: int = 0
    num_evaluated: int = 0
    num_fitting: int = 0
    num_rejected: int = 0
    num_proven: int = 0
    bound: float = 0.0

    def push(self, key: float, entry: _Open | Priced) -> None:
        """Among equal keys priced entries come out first, then chains, then families, then whatever came first."""
        self.num_pushed += 1
        level = 0 if isinstance(entry, Priced) else 1 if entry.chain else 2
        heapq.heappush(self.heap, (key, level, self.num_pushed, entry))

    def key(self, bound: Bound) -> float:
        return bound.peak_bytes if self.by_memory else bound.step_s

    def fits(self, peak_bytes: float) -> bool:
        return self.by_memory or peak_bytes <= self.pricer.usable_bytes

    def reject(self, what: str, reason: str, count: int = 1) -> None:
        self.num_rejected += count
        self.rejections.add(Rejected(what=what, reason=reason, count=count))

    def fill(self, families: Iterable[Family | Rejected]) -> None:
        for family in families:
            if isinstance(family, Rejected):
                self.rejections.add(family)
                continue
            self.num_candidates += family.options.count
            self.push_family(family, self.pricer.bound_family(family), 0.0, tight=False)

    def push_family(self, family: Family, bound: Bound, least: float, *, tight: bool) -> None:
        if self.fits(bound.peak_bytes):
            self.push(max(least, self.key(bound)), _Open(family=family, tight=tight))
        else:
            what = describe(next(family.strategies()))
            self.reject(f"{what}: at least {format_bytes(bound.peak_bytes)}", f"{bound.binding} alone do not fit", family.options.count)

    def push_chain(self, chain: tuple[Strategy, ...], least: float) -> None:
        """Push what is left of `chain` after the members that cannot fit: the first may, the rest is bisected."""
        bound = self.bound_of(chain[0], len(chain))
        if bound is None:
            return
        if not self.fits(bound.peak_bytes):
            skipped, bound = self.first_fit(chain, bound)
            what = f"{describe(chain[0])}: at least {format_bytes(bound.peak_bytes)}" if skipped == len(chain) else describe(chain[0])
            self.reject(what, f"{bound.binding} alone do not fit" if skipped == len(chain) else "too little recompute to fit", skipped)
            chain = chain[skipped:]
        if chain:
            self.push(max(least, self.key(bound)), _Open(chain=chain))

    def first_fit(self, chain: tuple[Strategy, ...], bound: Bound) -> tuple[int, Bound]:
        """Index and bound of the first member after chain[0] that fits, or (len(chain), the last bound)."""
        low, high, last = 1, len(chain), bound
        if high > 1:
            last = self.pricer.bound(chain[-1])
            if not self.fits(last.peak_bytes):
                return high, last
            high -= 1
        while low < high:
            middle = (low + high) // 2
            bound = self.pricer.bound(chain[middle])
            if self.fits(bound.peak_bytes):
                high, last = middle, bound
            else:
                low = middle + 1
        return low, last

    def bound_of(self, strategy: Strategy, count: int) -> Bound | None:
        try:
            return self.pricer.bound(strategy)
        except InputError as error:
            self.reject(f"{describe(strategy)}: {error.what}", f"cannot run ({error.where or 'model'})", count)
            return None

    def price(self, chain: tuple[Strategy, ...], key: float) -> None:
        strategy, rest = chain[0], chain[1:]
        try:
            estimate = self.pricer.estimate(strategy)
        except InputError as error:
            self.reject(f"{describe(strategy)}: {error.what}", f"cannot run ({error.where or 'model'})", len(chain))
            return
        self.num_evaluated += 1
        if not self.fits(estimate.peak_bytes):
            self.reject(f"{describe(strategy)}: {format_bytes(estimate.peak_bytes)}", "the estimated peak does not fit")
            if rest:
                self.push_chain(rest, key)
            return
        priced = Priced(strategy=strategy, estimate=estimate)
        self.num_fitting += 1
        exact = estimate.peak_bytes if self.by_memory else estimate.step_s
        self.push(exact, priced)
        self.found.append((exact, self.num_evaluated, priced))
        self.found.sort(key=lambda item: item[:2])
        del self.found[max(self.limits.keep, self.limits.top_k) :]

    def step(self) -> None:
        key, _, _, entry = heapq.heappop(self.heap)
        self.bound = max(self.bound, key) if not self.num_proven else self.bound
        if isinstance(entry, Priced):
            self.num_proven += 1
        elif entry.family is None:
            self.price(entry.chain, key)
        elif not entry.tight:
            self.push_family(entry.family, self.pricer.tighten_family(entry.family), key, tight=True)
        else:
            for chain in entry.family.chains():
                for part in (chain[:1], chain[-1:]) if self.by_memory and len(chain) > 1 else (chain,):
                    self.push_chain(part, key)

    def progress(self) -> Progress:
        best = self.found[0][2] if self.found else None
        return Progress(
            num_evaluated=self.num_evaluated, num_rejected=self.num_rejected, num_open=len(self.heap), best=best, bound=self.bound
        )


def search(
    families: Iterable[Family | Rejected],
    pricer: Pricer,
    *,
    limits: Limits | None = None,
    by_memory: bool = False,
    enough: Callable[[Priced], bool] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Result:
    """The fastest strategies that fit (or, `by_memory`, the smallest ones), with a proof when one was found.

    `enough` ends the search as soon as a priced strategy satisfies it (status "found"). KeyboardInterrupt ends it with what is known.
    """
    limits = limits or Limits()
    state = _Search(pricer=pricer, limits=limits, by_memory=by_memory)
    deadline = None if limits.time_limit_s is None else limits.clock() + limits.time_limit_s
    status = "optimal"
    try:
        state.fill(families)
        while state.heap and state.num_proven < limits.top_k:
            if deadline is not None and limits.clock() >= deadline:
                status = "time limit"
                break
            evaluated = state.num_evaluated
            state.step()
            if state.num_evaluated == evaluated:
                continue
            if progress is not None:
                progress(state.progress())
            if enough is not None and state.found and enough(state.found[0][2]):
                status = "found"
                break
    except KeyboardInterrupt:
        status = "interrupted"
    return _result(state, status)


def _result(state: _Search, status: str) -> Result:
    best = tuple(priced for _, _, priced in state.found)
    bound = state.heap[0][0] if state.heap and not state.num_proven else state.bound
    if state.num_proven:
        status = "optimal"
    slower = state.num_candidates - state.num_rejected - state.num_fitting
    if slower and best:
        state.rejections.add(
            Rejected(what=f"{len(state.heap)} open entries", reason="cannot be faster than the plan (bound)", count=slower)
        )
    proof = _proof(state, best[0], bound, status) if best and not state.by_memory else None
    return Result(
        best=best,
        proof=proof,
        status=status,
        rejections=state.rejections.tuple(),
        num_candidates=state.num_candidates,
        num_evaluated=state.num_evaluated,
        bound=bound,
    )


def _proof(state: _Search, best: Priced, bound: float, status: str) -> Proof:
    objective = best.estimate.step_s
    bound = min(bound, objective)
    return Proof(
        objective_s=objective,
        bound_s=bound,
        gap_frac=(objective - bound) / objective,
        method=METHOD,
        status=status,
        num_candidates=state.num_candidates,
        num_evaluated=state.num_evaluated,
    )


def exhaustive(families: Iterable[Family | Rejected], pricer: Pricer) -> Iterator[Priced]:
    """Every strategy of the space that lowers, priced in enumeration order: the oracle for small spaces."""
    for family in families:
        if isinstance(family, Family):
            for strategy in family.strategies():
                try:
                    yield Priced(strategy=strategy, estimate=pricer.estimate(strategy))
                except InputError:
                    continue
