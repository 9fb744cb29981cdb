"""The fast timeline equals the full simulation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.schedule import SCHEDULES, actions, rules
from costmodel.schedules import steady
from costmodel.schedules.steady import runs
from costmodel.schedules.timeline import StageSeconds, simulate

NAMES = [item.name for item in SCHEDULES if item.name != "none"]
TIMES = st.sampled_from([0.0, 0.5, 1.0, 1.0, 1.0, 1.001, 1.5, 2.0])


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, dict[str, int], StageSeconds, float]:
    """A schedule longer than its short form, with stages that differ."""
    needs = rules(draw(st.sampled_from(NAMES)))
    pp, vpp = draw(st.integers(2, 4)), draw(st.integers(needs.chunks[0], min(3, needs.chunks[1])))
    m = draw(st.integers(20, 110))
    if needs.in_rounds and vpp > 1:
        m -= m % pp
    n = pp * vpp
    row = st.tuples(*[TIMES] * n) | st.tuples(TIMES).map(lambda value: value * n)
    seconds = StageSeconds(forward_s=draw(row), backward_s=draw(row), input_s=draw(row), weight_s=draw(row))
    return needs.name, {"pp": pp, "vpp": vpp, "num_micro_batches": m}, seconds, draw(st.sampled_from([0.0, 0.1, 0.7]))


@given(cases())
@settings(max_examples=200, deadline=None)
def test_equals_the_full_simulation(case: tuple[str, dict[str, int], StageSeconds, float]) -> None:
    name, numbers, seconds, p2p_s = case
    (fast,) = runs(name, seconds, **numbers, transfers_s=(p2p_s,))
    full = simulate(actions(name, **numbers), seconds, p2p_s=p2p_s)
    assert fast.finish_s == pytest.approx(full.finish_s, rel=1e-9, abs=1e-12)
    assert fast.busy_s == pytest.approx(full.busy_s, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p2p_s", [0.0, 0.05])
def test_plays_few_micro_batches_of_many(name: str, p2p_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stages as even as a model's, the lists that are played do not grow with the number of micro-batches."""
    played: list[int] = []

    def counted(name: str, *, pp: int, vpp: int, num_micro_batches: int) -> object:
        played.append(num_micro_batches)
        return actions(name, pp=pp, vpp=vpp, num_micro_batches=num_micro_batches)

    monkeypatch.setattr(steady, "actions", counted)
    vpp = min(2, rules(name).chunks[1])
    n = 4 * vpp
    seconds = StageSeconds(
        forward_s=(1.0,) * (n - 1) + (1.3,), backward_s=(2.0,) * (n - 1) + (2.5,), input_s=(1.0,) * n, weight_s=(1.0,) * n
    )
    (result,) = runs(name, seconds, pp=4, vpp=vpp, num_micro_batches=4096, transfers_s=(p2p_s,))
    assert max(played, default=0) <= 300
    assert result.makespan_s > 4096 * 3.0
