"""The real pricer: bounds that no estimate beats, searches that agree with exhaustive pricing of real models, advice that holds when followed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.engine import engine
from costmodel.errors import InputError
from costmodel.hardware import Cluster
from planner.bounds import split_bound_s
from planner.facade import autoplan, estimate, layouts, plan_for
from planner.infeasible import NoPlanError
from planner.job import Job
from planner.levers import any_that_fits, fewest_nodes
from planner.models import resolve
from planner.pricer import GraphPricer
from planner.problem import problem_of
from planner.restrict import parse_restrictions
from planner.search import exhaustive, search
from planner.space import Branch

SPEC = replace(resolve("llama3.2-1b"), name="short", num_layers=5)
MOE = replace(resolve("qwen3-30b-a3b"), name="sparse", num_layers=3)


def problem(cluster="4xH100", engine_name="torch", spec=SPEC, memory_gib=None, **job):
    parsed = Cluster.parse(cluster)
    if memory_gib is not None:
        device = replace(parsed.pool.device, memory_bytes=memory_gib * 2**30)
        parsed = replace(parsed, pools=(replace(parsed.pool, device=device),))
    return problem_of(spec, parsed, Job(**{"global_batch": 8, "seq_len": 2048, **job}), engine(engine_name))


PROBLEMS = [
    ({}, ""),
    ({"engine_name": "megatron"}, "cp=1"),
    ({"engine_name": "torchtitan"}, "pp<=2"),
    ({"memory_gib": 12.0}, ""),
    ({"memory_gib": 12.0, "engine_name": "megatron", "optimizer": "sgd"}, "tp<=2"),
    ({"cluster": "1xH100*6", "global_batch": 12}, ""),
    ({"spec": MOE, "engine_name": "torchtitan"}, "pp=1,cp=1"),
    ({"spec": MOE, "engine_name": "megatron"}, "cp=1,zero=1"),
    ({"cluster": "4xV100", "engine_name": "torchtitan", "precision": "fp16", "seq_len": 512}, "cp=1"),
]


@pytest.mark.parametrize(("changes", "fix"), PROBLEMS)
def test_no_estimate_beats_its_bounds(changes, fix):
    posed = problem(**changes)
    pricer = GraphPricer(posed)
    for branch in posed.space(parse_restrictions(fix)).branches():
        if not isinstance(branch, Branch):
            continue
        coarse_s, close_s, tight_s = (pricer.least_branch_s(branch, level) for level in range(3))
        states = pricer.least_states_bytes(branch.mesh, branch.zero_stage).peak_bytes
        assert tight_s >= close_s >= coarse_s * (1 - 1e-9)
        for priced in exhaustive([branch], pricer):
            found = priced.estimate
            assert tight_s <= found.step_s * (1 + 1e-9), priced.strategy
            assert pricer.least_s(priced.strategy) <= pricer.sharp_s(priced.strategy) * (1 + 1e-9), priced.strategy
            assert pricer.sharp_s(priced.strategy) <= found.step_s * (1 + 1e-9), priced.strategy
            assert states <= found.peak_bytes * (1 + 1e-9), priced.strategy
            for limit in (pricer.usable_bytes, float("inf")):
                assert pricer.least_bytes(priced.strategy, limit).peak_bytes <= found.peak_bytes * (1 + 1e-9), priced.strategy


@pytest.mark.parametrize(("changes", "fix"), PROBLEMS)
def test_search_agrees_with_exhaustive_pricing(changes, fix):
    posed = problem(**changes)
    pricer = GraphPricer(posed)
    branches = list(posed.space(parse_restrictions(fix)).branches())
    fitting = [priced.estimate.step_s for priced in exhaustive(branches, pricer) if priced.estimate.fits]
    result = search(branches, pricer)
    assert [priced.estimate.step_s for priced in result.best[:1]] == pytest.approx(sorted(fitting)[:1], rel=1e-12)
    smallest = search(branches, pricer, by_memory=True).best[0].estimate.peak_bytes
    assert smallest == min(priced.estimate.peak_bytes for priced in exhaustive(branches, pricer))


def test_split_bound_is_the_even_pipeline_at_most():
    for ranks in (1, 2, 5):
        for micro_batches in (1, 3, 64):
            even = (micro_batches + ranks - 1) / ranks
            assert split_bound_s(1.0, micro_batches, ranks, interleaved=True) <= split_bound_s(1.0, micro_batches, ranks, interleaved=False)
            assert split_bound_s(1.0, micro_batches, ranks, interleaved=False) <= even * (1 + 1e-12)
    assert split_bound_s(1.0, 8, 1, interleaved=False) == pytest.approx(8.0)


def test_plan_is_what_estimate_says():
    cluster, job = Cluster.parse("4xH100"), Job(global_batch=8, seq_len=2048)
    plan = autoplan(SPEC, cluster, job)
    assert plan.estimate == estimate(SPEC, cluster, job, plan.strategy)
    assert plan.estimate.fits
    given = plan_for(SPEC, cluster, job, plan.strategy)
    assert given.proof.status == "estimated"
    assert (given.stages, given.estimate, given.graph_id) == (plan.stages, plan.estimate, plan.graph_id)


def test_levers_hold_when_pulled():
    cluster, job = Cluster.parse("4xH100"), Job(global_batch=8, seq_len=2048)
    plan = autoplan(SPEC, cluster, job)
    same = [lever for lever in plan.levers if lever.strategy != plan.strategy and lever.strategy.mesh == plan.strategy.mesh]
    assert same
    for lever in same:
        found = estimate(SPEC, cluster, job, lever.strategy)
        assert (found.step_s, found.peak_bytes, found.fits) == (lever.step_s, lever.peak_bytes, lever.fits)
    assert not any(lever.fits and lever.step_s < plan.estimate.step_s and not lever.strategy.compile for lever in same)


def test_infeasible_carries_the_nearest_miss_and_advice_that_works():
    posed = problem(memory_gib=4.0)
    with pytest.raises(NoPlanError) as caught:
        autoplan(posed.graph, posed.cluster, posed.job)
    error = caught.value
    peaks = [priced.estimate.peak_bytes for priced in exhaustive(posed.space(parse_restrictions("")).branches(), GraphPricer(posed))]
    assert error.exit_code == 4
    assert error.nearest.estimate.peak_bytes == min(peaks)
    assert sum(line.amount for line in error.memory) > 4.0 * 2**30
    assert error.binding in {line.name for line in error.memory}
    assert error.remedies
    assert all(remedy.peak_bytes <= 4.0 * 2**30 for remedy in error.remedies)
    assert str(error.remedies[0]) in str(error)


def test_headroom_stays_free_and_its_end_is_offered():
    cluster, job = Cluster.parse("4xH100"), Job(global_batch=8, seq_len=2048)
    full = autoplan(SPEC, cluster, job, headroom_frac=0.0)
    usable = full.estimate.usable_bytes
    kept = 1.0 - 0.8 * full.estimate.peak_bytes / usable
    plan = autoplan(SPEC, cluster, job, headroom_frac=kept)
    assert plan.estimate.peak_bytes <= (1.0 - kept) * usable < full.estimate.peak_bytes
    assert plan.estimate.usable_bytes == usable
    assert plan.estimate.step_s >= full.estimate.step_s
    assert "headroom" in plan.assumptions[0]
    assert not any("headroom" in text for text in full.assumptions)
    with pytest.raises(NoPlanError) as caught:
        autoplan(SPEC, cluster, job, headroom_frac=0.99)
    assert caught.value.remedies[0].change == "use --headroom 0"
    assert "after a headroom of 99.0 %" in str(caught.value)


def test_a_proof_says_that_tp_stays_inside_the_fast_domain():
    cluster, job = Cluster.parse("2xH100*2"), Job(global_batch=8, seq_len=2048)
    assert "searched with tp <= 2" in autoplan(SPEC, cluster, job).assumptions[0]
    assert not any("searched with" in text for text in autoplan(SPEC, cluster, job, fix="tp=1").assumptions)
    assert not any("searched with" in text for text in autoplan(SPEC, Cluster.parse("2xH100"), job).assumptions)


def test_default_headroom_is_of_accelerators():
    assert problem().with_headroom(None).headroom_frac == 0.05
    assert problem("local-cpu:2", precision="fp32").with_headroom(None).headroom_frac == 0.0
    assert problem().with_headroom(0.0).headroom_frac == 0.0
    for wrong in (1.0, -0.1, float("nan")):
        with pytest.raises(InputError, match="headroom"):
            problem().with_headroom(wrong)


def test_fewest_nodes_are_the_fewest():
    posed, free = problem("1xH100", memory_gib=6.0), parse_restrictions("")
    remedy = fewest_nodes(posed, free)
    nodes = int(remedy.change.split()[1])
    assert nodes > 1
    fewer = replace(posed, cluster=replace(posed.cluster, pools=(replace(posed.cluster.pool, num_nodes=nodes - 1),)))
    assert any_that_fits(fewer, free) is None


def test_layouts_name_every_layer_once():
    found = dict(layouts(problem().graph))
    assert found["model.layers.*.self_attn.q_proj"] == "column"
    assert found["model.layers.*.mlp.down_proj"] == "row"
    assert not any(part.isdigit() for pattern in found for part in pattern.split("."))


def test_assumptions_reach_the_plan():
    plan = autoplan(SPEC, "4xH100", Job(global_batch=8, seq_len=2048))
    assert any("H100 taken as" in text for text in plan.assumptions)
