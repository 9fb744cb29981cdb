"""The Pareto frontier of a block kind: seconds of recompute against bytes kept from forward to backward.

`hull`: the vertices of its convex hull, all of them, by dichotomy: between two neighbours minimise seconds + slope x bytes; what lies below their line is a new
vertex, else the edge is proven. A stage of many equal blocks needs no other points: by Caratheodory's theorem the best mix for one budget uses two
neighbouring vertices, but for one block.

`frontier`: points from most to least bytes, each the fastest within its bytes; between two neighbours no point saves `epsilon_frac` of the range of bytes or
more (0: every non-dominated point).

*The transient.* While a block's backward runs, everything that backward reads has been kept or made again, so its bytes at any moment are the same under every
choice; only what recompute makes on the way and nobody needs afterwards differs. The peak of a block beyond the saved bytes of those before it is therefore
nearly a constant, and n blocks in flight cost (n - 1) x saved + peak. Each point carries the peak that planner.block_work counts for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.residency.program import Choice, solve
from planner.residency.tape import Tape

_LINE_SLACK = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One choice: the tensors made by the block that it keeps (the block's inputs are kept besides), priced as plans are (planner.block_work).

    extra_s: seconds a micro-batch beyond the backward of a block that keeps everything. saved_bytes: alive from forward to backward. peak_bytes: alive at
    most while the block's own recompute and backward run, saved_bytes included.
    """

    kept: tuple[str, ...]
    extra_s: float
    saved_bytes: float
    peak_bytes: float


def hull(tape: Tape) -> tuple[Point, ...]:
    """Vertices of the lower-left convex hull, from most bytes (and no recompute) to fewest."""
    first, last = _ends(tape)
    return tuple(
        _point(tape, choice) for choice in (first, *_between(tape, first, last), last) if choice is not last or last.kept != first.kept
    )


def frontier(tape: Tape, *, epsilon_frac: float = 0.0, time_limit_s: float | None = None) -> tuple[Point, ...]:
    """Non-dominated points, from most bytes to fewest; see the module docstring. `time_limit_s` is for each of the solves."""
    first, last = _ends(tape)
    choices = [first]
    step = max(1.0, epsilon_frac * (first.saved_bytes - last.saved_bytes))
    while choices[-1].saved_bytes > last.saved_bytes:
        most = max(last.saved_bytes, choices[-1].saved_bytes - step)
        found = _lexicographic(tape, most_bytes=most, time_limit_s=time_limit_s)
        if found is None:
            break
        choices.append(found)
    return tuple(_point(tape, choice) for choice in choices)


def _ends(tape: Tape) -> tuple[Choice, Choice]:
    """The fastest choice with the fewest bytes, and the smallest with the fewest seconds."""
    first = _lexicographic(tape)
    scale = _seconds_a_byte(tape)
    least = solve(tape, seconds_weight=0.0, bytes_weight=scale)
    last = least and solve(tape, seconds_weight=1.0, bytes_weight=0.0, most_bytes=least.saved_bytes)
    if first is None or last is None:
        raise AssertionError(f"{tape.block.kind_id}: keeping everything is always possible")
    return first, last


def _lexicographic(tape: Tape, *, most_bytes: float | None = None, time_limit_s: float | None = None) -> Choice | None:
    """The fastest within `most_bytes`, and of those the one with the fewest bytes."""
    fast = solve(tape, seconds_weight=1.0, bytes_weight=0.0, most_bytes=most_bytes, time_limit_s=time_limit_s)
    if fast is None:
        return None
    scale = _seconds_a_byte(tape)
    return (
        solve(tape, seconds_weight=0.0, bytes_weight=scale, most_s=fast.extra_s, most_bytes=most_bytes, time_limit_s=time_limit_s) or fast
    )


def _seconds_a_byte(tape: Tape) -> float:
    """A weight of bytes that makes all of them as heavy as all seconds."""
    return sum(step.kernel_s for step in tape.steps) / max(1.0, sum(tape.size_bytes.values()))


def _between(tape: Tape, left: Choice, right: Choice) -> tuple[Choice, ...]:
    """Vertices strictly between two."""
    saved, extra = left.saved_bytes - right.saved_bytes, right.extra_s - left.extra_s
    if saved <= 0.0 or extra <= 0.0:
        return ()
    slope = extra / saved
    found = solve(tape, seconds_weight=1.0, bytes_weight=slope)
    line = left.extra_s + slope * left.saved_bytes
    if found is None or found.extra_s + slope * found.saved_bytes >= line - _LINE_SLACK * extra:
        return ()
    return (*_between(tape, left, found), found, *_between(tape, found, right))


def _point(tape: Tape, choice: Choice) -> Point:
    work = tape.work(choice.kept)
    return Point(
        kept=choice.kept, extra_s=tape.extra_s(choice.kept), saved_bytes=work.saved_bytes, peak_bytes=work.saved_bytes + work.backward_peak_bytes
    )  # fmt: skip
