"""Schedules: valid for any numbers, the bubbles and in-flight micro-batches of their papers, refusals."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.errors import InputError
from costmodel.schedule import SCHEDULES, actions, fewest, peak_in_flight, rank_of_stage, rules
from costmodel.schedules.in_flight import in_flight
from costmodel.schedules.table import from_csv, to_csv
from costmodel.schedules.timeline import StageSeconds, Timeline, simulate
from tests.costmodel.schedule_verifier import verify

NAMES = [item.name for item in SCHEDULES if item.name != "none"]
CASES = [
    (name, pp, vpp, pp * rounds)
    for name, vpp in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("breadth_first", 3))
    for pp in (2, 3, 4, 8)
    for rounds in (1, 2, 5)
]


def play(
    name: str, pp: int, vpp: int, m: int, *, forward: float = 1.0, input: float = 1.0, weight: float = 1.0, p2p: float = 0.0
) -> Timeline:
    """Equal stages, seconds of a whole rank."""
    times = (forward / vpp, (input + weight) / vpp, input / vpp, weight / vpp)
    seconds = StageSeconds(
        **{key: (time,) * (pp * vpp) for key, time in zip(("forward_s", "backward_s", "input_s", "weight_s"), times, strict=True)}
    )
    return simulate(actions(name, pp=pp, vpp=vpp, num_micro_batches=m), seconds, p2p_s=p2p)


def bubble(name: str, pp: int, vpp: int, m: int, *, forward: float = 1.0, input: float = 1.0, weight: float = 1.0) -> float:
    """The most any rank idles between its first and its last action (the definition of Qi et al. 2023, section 2.3)."""
    run = play(name, pp, vpp, m, forward=forward, input=input, weight=weight)
    return max(idle - rank * forward / vpp for rank, idle in enumerate(run.idle_s))


def held(name: str, pp: int, vpp: int, m: int, *, reduced: bool) -> list[float]:
    """Most micro-batches of a whole rank in flight, per rank: until W if `reduced`, else until I."""
    peaks = []
    for order in actions(name, pp=pp, vpp=vpp, num_micro_batches=m):
        weights = {stage: 1.0 / vpp for stage, _, _ in order}
        peaks.append(peak_in_flight(order, weights, weights if reduced else None)[0])
    return peaks


@st.composite
def numbers(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """A schedule with numbers it allows."""
    needs = rules(draw(st.sampled_from(NAMES)))
    pp, vpp = draw(st.integers(2, 9)), draw(st.integers(needs.chunks[0], min(4, needs.chunks[1])))
    m = draw(st.integers(1, 40))
    if needs.in_rounds and vpp > 1:
        m = pp * max(1, m // pp)
    return needs.name, pp, vpp, max(m, pp * vpp) if needs.fills else m


@given(numbers())
@settings(max_examples=150, deadline=None)
def test_every_schedule_is_valid(case: tuple[str, int, int, int]) -> None:
    name, pp, vpp, m = case
    orders = actions(name, pp=pp, vpp=vpp, num_micro_batches=m)
    places = rank_of_stage(name, pp=pp, vpp=vpp)
    rounds = verify(orders, num_stages=pp * vpp, num_micro_batches=m, rank_of_stage=places)
    assert rounds >= max(map(len, orders))
    assert from_csv(to_csv(orders)) == orders
    last = [list(in_flight(order))[-1] for order in orders]
    assert all(counts.total == 0 for counts in last)


@given(numbers())
@settings(max_examples=100, deadline=None)
def test_simulated_order_obeys_every_dependency(case: tuple[str, int, int, int]) -> None:
    """No makespan is below the longest chain of one micro-batch, nor below the work of a rank."""
    name, pp, vpp, m = case
    run = play(name, pp, vpp, m, forward=1.0, input=1.5, weight=0.5, p2p=0.25)
    assert run.busy_s == pytest.approx((3.0 * m,) * pp)
    hops = sum(one != two for one, two in pairwise(rank_of_stage(name, pp=pp, vpp=vpp)))
    assert run.makespan_s >= max(3.0 * m, pp * 2.5 + 2 * hops * 0.25) - 1e-9


@given(numbers())
@settings(max_examples=60, deadline=None)
def test_later_micro_batches_do_not_raise_the_peak(case: tuple[str, int, int, int]) -> None:
    name, pp, vpp, m = case
    few = fewest(name, pp=pp, num_micro_batches=m)
    for reduced in (False, True):
        assert held(name, pp, vpp, few, reduced=reduced) == held(name, pp, vpp, m, reduced=reduced)


@pytest.mark.parametrize(("name", "pp", "vpp", "m"), CASES)
def test_bubble_is_the_textbook_one(name: str, pp: int, vpp: int, m: int) -> None:
    """(pp - 1)/(m vpp) of the ideal time, for equal stages and backward twice forward (Narayanan et al. 2021)."""
    run = play(name, pp, vpp, m)
    assert run.makespan_s == pytest.approx(3.0 * m + (pp - 1) * 3.0 / vpp)
    assert run.busy_s == pytest.approx((3.0 * m,) * pp)


@pytest.mark.parametrize("pp", [2, 3, 4, 8, 16])
def test_bubbles_of_the_zero_bubble_papers(pp: int) -> None:
    """Table 1 of Qi et al. 2023: (p - 1)(F + B + W), (p - 1)(F + B - W), (p - 1)(F + B - 2 W), in its letters; ZB-V has none when the three are equal."""
    m = 3 * pp
    for forward, input, weight in ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (2.0, 2.0, 1.0)):
        times = {"forward": forward, "input": input, "weight": weight}
        assert bubble("1f1b", pp, 1, m, **times) == pytest.approx((pp - 1) * (forward + input + weight))
        assert bubble("zb_h1", pp, 1, m, **times) == pytest.approx((pp - 1) * (forward + input - weight))
        assert bubble("zb_h2", pp, 1, m, **times) == pytest.approx((pp - 1) * (forward + input - 2 * weight), abs=1e-9)
    assert bubble("zbv", pp, 2, m) == pytest.approx(0.0, abs=1e-9)
    # DualPipe's (PP/2 - 1)(F&B + B - 3 W), F&B = F + B where nothing overlaps, PP = 2 pp chunks of half a rank.
    assert bubble("dualpipev", pp, 2, m) <= (pp - 1) * (1.0 + 2.0 * 2.0 - 3.0) / 2 + 1e-9


@pytest.mark.parametrize(
    ("times", "m", "one", "zero"),
    [
        ((18.522, 18.086, 9.337, 0.601), 24, 0.2431, 0.1585),
        ((18.513, 18.086, 9.331, 0.626), 32, 0.1985, 0.1242),
        ((18.546, 18.097, 9.321, 0.762), 64, 0.1240, 0.0674),
        ((29.718, 29.444, 19.927, 0.527), 24, 0.2347, 0.1323),
    ],
)
def test_published_bubble_rates(times: tuple[float, ...], m: int, one: float, zero: float) -> None:
    """Qi et al. 2023, table 5: bubble rates of 1F1B and ZB-1p of the 1.5B and 6.2B models on 8 ranks, from its profiled milliseconds."""
    forward, input, weight, transfer = times
    for name, rate in (("1f1b", one), ("zb_h1", zero)):
        run = play(name, 8, 1, m, forward=forward, input=input, weight=weight, p2p=transfer)
        cost = max(finish - rank * (forward + transfer) for rank, finish in enumerate(run.finish_s))
        assert 1.0 - m * (forward + input + weight) / cost == pytest.approx(rate, abs=5e-5)


@pytest.mark.parametrize("pp", [2, 3, 4, 6, 8, 12, 16])
def test_controllable_memory(pp: int) -> None:
    """Qi et al. 2024, with F = B = W: V-Half holds (p + 2)//2 and bubbles p/2m, V-Min (p + 4)//3 and 2p/3m of 3 m; our W may run half a micro-batch later."""
    m = 4 * pp
    assert max(held("v_half", pp, 2, m, reduced=False)) <= (pp + 2) // 2
    assert max(held("v_half", pp, 2, m, reduced=True)) <= (pp + 2) // 2 + 0.5
    assert max(held("v_min", pp, 2, m, reduced=True)) <= (pp + 4) // 3
    assert bubble("v_half", pp, 2, m) <= 3.0 * pp / 2
    assert bubble("v_min", pp, 2, m) <= 3.0 * 2 * pp / 3


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_micro_batches_in_flight(pp: int) -> None:
    m = 4 * pp
    assert held("gpipe", pp, 1, m, reduced=True) == [m] * pp
    assert held("breadth_first", pp, 2, m, reduced=True) == pytest.approx([m] * pp)
    assert held("1f1b", pp, 1, m, reduced=True) == [pp - rank for rank in range(pp)]
    assert held("interleaved_1f1b", pp, 2, m, reduced=True) == [(pp + 2 * (pp - 1 - rank) + 1) / 2 for rank in range(pp)]
    assert held("zb_h1", pp, 1, m, reduced=False) == [pp - rank for rank in range(pp)]
    assert held("zb_h1", pp, 1, m, reduced=True) == [pp] * pp
    assert held("zb_h2", pp, 1, m, reduced=False) == [2 * (pp - rank) - 1 for rank in range(pp)]
    assert held("zb_h2", pp, 1, m, reduced=True) == [2 * pp - 1] * pp
    assert held("zbv", pp, 2, m, reduced=True) == [pp] * pp
    assert max(held("dualpipev", pp, 2, m, reduced=True)) <= pp + 0.5


def test_between_input_and_weight_gradient_a_micro_batch_holds_less() -> None:
    order = ((0, "F", 0), (0, "F", 1), (0, "I", 0), (0, "F", 2), (0, "I", 1), (0, "W", 0), (0, "W", 1), (0, "I", 2), (0, "W", 2))
    peak, counts = peak_in_flight(order, {0: 10.0}, {0: 4.0})
    assert peak == 24.0
    assert (counts.full, counts.reduced, counts.total) == ({0: 2}, {0: 1}, 3)
    assert peak_in_flight(order, {0: 10.0})[0] == 20.0
    assert peak_in_flight(order, {0: 10.0}, {0: 12.0})[0] == 34.0


def test_slowest_stage_rules_an_uneven_pipeline() -> None:
    orders = actions("1f1b", pp=4, vpp=1, num_micro_batches=64)
    backward = (2.0, 2.0, 4.0, 2.0)
    seconds = StageSeconds(forward_s=(1.0, 1.0, 2.0, 1.0), backward_s=backward, input_s=backward, weight_s=(0.0,) * 4)
    fill, wait_for_first_backward, drain = 2.0, 1.0, 4.0
    assert simulate(orders, seconds).makespan_s == pytest.approx(fill + wait_for_first_backward + 64 * 6.0 + drain)


def test_point_to_point_latency_stalls_1f1b_in_every_micro_batch() -> None:
    """On two ranks each round trip (two hops) serves two micro-batches."""
    times = [play("1f1b", 2, 1, 32, p2p=p2p).makespan_s for p2p in (0.0, 0.1)]
    assert times[1] - times[0] == pytest.approx(0.1 * 32, rel=0.05)


def test_the_turn_of_a_v_costs_no_transfer() -> None:
    """One micro-batch crosses pp - 1 links down and up, forward and backward, and none at the turn."""
    assert play("zbv", 4, 2, 1, weight=0.0, p2p=1.0).makespan_s == pytest.approx(4 * 1.0 + 4 * 1.0 + 4 * 3 * 1.0)


def test_fewer_micro_batches_than_ranks() -> None:
    orders = actions("1f1b", pp=8, vpp=1, num_micro_batches=3)
    assert peak_in_flight(orders[0], {0: 1.0})[0] == 3
    finish = play("1f1b", 8, 1, 3).finish_s
    assert all(early >= late for early, late in pairwise(finish))


def test_a_deadlock_is_reported() -> None:
    seconds = StageSeconds(forward_s=(1.0, 1.0), backward_s=(1.0, 1.0), input_s=(1.0, 1.0), weight_s=(1.0, 1.0))
    with pytest.raises(ValueError, match="4 actions left"):
        simulate((((0, "B", 0), (0, "F", 0)), ((1, "F", 0), (1, "B", 0))), seconds)


@pytest.mark.parametrize(
    ("name", "vpp", "m", "text"),
    [
        ("interleaved_1f1b", 2, 6, "6 micro-batches are not a multiple of pp 4"),
        ("zb_h1", 2, 6, "6 micro-batches are not a multiple of pp 4"),
        ("1f1b", 2, 8, "with 2 chunks a rank"),
        ("zbv", 1, 8, "1 chunks a rank; it runs 2 chunks"),
        ("dualpipev", 2, 7, "7 micro-batches are fewer than dualpipev needs, one for each of 8"),
        ("gpipe", 1, 0, "0 micro-batches"),
        ("zigzag", 1, 8, "unknown schedule 'zigzag'"),
    ],
)
def test_impossible_schedules_are_refused(name: str, vpp: int, m: int, text: str) -> None:
    with pytest.raises(InputError, match=text):
        actions(name, pp=4, vpp=vpp, num_micro_batches=m)


def test_a_broken_table_names_its_cell() -> None:
    with pytest.raises(InputError, match="'0X1' is no action") as caught:
        from_csv("0F0,0F1\n1F0,0X1\n")
    assert "row 1, cell 1" in caught.value.where
