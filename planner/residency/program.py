"""The integer program of a tape.

Variables, for tensors x, steps n, gathered forms g of a tensor x(g):

    h[x]  binary   x is kept. For an input of the block continuous, and at least 1 when anything reads it later
    r[n]           step n runs again                       r[m] >= r[n] - h[x]   for x read by n and made by m      (closure)
                                                           r[m] >= 1 - h[x]      for x read by backward
    u[g]           g is gathered in recompute              u[g] >= r[n] - k h[x]            for n reading g
    b[g]           g is gathered in backward               b[g] >= 1 - k h[x] - k u[g]      for g read by backward
                   k = 1 where the engine keeps gathered what it keeps, and finds in backward what recompute gathered
    s[f]           form f (x itself, or a gathered form) is stored
                   s[f] >= h[x] for f read by backward, >= h[x] + r[n] - 1 for f read by step n, >= h[x] + b[g] - 1 and >= h[x] + u[g] - 1 for x of g

    minimise  seconds_weight (sum c(n) r[n] + c(g) u[g] + c'(g) b[g]) + bytes_weight sum bytes(f) s[f]
    subject to  seconds <= limit and bytes <= limit, where given

A tensor that is stored gathered and that a repeated step makes once more, beside others, for a reader of its own form counts both forms here: one more than
planner.block_work stores, never one less.

With h at 0 or 1 every other variable sits at the largest of its lower bounds, which is 0 or 1: only h needs to be integer. Bytes are counted in units of
their greatest common divisor, so a limit is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import floor, gcd

from planner.exchange import base
from planner.intraop.highs import IntegerProgram, minimise
from planner.residency.tape import Tape

# A free choice is worth this much more than nothing, so that equal answers are decided in one way: keep less rather than more, repeat less rather than more.
_TIE_S = 1e-10
_LIMIT_SLACK = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Tensors made by the block that stay, and what that costs by the program: seconds beyond backward, bytes from forward to backward."""

    kept: tuple[str, ...]
    extra_s: float
    saved_bytes: float


def solve(
    tape: Tape, *, seconds_weight: float, bytes_weight: float, most_s: float | None = None, most_bytes: float | None = None,
    time_limit_s: float | None = None,
) -> Choice | None:  # fmt: skip
    """The best choice, None when the limits exclude all (or nothing was found in time). `bytes_weight` is in seconds a byte."""
    return _Model(tape, seconds_weight, bytes_weight).solve(most_s, most_bytes, time_limit_s)


class _Model:
    """Columns by name, while the program is built."""

    def __init__(self, tape: Tape, seconds_weight: float, bytes_weight: float) -> None:
        self.tape = tape
        self.program = IntegerProgram()
        self.seconds: dict[int, float] = {}
        self.bytes: dict[int, float] = {}
        self.weights = seconds_weight, bytes_weight
        self.makers = {name: step.node_id for step in tape.steps for name in step.makes}
        self.held = {name: self.program.column(_TIE_S, binary=name in tape.storable) for name in (*tape.storable, *tape.entering)}
        self.again = {step.node_id: self._timed(step.kernel_s) for step in tape.steps}
        self.in_recompute = {name: self._timed(cost[0]) for name, cost in tape.gather_s.items()}
        self.in_backward = {name: self._timed(cost[1]) for name, cost in tape.gather_s.items()}
        self.stored: dict[str, int] = {}
        for step in tape.steps:
            for name in step.reads:
                self._read(name, self.again[step.node_id])
        for name in tape.backward_reads:
            self._read(name, None)

    def _timed(self, seconds: float) -> int:
        column = self.program.column(self.weights[0] * seconds + _TIE_S)
        self.seconds[column] = seconds
        return column

    def _store(self, form: str) -> int:
        if form not in self.stored:
            size = self.tape.size_bytes[form]
            self.stored[form] = self.program.column(self.weights[1] * size)
            self.bytes[self.stored[form]] = size
        return self.stored[form]

    def _at_least(
        self, column: int, *, plus: tuple[int | None, ...] = (), minus: tuple[int | None, ...] = (), constant: float = 0.0
    ) -> None:
        """column >= sum of `plus` - sum of `minus` + constant; None among `plus` is 1."""
        row = {column: 1.0}
        for name in plus:
            if name is None:
                constant += 1.0
            else:
                row[name] = row.get(name, 0.0) - 1.0
        for name in minus:
            if name is not None:
                row[name] = row.get(name, 0.0) + 1.0
        if constant > 0.0 or len(row) > 1:
            self.program.row(row, constant, None)

    def _read(self, form: str, reader: int | None) -> None:
        """`reader` (None: backward) reads physical name `form`."""
        name = base(form)
        held = self.held.get(name)
        if name in self.makers:
            self._at_least(self.again[self.makers[name]], plus=(reader,), minus=(held,))
        elif held is not None:
            self._at_least(held, plus=(reader,))
        spared = held if form in self.tape.shared else None
        if held is not None and (spared is not None or form not in self.tape.gather_s):
            self._at_least(self._store(form), plus=(held, reader), constant=-1.0)
        if form not in self.tape.gather_s:
            return
        gather = self.in_backward[form] if reader is None else self.in_recompute[form]
        earlier = self.in_recompute[form] if reader is None and form in self.tape.shared else None
        self._at_least(gather, plus=(reader,), minus=(spared, earlier))
        if held is not None and spared is None:
            self._at_least(self._store(name), plus=(held, gather), constant=-1.0)

    def solve(self, most_s: float | None, most_bytes: float | None, time_limit_s: float | None) -> Choice | None:
        if most_s is not None:
            # in microseconds, the size of a kernel: the solver's tolerances are absolute
            self.program.row({column: 1e6 * seconds for column, seconds in self.seconds.items()}, None, 1e6 * most_s * (1.0 + _LIMIT_SLACK))
        sizes = {column: size for column, size in self.bytes.items() if size > 0.0}
        if most_bytes is not None and sizes:
            unit = float(reduce(gcd, (round(size) for size in sizes.values()), 0)) or 1.0
            self.program.row(
                {column: size / unit for column, size in sizes.items()}, None, float(floor(most_bytes / unit * (1.0 + _LIMIT_SLACK)))
            )
        solution = minimise(self.program, time_limit_s)
        if solution is None:
            return None
        kept = tuple(name for name in self.tape.storable if self.held[name] in solution.chosen)
        return evaluate(self.tape, kept)


def evaluate(tape: Tape, kept: tuple[str, ...]) -> Choice:
    """What keeping `kept` costs by the same rules, walked forward without a solver: the certificate of every solve."""
    held = set(kept)
    makers = {name: step for step in tape.steps for name in step.makes}
    wanted = {base(name) for name in tape.backward_reads} - held
    again = []
    for step in reversed(tape.steps):
        if not wanted.isdisjoint(step.makes):
            again.append(step)
            wanted |= {base(name) for name in step.reads if base(name) in makers and base(name) not in held}
    reads = [*((name, "again") for step in again for name in step.reads), *((name, "backward") for name in tape.backward_reads)]
    alive = held | {base(name) for name, _ in reads if base(name) in tape.entering}
    free = {name for name in tape.shared if base(name) in alive}
    first = {name for name, phase in reads if phase == "again" and name in tape.gather_s} - free
    second = {name for name, phase in reads if phase == "backward" and name in tape.gather_s} - free - (first & tape.shared)
    stored = {name for name, _ in reads if base(name) in alive and (name in free or name not in tape.gather_s)}
    stored |= {base(name) for name in first | second if base(name) in alive}
    seconds = (
        sum(step.kernel_s for step in again)
        + sum(tape.gather_s[name][0] for name in first)
        + sum(tape.gather_s[name][1] for name in second)
    )
    return Choice(kept=kept, extra_s=seconds, saved_bytes=sum(tape.size_bytes[name] for name in stored))
