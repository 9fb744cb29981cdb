"""Best-first branch and bound over a space of strategies, with a certificate.

One heap holds these kinds of entries, each under a lower bound of its objective:

    branch      (mesh, micro-batch)     coarse bound of all members     bounded again, its blocks priced at endless sizes
    branch, close                       closer bound of all members     bounded again, its kernels priced at their real sizes
    branch, tight                       tight bound of all members      expanded into chains of growing recompute
    chain                               bound of its first member       cut to the members that may fit
    chain, cut                          bound of its first member       split by mesh, then bounded sharply
    chain, sharp                        sharp bound of that member      that member priced by the full estimate
    priced      an estimate             its objective, exactly          popped: nothing left is better

The heap is popped smallest first, so when a priced entry comes out every open entry is bounded by its objective: it is optimal, and the bound is the
objective. Stopped early (time limit, Ctrl-C), the smallest open bound is what `Proof.bound_s` may claim. The bounds must never exceed the
estimate; tests/planner/test_search.py checks this against exhaustive pricing. Ties break by enumeration order, so equal inputs give equal plans.

Before that a quick dive looks for any plan that fits, from the smallest states on (`first_that_fits`, DIVE strategies at most): it is what a search that is
stopped before it priced anything returns. It prunes nothing, so it changes no answer.

After the proof the search lingers (LINGER steps, ten times as many while it has priced too few) for the next best plans, as many as it may return. Those it
had to stop at are priced, not proven.

A strategy whose *least* memory exceeds the device is rejected before pricing, one whose estimate exceeds it after; both are counted by reason. Of a
chain only the first member that fits is priced: those after it recompute more and are no faster (planner.space.Chain).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from costmodel.errors import InputError
from costmodel.units import format_bytes, format_seconds
from planner.outcome import TIGHT, Limits, Need, Priced, Pricer, Progress, Rejections, Result
from planner.plan import Proof
from planner.space import Branch, Chain, Rejected, describe
from planner.strategy import Strategy

METHOD = "best-first branch and bound"
DIVE = 200
LINGER = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """A branch bounded at `level` (0, CLOSE, TIGHT), or a chain whose members that cannot fit are `cut` or not, and whose bound is `sharp` or not."""

    branch: Branch | None = None
    level: int = 0
    chain: Chain | None = None
    cut: bool = False
    sharp: bool = False


class _Search:
    """One run: the heap and the tallies. `by_memory` minimises the peak instead of the step time and lets everything fit.

    `key` below is the objective: seconds, or bytes by memory. `bound` is the smallest key that may still be reached.
    """

    def __init__(self, pricer: Pricer, limits: Limits, by_memory: bool) -> None:
        self.pricer, self.limits, self.by_memory = pricer, limits, by_memory
        self.heap: list[tuple[float, int, int, _Open | Priced]] = []
        self.found: list[tuple[float, int, Priced]] = []
        self.rejections = Rejections()
        self.incumbent: Priced | None = None
        self.filled = False
        self.num_pushed = self.num_candidates = self.num_evaluated = self.num_fitting = self.num_rejected = self.num_proven = 0
        self.bound = 0.0

    def push(self, key: float, entry: _Open | Priced) -> None:
        """Among equal keys priced entries come out first, then chains, then branches, then whatever came first."""
        self.num_pushed += 1
        level = 0 if isinstance(entry, Priced) else 1 if entry.chain else 2
        heapq.heappush(self.heap, (key, level, self.num_pushed, entry))

    def fits(self, peak_bytes: float) -> bool:
        return self.by_memory or peak_bytes <= self.pricer.usable_bytes

    def least_bytes(self, strategy: Strategy) -> Need:
        """What matters of the need: beyond the device, or by memory beyond the best so far, it need not be exact."""
        best_bytes = self.found[0][0] if self.found else float("inf")
        return self.pricer.least_bytes(strategy, best_bytes if self.by_memory else self.pricer.usable_bytes)

    def reject(self, what: str, reason: str, count: int) -> None:
        self.num_rejected += count
        self.rejections.add(Rejected(what=what, reason=reason, count=count))

    def refuse(self, strategy: Strategy, error: InputError, count: int) -> None:
        self.reject(f"{describe(strategy)}: {error.what}", f"cannot run ({error.where or 'model'})", count)

    @property
    def best(self) -> tuple[Priced, ...]:
        """The best found, else what the dive found."""
        return tuple(priced for _, _, priced in self.found) or ((self.incumbent,) if self.incumbent else ())

    def fill(self, branches: Iterable[Branch | Rejected]) -> None:
        branches = tuple(branches)
        if not self.by_memory:
            self.incumbent = first_that_fits(branches, self.pricer, most=DIVE)
        for branch in branches:
            if isinstance(branch, Rejected):
                self.rejections.add(branch)
                continue
            self.num_candidates += branch.options.count
            need = self.pricer.least_states_bytes(branch.mesh, branch.zero_stage)
            if self.by_memory:
                self.push(need.peak_bytes, _Open(branch=branch, level=TIGHT))
            elif self.fits(need.peak_bytes):
                self.push(self.pricer.least_branch_s(branch, 0), _Open(branch=branch))
            else:
                what = f"{describe(next(branch.strategies()))}: at least {format_bytes(need.peak_bytes)}"
                self.reject(what, need.reason, branch.options.count)
        self.filled = True

    def expand(self, branch: Branch, key: float) -> None:
        """Push every chain under the bound of its first member."""
        for chain in branch.chains():
            need = self.pricer.least_states_bytes(chain.base.mesh, chain.base.zero_stage)
            if self.by_memory:
                for single in chain.split():
                    self.expand_ends(single, max(key, need.peak_bytes))
                continue
            if not self.fits(need.peak_bytes):
                self.reject(f"{describe(chain.member(0))}: at least {format_bytes(need.peak_bytes)}", need.reason, chain.size)
                continue
            try:
                least_s = self.pricer.least_s(chain.member(0))
            except InputError as error:
                self.refuse(chain.member(0), error, chain.size)
                continue
            self.push(max(key, least_s), _Open(chain=chain))

    def expand_ends(self, chain: Chain, key: float) -> None:
        """By memory the ends of a chain are its extremes. What could be the best so far is priced at once, which sharpens every later look."""
        if self.found and key > self.found[0][0]:
            self.push(key, _Open(chain=chain, cut=True, sharp=True))
            return
        for part in (chain.part(0, 1), chain.part(chain.count - 1)) if chain.count > 1 else (chain,):
            try:
                least = max(key, self.least_bytes(part.member(0)).peak_bytes)
            except InputError as error:
                self.refuse(part.member(0), error, part.size)
                continue
            if self.found and least >= self.found[0][0]:
                self.push(least, _Open(chain=part, cut=True, sharp=True))
            else:
                self.price(part, least)

    def cut(self, chain: Chain, key: float) -> None:
        """Drop the members that cannot fit: the first is asked, then the last, the rest is bisected."""
        need = self.least_bytes(chain.member(0))
        if self.fits(need.peak_bytes):
            self.sharpen(chain, key)
            return
        first = chain.count
        if chain.count > 1:
            need = self.least_bytes(chain.member(-1))
            first = self.first_fit(chain) if self.fits(need.peak_bytes) else chain.count
        if first == chain.count:
            self.reject(f"{describe(chain.member(-1))}: at least {format_bytes(need.peak_bytes)}", need.reason, chain.size)
            return
        self.reject(describe(chain.member(0)), "too little recompute to fit", chain.part(0, first).size)
        self.push(max(key, self.pricer.least_s(chain.member(first))), _Open(chain=chain.part(first), cut=True))

    def sharpen(self, chain: Chain, key: float) -> None:
        """Of several meshes the last has been cut, the others are asked in their turn. A chain on one mesh gets the sharp bound of its first member."""
        *others, last = chain.split()
        for other in others:
            self.push(key, _Open(chain=other))
        self.push(max(key, self.pricer.sharp_s(last.member(0))), _Open(chain=last, cut=True, sharp=True))

    def first_fit(self, chain: Chain) -> int:
        """Index of the first member that fits, between the first, which does not, and the last, which does."""
        low, high = 1, chain.count - 1
        while low < high:
            middle = (low + high) // 2
            if self.fits(self.least_bytes(chain.member(middle)).peak_bytes):
                high = middle
            else:
                low = middle + 1
        return low

    def price(self, chain: Chain, key: float) -> None:
        strategy = chain.member(0)
        try:
            estimate = self.pricer.estimate(strategy)
        except InputError as error:
            self.refuse(strategy, error, chain.size)
            return
        self.num_evaluated += 1
        if not self.fits(estimate.peak_bytes):
            self.reject(f"{describe(strategy)}: {format_bytes(estimate.peak_bytes)}", "the estimated peak does not fit", 1)
            if chain.count > 1:
                self.push(max(key, self.pricer.least_s(chain.member(1))), _Open(chain=chain.part(1)))
            return
        priced = Priced(strategy=strategy, estimate=estimate)
        self.num_fitting += 1
        exact = estimate.peak_bytes if self.by_memory else estimate.step_s
        self.push(exact, priced)
        self.found.append((exact, self.num_evaluated, priced))
        self.found.sort(key=lambda item: item[:2])
        del self.found[max(self.limits.keep, self.limits.top_k) :]

    def linger(self) -> None:
        """Look for the next best, for alternatives; what is proven stays. At least as many as may be returned get priced."""
        wanted = max(self.limits.keep, self.limits.top_k)
        for looked in range(10 * LINGER):
            if not self.heap or self.num_proven >= wanted or (looked >= LINGER and len(self.found) >= wanted):
                return
            self.step()

    def step(self) -> None:
        key, _, _, entry = heapq.heappop(self.heap)
        self.bound = max(self.bound, key) if not self.num_proven else self.bound
        if isinstance(entry, Priced):
            self.num_proven += 1
        elif entry.chain is not None:
            (self.price if entry.sharp else self.sharpen if entry.cut else self.cut)(entry.chain, key)
        elif entry.branch is not None and entry.level < TIGHT:
            level = entry.level + 1
            self.push(max(key, self.pricer.least_branch_s(entry.branch, level)), _Open(branch=entry.branch, level=level))
        elif entry.branch is not None:
            self.expand(entry.branch, key)

    def open_example(self) -> str:
        """The open strategy with the smallest bound in words; empty when none is open."""
        for key, _, _, entry in heapq.nsmallest(len(self.found) + 1, self.heap, key=lambda item: item[:3]):
            if isinstance(entry, _Open):
                strategy = entry.chain.member(0) if entry.chain else next(entry.branch.strategies()) if entry.branch else None
                return f"{describe(strategy)}: at least {format_seconds(key)}" if strategy else ""
        return ""

    def progress(self) -> Progress:
        return Progress(
            num_evaluated=self.num_evaluated,
            num_rejected=self.num_rejected,
            num_open=len(self.heap),
            best=self.best[0] if self.best else None,
            bound_s=0.0 if self.by_memory else self.bound,
        )


def search(
    branches: Iterable[Branch | Rejected],
    pricer: Pricer,
    *,
    limits: Limits | None = None,
    by_memory: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Result:
    """The fastest strategies that fit (or, `by_memory`, the smallest ones), with a proof when one was found.

    KeyboardInterrupt ends it with what is known.
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
        if state.num_proven and not by_memory:
            state.linger()
    except KeyboardInterrupt:
        status = "interrupted"
    return _result(state, status)


def _result(state: _Search, status: str) -> Result:
    best = state.best
    bound = state.heap[0][0] if state.heap and not state.num_proven and state.filled else state.bound
    if state.num_proven:
        status = "optimal"
    slower = state.num_candidates - state.num_rejected - state.num_fitting
    if slower and best:
        reason = "cannot be faster than the plan (bound)" if state.num_proven else "left open when the search stopped"
        state.rejections.add(Rejected(what=state.open_example(), reason=reason, count=slower))
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


def first_that_fits(branches: Iterable[Branch | Rejected], pricer: Pricer, *, most: int | None = None) -> Priced | None:
    """Some strategy that fits, looked for from the smallest states on and at the ends of every chain, where the peaks are smallest; None when none does (among
    the first `most` that were looked at)."""
    limit = pricer.usable_bytes
    needs = [(pricer.least_states_bytes(item.mesh, item.zero_stage).peak_bytes, item) for item in branches if isinstance(item, Branch)]
    looked = 0
    for least, branch in sorted(needs, key=lambda item: item[0]):
        if least > limit:
            return None
        for chain in branch.chains():
            for index in dict.fromkeys((chain.count - 1, 0)):
                if looked == most:
                    return None
                looked += 1
                strategy = chain.member(index)
                try:
                    if pricer.least_bytes(strategy, limit).peak_bytes > limit:
                        continue
                    priced = Priced(strategy=strategy, estimate=pricer.estimate(strategy))
                except InputError:
                    continue
                if priced.estimate.peak_bytes <= limit:
                    return priced
    return None


def exhaustive(branches: Iterable[Branch | Rejected], pricer: Pricer) -> Iterator[Priced]:
    """Every strategy of the space that lowers, priced in enumeration order: the oracle for small spaces."""
    for branch in branches:
        if isinstance(branch, Branch):
            for strategy in branch.strategies():
                try:
                    yield Priced(strategy=strategy, estimate=pricer.estimate(strategy))
                except InputError:
                    continue
