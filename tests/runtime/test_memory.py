"""Predicted peaks are the live bytes that a step really has, rank by rank."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.dist
TOLERANCE = 0.02
# Predicted short: recompute frees its block later than the liveness of its kernels says, DTensor keeps what a plain tensor would not.
LOOSE = {"full recompute": 0.05, "tp": 0.05, "tp, sp": 0.06}

CASES = {
    "one rank": (1, {"micro_batch": 8}),
    "accumulation": (1, {"micro_batch": 4}),
    "ddp": (2, {"mesh": {"dp_replicate": 2}, "micro_batch": 4}),
    "zero 3": (2, {"mesh": {"dp_shard": 2}, "zero_stage": 3, "micro_batch": 4}),
    "full recompute": (1, {"micro_batch": 4, "recompute": "full"}),
    "tp": (2, {"mesh": {"tp": 2}, "micro_batch": 4}),
    "tp, sp": (2, {"mesh": {"tp": 2}, "sequence_parallel": True, "micro_batch": 4}),
    "1f1b": (2, {"mesh": {"pp": 2}, "schedule": "1f1b", "micro_batch": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_predicted_peak_is_the_counted_one(pool, name):
    ranks, plan = CASES[name]
    for rank, (predicted, counted) in enumerate(pool.run("tests.runtime.memory_cases:predicted_and_counted", ranks=ranks, plan=plan)):
        assert predicted == pytest.approx(counted, rel=LOOSE.get(name, TOLERANCE)), f"rank {rank}: {predicted / counted - 1:+.1%}"
