"""Schedules: orders, textbook bubbles, in-flight counts."""

from __future__ import annotations

from itertools import pairwise

import pytest

from costmodel.errors import InputError
from costmodel.schedule import actions, peak_in_flight, simulate

CASES = [
    (name, pp, vpp, pp * rounds)
    for name, vpp in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3))
    for pp in (2, 3, 4, 8)
    for rounds in (1, 2, 5)
]


@pytest.mark.parametrize(("name", "pp", "vpp", "m"), CASES)
def test_every_rank_runs_every_action_once_and_forward_first(name: str, pp: int, vpp: int, m: int) -> None:
    for rank, order in enumerate(actions(name, pp=pp, vpp=vpp, num_micro_batches=m)):
        wanted = {(chunk * pp + rank, kind, micro) for chunk in range(vpp) for kind in "FB" for micro in range(m)}
        assert len(order) == len(wanted)
        assert set(order) == wanted
        for stage, kind, micro in order:
            if kind == "B":
                assert order.index((stage, "F", micro)) < order.index((stage, "B", micro))


@pytest.mark.parametrize(("name", "pp", "vpp", "m"), CASES)
def test_bubble_is_the_textbook_one(name: str, pp: int, vpp: int, m: int) -> None:
    """(pp - 1)/(m vpp) of the ideal time, for equal stages and backward twice forward (Narayanan et al. 2021)."""
    orders = actions(name, pp=pp, vpp=vpp, num_micro_batches=m)
    forward, backward = 1.0 / vpp, 2.0 / vpp
    run = simulate(orders, forward_s=(forward,) * (pp * vpp), backward_s=(backward,) * (pp * vpp))
    assert run.makespan_s == pytest.approx(3.0 * m + (pp - 1) * 3.0 / vpp)
    assert run.busy_s == pytest.approx((3.0 * m,) * pp)


def test_slowest_stage_rules_an_uneven_pipeline() -> None:
    orders = actions("1f1b", pp=4, vpp=1, num_micro_batches=64)
    run = simulate(orders, forward_s=(1.0, 1.0, 2.0, 1.0), backward_s=(2.0, 2.0, 4.0, 2.0))
    fill, wait_for_first_backward, drain = 2.0, 1.0, 4.0
    assert run.makespan_s == pytest.approx(fill + wait_for_first_backward + 64 * 6.0 + drain)


def test_point_to_point_latency_stalls_1f1b_in_every_micro_batch() -> None:
    """On two ranks each round trip (two hops) serves two micro-batches."""
    orders = actions("1f1b", pp=2, vpp=1, num_micro_batches=32)
    times = [simulate(orders, forward_s=(1.0, 1.0), backward_s=(2.0, 2.0), p2p_s=p2p).makespan_s for p2p in (0.0, 0.1)]
    assert times[1] - times[0] == pytest.approx(0.1 * 32, rel=0.05)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_micro_batches_in_flight(pp: int) -> None:
    m = 4 * pp
    one = {"1f1b": lambda rank: pp - rank, "gpipe": lambda rank: m}
    for name, expected in one.items():
        for rank, order in enumerate(actions(name, pp=pp, vpp=1, num_micro_batches=m)):
            assert peak_in_flight(order, {rank: 1.0})[0] == expected(rank)
    for rank, order in enumerate(actions("interleaved_1f1b", pp=pp, vpp=2, num_micro_batches=m)):
        weights = {rank: 1.0, pp + rank: 1.0}
        assert peak_in_flight(order, weights)[0] == pp + 2 * (pp - 1 - rank) + 1


def test_fewer_micro_batches_than_ranks() -> None:
    orders = actions("1f1b", pp=8, vpp=1, num_micro_batches=3)
    assert peak_in_flight(orders[0], {0: 1.0})[0] == 3
    finish = simulate(orders, forward_s=(1.0,) * 8, backward_s=(1.0,) * 8).finish_s
    assert all(early >= late for early, late in pairwise(finish))


@pytest.mark.parametrize(
    ("name", "vpp", "m", "text"),
    [("interleaved_1f1b", 2, 6, "6 is not a multiple of 4"), ("1f1b", 2, 8, "not vpp 2"), ("zigzag", 1, 8, "unknown schedule 'zigzag'")],
)
def test_impossible_schedules_are_refused(name: str, vpp: int, m: int, text: str) -> None:
    with pytest.raises(InputError, match=text):
        actions(name, pp=4, vpp=vpp, num_micro_batches=m)
