"""Explanations: every section says what the plan holds, with its numbers."""

from __future__ import annotations

from dataclasses import replace

from costmodel.estimate import memory_risk
from planner.explain import binding_class, compare, explain, fullest
from tests.planner import samples


def section(text: str, title: str) -> str:
    return text.split(f"{title}\n")[1].split("\n\n")[0]


def test_why():
    why = section(explain(samples.plan()), "Why this plan")
    assert "pp 2 x dp_shard 2 x tp 2, micro-batch 2, ZeRO-3, 1f1b, recompute selective" in why
    assert "8 micro-batches" in why
    assert "compute 75.0 %, bubble 25.0 %" in why
    assert "60.0 GiB of 80.0 GiB (75.0 %)" in why
    assert "activations (45.0 GiB)" in why


def test_second_and_rejected():
    text = explain(samples.plan())
    assert "2.50 s (+25.0 %), 70.0 GiB: bubble +500 ms" in section(text, "What was second")
    assert "17 x the estimated peak does not fit; for example pp 1: 90.0 GiB" in section(text, "What was rejected")


def test_levers_sorted_by_use():
    change = section(explain(samples.plan()), "What would have to change").splitlines()
    assert "20.0 GiB are free on the fullest rank; activations bind first." in change[0]
    assert change[1].strip() == "16 devices: 1.25 s a step (-37.5 %), 50.0 GiB."
    assert change[2].strip() == "no recompute: 1.50 s a step (-25.0 %), but needs 20.0 GiB more than a device has."
    assert change[3].strip() == "full recompute: 3.00 s a step (+50.0 %), frees 20.0 GiB."


def test_proof_is_as_strong_as_it_is():
    plan = samples.plan()
    assert "No strategy of the space is estimated below 2.00 s" in explain(plan)
    stopped = replace(plan, proof=replace(plan.proof, status="time limit", bound_s=1.5, gap_frac=0.25))
    assert "Stopped (time limit): nothing in the space is below 1.50 s, the plan is at 2.00 s (gap 25.0 %)" in explain(stopped)
    given = replace(plan, proof=replace(plan.proof, status="estimated"), alternatives=())
    assert "Nothing was searched" in explain(given)


def test_compare_names_the_causes():
    base, other = samples.estimate_of(2.0, 1e9), samples.estimate_of(4.0, 1e9)
    assert compare(base, other) == "compute +1.50 s, bubble +500 ms"
    assert compare(base, base) == "the same by cause"


def test_fullest_rank_and_binding_class():
    estimate = samples.estimate_of(1.0, 8e9)
    assert fullest(estimate).rank_index == 0
    assert binding_class(estimate).name == "activations"


def test_method_of_plan():
    plan = samples.plan()
    assert plan.explain() == explain(plan)


def test_risk_names_the_fastest_safer_plan():
    plan = samples.plan()
    assert "Memory risk OK: 25.0 % of the device stays free." in explain(plan)
    tight = replace(plan, estimate=samples.estimate_of(2.0, 79.9 * samples.GIB))
    assert "Memory risk RISKY: 0.1 %" in explain(tight)
    assert "TIGHT with pp 4 x tp 2, micro-batch 1, 1f1b, no recompute: 2.50 s a step (+25.0 %), 70.0 GiB." in explain(tight)


def test_risk_by_headroom():
    assert [memory_risk(peak, 100.0) for peak in (84.9, 85.1, 94.9, 95.1, 100.0, 100.1)] == ["OK", "TIGHT", "TIGHT", "RISKY", "RISKY", "NO"]
