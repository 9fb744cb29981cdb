"""The least seconds of a schedule, whatever its order of actions.

Let T_c be the seconds of one micro-batch in chunk c, forward, recompute and backward, and m the number of micro-batches. In any order rank r is busy
m * sum(T_c of r); before its first forward one micro-batch has passed the first chunks of the ranks before it, and after its last backward the same micro-batch
passes them back. So with what the rank does once a step beside it,

    step_s >= max over r of  m * sum_{c on r} T_c + sum_{j < r} T_j + extra_r

Where backward is split, weight gradients fill what the passing leaves: no fill counts.
"""

from __future__ import annotations

from collections.abc import Sequence


def busy_s(chunks: Sequence[tuple[int, float]], num_micro_batches: int, extra_s: Sequence[float], *, fills: bool = True) -> float:
    """The largest over ranks of m * work + fill + extra, for chunks (rank, seconds of one micro-batch) in execution order; no fill unless `fills`."""
    num_ranks = len(extra_s)
    work = [0.0] * num_ranks
    for rank, seconds in chunks:
        work[rank] += seconds
    best = fill = 0.0
    for rank in range(num_ranks):
        best = max(best, num_micro_batches * work[rank] + fill + extra_s[rank])
        fill += chunks[rank][1] if fills else 0.0
    return best
