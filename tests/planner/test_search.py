"""Search: exact against exhaustive pricing, honest when stopped, deterministic, counted."""

from __future__ import annotations

import itertools

import pytest

from planner.outcome import Limits
from planner.search import exhaustive, first_that_fits, search
from planner.space import Branch
from tests.planner.samples import GIB, FakePricer, space

SPACES = [
    ("", {}),
    ("", {"engine_name": "megatron"}),
    ("", {"engine_name": "torchtitan", "num_experts": 8}),
    ("tp<=2", {"devices_per_node": 4, "num_nodes": 3, "global_batch": 24, "num_layers": 6}),
    ("zero=3,recompute=full|first_k", {}),
    ("pp=4,schedule=interleaved_1f1b", {"num_layers": 12}),
    ("", {"devices_per_node": 1}),
]


def oracle(spanned, pricer):
    return sorted((priced.estimate.step_s, priced.estimate.peak_bytes) for priced in exhaustive(spanned.branches(), pricer))


@pytest.mark.parametrize(("fix", "changes"), SPACES)
@pytest.mark.parametrize("usable_gib", [200.0, 40.0, 16.0])
@pytest.mark.parametrize("slack", [1.0, 0.5])
def test_agrees_with_exhaustive_pricing(fix, changes, usable_gib, slack):
    spanned = space(fix, **changes)
    pricer = FakePricer(space=spanned, usable_bytes=usable_gib * GIB, slack=slack)
    result = search(spanned.branches(), pricer)
    fitting = [step_s for step_s, peak in oracle(spanned, pricer) if peak <= pricer.usable_bytes]
    assert bool(result.best) == bool(fitting)
    if fitting:
        assert result.best[0].estimate.step_s == fitting[0]
        assert result.proof.status == result.status == "optimal"
        assert result.proof.bound_s == result.proof.objective_s == fitting[0]
        assert result.proof.gap_frac == 0.0


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_top_k_is_proven_up_to_dominated_recompute(top_k):
    spanned = space("recompute=none")
    pricer = FakePricer(space=spanned)
    result = search(spanned.branches(), pricer, limits=Limits(top_k=top_k))
    fitting = [step_s for step_s, peak in oracle(spanned, pricer) if peak <= pricer.usable_bytes]
    assert [priced.estimate.step_s for priced in result.best[:top_k]] == fitting[:top_k]


def test_smallest_by_memory():
    spanned = space()
    pricer = FakePricer(space=spanned, usable_bytes=1.0)
    result = search(spanned.branches(), pricer, by_memory=True)
    assert result.best[0].estimate.peak_bytes == min(peak for _, peak in oracle(spanned, pricer))


def test_prunes_most_of_the_space():
    spanned = space(engine_name="megatron", num_layers=32, global_batch=256)
    pricer = FakePricer(space=spanned, slack=0.95)
    result = search(spanned.branches(), pricer)
    assert result.num_candidates == sum(branch.options.count for branch in spanned.branches() if isinstance(branch, Branch))
    assert pricer.calls < result.num_candidates / 50


def test_every_candidate_is_accounted_for():
    spanned = space()
    pricer = FakePricer(space=spanned, usable_bytes=20 * GIB)
    result = search(spanned.branches(), pricer)
    rejected_meshes = sum(not isinstance(branch, Branch) for branch in spanned.branches())
    counted = sum(rejection.count for rejection in result.rejections) - rejected_meshes
    fitting = result.num_evaluated - sum(r.count for r in result.rejections if r.reason == "the estimated peak does not fit")
    assert counted + fitting == result.num_candidates
    assert all(rejection.example for rejection in result.rejections)


def test_time_limit_keeps_the_best_with_a_valid_bound():
    spanned = space()
    pricer = FakePricer(space=spanned, slack=0.3)
    best = min(step_s for step_s, peak in oracle(spanned, pricer) if peak <= pricer.usable_bytes)
    for ticks in (3, 40, 80):
        clock = itertools.count().__next__
        result = search(spanned.branches(), pricer, limits=Limits(time_limit_s=ticks, clock_s=clock))
        assert result.status == "time limit"
        assert result.bound_s <= best
        if result.best:
            assert result.proof.bound_s <= best <= result.proof.objective_s
            assert 0.0 <= result.proof.gap_frac < 1.0


@pytest.mark.parametrize("usable_gib", [200.0, 40.0])
def test_stopped_before_anything_was_priced_it_returns_some_plan_that_fits(usable_gib):
    spanned = space()
    pricer = FakePricer(space=spanned, usable_bytes=usable_gib * GIB, slack=0.3)
    best = min(step_s for step_s, peak in oracle(spanned, pricer) if peak <= pricer.usable_bytes)
    result = search(spanned.branches(), pricer, limits=Limits(time_limit_s=1, clock_s=itertools.count().__next__))
    assert result.num_evaluated == 0
    assert result.best[0].estimate.peak_bytes <= pricer.usable_bytes
    assert result.proof.bound_s <= best <= result.proof.objective_s
    assert any(rejection.reason == "left open when the search stopped" for rejection in result.rejections)


def test_interrupt_before_the_bounds_claims_no_bound():
    spanned = space()

    class Stopping(FakePricer):
        def least_branch_s(self, branch, level):
            raise KeyboardInterrupt

    result = search(spanned.branches(), Stopping(space=spanned))
    assert result.best
    assert result.status == "interrupted"
    assert result.proof.bound_s == 0.0
    assert result.proof.gap_frac == 1.0


def test_interrupt_keeps_the_best():
    spanned = space()
    pricer = FakePricer(space=spanned, slack=0.3)

    def stop(progress):
        if progress.best is not None and progress.num_evaluated >= 5:
            raise KeyboardInterrupt

    result = search(spanned.branches(), pricer, progress=stop)
    assert result.status == result.proof.status == "interrupted"
    assert result.best
    assert result.proof.bound_s <= result.best[0].estimate.step_s


def test_progress_reports_a_rising_bound():
    spanned, seen = space(), []
    search(spanned.branches(), FakePricer(space=spanned, slack=0.5), progress=seen.append)
    assert [item.num_evaluated for item in seen] == sorted(item.num_evaluated for item in seen)
    assert [item.bound_s for item in seen] == sorted(item.bound_s for item in seen)
    assert all(item.bound_s <= item.best.estimate.step_s for item in seen if item.best)


def test_what_cannot_be_lowered_is_rejected_not_infinite():
    spanned = space()
    pricer = FakePricer(space=spanned, broken=(1, 2))
    result = search(spanned.branches(), pricer)
    assert result.best[0].strategy.micro_batch not in (1, 2)
    assert any(rejection.reason == "cannot run (Strategy.micro_batch)" for rejection in result.rejections)


def test_nothing_fits():
    spanned = space()
    result = search(spanned.branches(), FakePricer(space=spanned, usable_bytes=GIB / 1000))
    assert result.best == ()
    assert result.proof is None
    assert {rejection.reason for rejection in result.rejections} >= {"the peak does not fit"}


def test_two_runs_give_the_same_answer():
    answers = {repr(search(space().branches(), FakePricer(space=space(), slack=0.7))) for _ in range(2)}
    assert len(answers) == 1


@pytest.mark.parametrize("usable_gib", [100.0, 16.0, 6.0, 3.0, 0.1])
def test_first_that_fits_exists_exactly_when_something_fits(usable_gib):
    spanned = space()
    pricer = FakePricer(space=spanned, usable_bytes=usable_gib * GIB)
    found = first_that_fits(spanned.branches(), pricer)
    assert (found is not None) == any(peak <= pricer.usable_bytes for _, peak in oracle(spanned, pricer))
    assert found is None or found.estimate.peak_bytes <= pricer.usable_bytes
