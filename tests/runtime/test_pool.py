"""The pool itself: results by rank, failures with their traceback, and life after a dead rank."""

from __future__ import annotations

import pytest

from tests.runtime.pool import Pool

pytestmark = pytest.mark.dist
MODULE = "tests.runtime.pool_cases"


def test_every_rank_answers(pool):
    assert pool.run(f"{MODULE}:add_ranks", ranks=4, offset=10) == [[rank, 6 + 10] for rank in range(4)]


def test_a_failing_rank_shows_its_traceback(pool):
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        pool.run(f"{MODULE}:fail_on", ranks=4, rank=2)


def test_a_dead_rank_fails_its_case_only(pool):
    with pytest.raises(AssertionError, match="rank 1 died"):
        pool.run(f"{MODULE}:die_on", ranks=4, rank=1)
    assert len(pool.run(f"{MODULE}:add_ranks", ranks=2, offset=0)) == 2


def test_a_hanging_rank_is_stopped(pool):
    with pytest.raises(AssertionError, match="rank 0 did not finish"):
        pool.run(f"{MODULE}:hang", ranks=2, timeout_s=3.0)


def test_a_lost_pool_starts_again():
    pool = Pool()
    try:
        assert pool.run(f"{MODULE}:add_ranks", ranks=1, offset=1) == [[0, 1]]
        pool.process.kill()
        with pytest.raises(AssertionError, match="the pool was lost"):
            pool.run(f"{MODULE}:add_ranks", ranks=1, offset=1)
        assert pool.run(f"{MODULE}:add_ranks", ranks=1, offset=2) == [[0, 2]]
    finally:
        pool.close()
