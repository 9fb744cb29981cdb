"""Best-first branch and bound over a space of strategies, with a certificate.

One heap holds four kinds of entries, each under a lower bound of its objective:

    branch      (mesh, micro-batch)     coarse bound of all members     bounded again, with its blocks priced
    branch, tight                       tight bound of all members      expanded into chains of growing recompute
    chain                               bound of its first fit          priced by the full estimate
    priced      an estimate             its objective, exactly          popped: nothing left is better

The heap is popped smallest first, so when a priced entry comes out every open entry is bounded by its objective: it is optimal, and the bound is the
objective. Stopped early (time limit, Ctrl-C), the smallest open bound is what `Proof.bound_s` may claim. The bounds must never exceed the
estimate; tests/planner/test_search.py checks this against exhaustive pricing. Ties break by enumeration order, so equal inputs give equal plans.

A strategy whose *least* memory exceeds the device is rejected before pricing, one whose estimate exceeds it after; both are counted by reason. Of a
chain only the first member that fits is priced: those after it recompute more and are no faster (Branch.chains).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from costmodel.errors import InputError
from costmodel.estimate import Estimate
from costmodel.units import format_bytes
from planner.plan import Proof, Rejection
from planner.space import Branch, Rejected, describe
from planner.strategy import Strategy

METHOD = "best-first branch and bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What a branch or strategy cannot beat: seconds per step and bytes on the fullest device. `reason` says it when the bytes are too many."""

    step_s: float
    peak_bytes: float
    reason: str = "the peak does not fit"


class Pricer(Protocol):
    """Prices strategies. `bound_*` never exceed what `estimate` returns; `estimate` raises InputError for what cannot be lowered."""

    @property
    def usable_bytes(self) -> float:
        """Device memory a strategy may use."""

    def bound_branch(self, branch: Branch) -> Bound:
        """A bound that holds for every strategy of the branch, in microseconds."""

    def tighten_branch(self, branch: Branch) -> Bound:
        """A tighter one, for the branches that matter."""

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


class _Rejections:
    """Counts and first examples by reason."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.examples: dict[str, str] = {}

    def add(self, rejected: Rejected) -> None:
        self.counts[rejected.reason] = self.counts.get(rejected.reason, 0) + rejected.count
        self.examples.setdefault(rejected.reason, rejected.what)

    def tuple(self) -> tuple[Rejection, ...]:
        order = sorted(self.counts, key=lambda reason: (-self.counts[reason], reason))
        return tuple(Rejection(reason=reason, count=self.counts[reason], example=self.examples[reason]) for reason in order)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """A branch whose bound is `tight` or not, or the part of a chain that is still to be tried."""

    branch: Branch | None = None
    tight: bool = False
    chain: tuple[Strategy, ...] = ()


class _Search:
    """One run: the heap and the tallies. `by_memory` minimises the peak instead of the step time and lets everything fit.

    `key` below is the objective: seconds, or bytes by memory. `bound` is the smallest key that may still be reached.
    """

    def __init__(self, pricer: Pricer, limits: Limits, by_memory: bool) -> None:
        self.pricer, self.limits, self.by_memory = pricer, limits, by_memory
        self.heap: list[tuple[float, int, int, _Open | Priced]] = []
        self.found: list[tuple[float, int, Priced]] = []
        self.rejections = _Rejections()
        self.num_pushed = self.num_candidates = self.num_evaluated = self.num_fitting = self.num_rejected = self.num_proven = 0
        self.bound = 0.0

    def push(self, key: float, entry: _Open | Priced) -> None:
        """Among equal keys priced entries come out first, then chains, then branches, then whatever came first."""
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

    def fill(self, branches: Iterable[Branch | Rejected]) -> None:
        for branch in branches:
            if isinstance(branch, Rejected):
                self.rejections.add(branch)
                continue
            self.num_candidates += branch.options.count
            self.push_branch(branch, self.pricer.bound_branch(branch), 0.0, tight=False)

    def push_branch(self, branch: Branch, bound: Bound, least: float, *, tight: bool) -> None:
        if self.fits(bound.peak_bytes):
            self.push(max(least, self.key(bound)), _Open(branch=branch, tight=tight))
        else:
            what = describe(next(branch.strategies()))
            self.reject(f"{what}: at least {format_bytes(bound.peak_bytes)}", bound.reason, branch.options.count)

    def push_chain(self, chain: tuple[Strategy, ...], least: float) -> None:
        """Push what is left of `chain` after the members that cannot fit: the first may, the rest is bisected."""
        bound = self.bound_of(chain[0], len(chain))
        if bound is None:
            return
        if not self.fits(bound.peak_bytes):
            skipped, bound = self.first_fit(chain, bound)
            what = f"{describe(chain[0])}: at least {format_bytes(bound.peak_bytes)}" if skipped == len(chain) else describe(chain[0])
            self.reject(what, bound.reason if skipped == len(chain) else "too little recompute to fit", skipped)
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
        elif entry.branch is None:
            self.price(entry.chain, key)
        elif not entry.tight:
            self.push_branch(entry.branch, self.pricer.tighten_branch(entry.branch), key, tight=True)
        else:
            for chain in entry.branch.chains():
                for part in (chain[:1], chain[-1:]) if self.by_memory and len(chain) > 1 else (chain,):
                    self.push_chain(part, key)

    def progress(self) -> Progress:
        best = self.found[0][2] if self.found else None
        return Progress(
            num_evaluated=self.num_evaluated,
            num_rejected=self.num_rejected,
            num_open=len(self.heap),
            best=best,
            bound_s=0.0 if self.by_memory else self.bound,
        )


def search(
    branches: Iterable[Branch | Rejected],
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
    state = _Search(pricer, limits, by_memory)
    deadline = None if limits.time_limit_s is None else limits.clock_s() + limits.time_limit_s
    status = "optimal"
    try:
        state.fill(branches)
        while state.heap and state.num_proven < limits.top_k:
            if deadline is not None and limits.clock_s() >= deadline:
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
        bound_s=0.0 if state.by_memory else bound,
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


def exhaustive(branches: Iterable[Branch | Rejected], pricer: Pricer) -> Iterator[Priced]:
    """Every strategy of the space that lowers, priced in enumeration order: the oracle for small spaces."""
    for branch in branches:
        if isinstance(branch, Branch):
            for strategy in branch.strategies():
                try:
                    yield Priced(strategy=strategy, estimate=pricer.estimate(strategy))
                except InputError:
                    continue
