"""Pricing end to end, and every refusal with its place and numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.clusters import parse_cluster
from costmodel.engine import engine
from costmodel.errors import InputError
from costmodel.hardware import Cluster
from planner.job import Job
from planner.lower import LoweringCache
from planner.models.resolve import resolve, spec_graph
from planner.pricing import estimate_graph
from planner.strategy import Strategy
from planner.validity import problems
from tests.planner.graphs import MEGATRON, TORCH, gpt, job, strategy

LLAMA = spec_graph(resolve("llama3-8b"), sequence=4096)
NODE = parse_cluster("8xH100")
LLAMA_JOB = Job(global_batch=64, seq_len=4096)


def _estimate(plan: Strategy, name: str = "megatron", cluster: Cluster = NODE, task: Job = LLAMA_JOB):
    return estimate_graph(LLAMA, cluster, task, plan, engine(name))


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("megatron", strategy(dp=8, zero_stage=1)),
        ("megatron", strategy(tp=8, sequence_parallel=True)),
        ("megatron", strategy(tp=2, pp=4)),
        ("megatron", strategy(tp=2, pp=2, cp=2, sequence_parallel=True)),
        ("megatron", strategy(pp=4, vpp=2, dp=2, schedule="interleaved_1f1b", recompute="first_k", recompute_layers=2)),
        ("torchtitan", strategy(dp=8, zero_stage=3, recompute="selective")),
        ("torchtitan", strategy(dp=4, tp=2, zero_stage=3, sequence_parallel=True, compile=True)),
        ("torchtitan", strategy(cp=4, dp=2, zero_stage=3, cp_kind="all_to_all")),
        ("torchtitan", strategy(dp=8, zero_stage=3, flash_attention=False, recompute="full")),
    ],
)
def test_lines_add_up(name: str, plan: Strategy):
    estimate = _estimate(plan, name)
    assert sum(line.amount for line in estimate.time) == pytest.approx(estimate.step_s)
    assert 0.0 < estimate.mfu_frac < 1.0
    assert all(stage.peak_bytes >= sum(line.amount for line in stage.classes) * 0.5 for stage in estimate.stages)


SPLIT = [("zb_h1", 1), ("zb_h1", 2), ("zb_h2", 1), ("zbv", 2), ("v_half", 2), ("v_min", 2), ("dualpipev", 2)]


@pytest.mark.parametrize(("schedule", "vpp"), [*SPLIT, ("breadth_first", 2), ("breadth_first", 4)])
@pytest.mark.parametrize("tp", [1, 2])
def test_lines_add_up_under_every_schedule(schedule: str, vpp: int, tp: int):
    """The sum of the lines is the simulated step, whatever mix of B and I + W the critical rank runs; kernels do the same work as under 1F1B."""
    plan = strategy(pp=4, dp=2 // tp, tp=tp, vpp=vpp, schedule=schedule, zero_stage=0)
    estimate, base = _estimate(plan, "torchtitan"), _estimate(strategy(pp=4, dp=2 // tp, tp=tp, schedule="1f1b"), "torchtitan")
    assert sum(line.amount for line in estimate.time) == pytest.approx(estimate.step_s)
    assert estimate.hfu_frac * estimate.step_s == pytest.approx(base.hfu_frac * base.step_s)
    assert all(line.amount >= 0.0 for line in estimate.time)
    assert len(estimate.stages) == 4


def test_schedules_trade_bubble_for_memory():
    """Under Megatron's kernels: ZB-H1 is faster than 1F1B, V-Half and V-Min hold less than ZB-V, in this order."""
    runtime = replace(MEGATRON, schedules=("1f1b", *dict(SPLIT)))
    plans = {name: strategy(pp=8, vpp=vpp, schedule=name) for name, vpp in (("1f1b", 1), *SPLIT)}
    found = {name: estimate_graph(LLAMA, NODE, replace(LLAMA_JOB, global_batch=32), plan, runtime) for name, plan in plans.items()}
    bubbles = {name: next(line.amount for line in estimate.time if line.name == "bubble") for name, estimate in found.items()}
    assert bubbles["zb_h1"] < 0.8 * bubbles["1f1b"]

    def activations(name: str) -> float:
        return max(line.amount for stage in found[name].stages for line in stage.classes if line.name == "activations")

    assert activations("v_min") < activations("v_half") < activations("zbv") < activations("zb_h2")
    assert activations("v_half") < 0.8 * activations("1f1b")


def test_a_tied_embedding_of_a_v_is_one_copy():
    graph = replace(GPT, tied=(("wte.weight", "lm_head.weight"),)) if not GPT.tied else GPT
    runtime = replace(MEGATRON, schedules=("interleaved_1f1b", "zbv"))
    plans = [strategy(pp=2, dp=4, vpp=2, schedule=name) for name in ("interleaved_1f1b", "zbv")]
    found = [estimate_graph(graph, EIGHT, job(global_batch=16), plan, runtime) for plan in plans]
    weights = [sum(line.amount for stage in one.stages for line in stage.classes if line.name == "parameters") for one in found]
    assert weights[1] <= weights[0]


def test_recompute_trades_time_for_memory():
    plans = {policy: _estimate(strategy(dp=8, zero_stage=3, recompute=policy), "torchtitan") for policy in ("none", "selective", "full")}
    assert plans["none"].step_s < plans["selective"].step_s < plans["full"].step_s
    assert plans["none"].peak_bytes > plans["selective"].peak_bytes > plans["full"].peak_bytes


def test_fusion_saves_time_and_memory():
    eager, fused = (_estimate(strategy(dp=8, zero_stage=3, compile=on), "torchtitan") for on in (False, True))
    assert fused.step_s < eager.step_s
    assert fused.peak_bytes < eager.peak_bytes


def test_full_recompute_is_seen_in_the_hardware_flops():
    none, full = (_estimate(strategy(dp=8, zero_stage=3, recompute=policy), "torchtitan") for policy in ("none", "full"))
    gained = (full.hfu_frac * full.step_s) / (none.hfu_frac * none.step_s)
    assert 1.30 < gained < 1.34


def test_a_warm_cache_answers_the_same():
    cache = LoweringCache()
    plan = strategy(tp=2, pp=4)
    cold = estimate_graph(LLAMA, NODE, LLAMA_JOB, plan, MEGATRON, cache)
    assert estimate_graph(LLAMA, NODE, LLAMA_JOB, plan, MEGATRON, cache) == cold == _estimate(plan)


GPT = gpt(layers=6)
EIGHT = parse_cluster("8xA100")
MOE = replace(GPT, num_experts=4, top_k=2)
REFUSALS = [
    (GPT, strategy(pp=2, dp=4, schedule="zb_h1", recompute="full"), engine("torchtitan"), job(), "Strategy.recompute", "splits backward"),
    (GPT, strategy(pp=2, dp=4, schedule="zb_h1", compile=True), engine("torchtitan"), job(), "Strategy.compile", "compiled stages"),
    (GPT, strategy(pp=2, dp=4, schedule="zb_h1"), engine("torch"), job(), "Strategy.schedule", "torch cannot run schedule zb_h1"),
    (GPT, strategy(dp=4), MEGATRON, job(), "Strategy.mesh", "= 4 devices, but"),
    (GPT, strategy(dp=8, micro_batch=3), MEGATRON, job(), "Strategy.micro_batch", "global batch 16"),
    (GPT, strategy(dp=8), MEGATRON, job(precision="fp8"), "Job.precision", "no fp8"),
    (GPT, strategy(dp=8, zero_stage=3), MEGATRON, job(), "Strategy.zero_stage", "megatron cannot run zero_stage 3"),
    (GPT, strategy(pp=2, dp=4, schedule="gpipe"), MEGATRON, job(), "Strategy.schedule", "gpipe"),
    (GPT, strategy(dp=8, recompute="first_k", recompute_layers=1), TORCH, job(), "Strategy.recompute", "first_k"),
    (GPT, strategy(cp=8), engine("torch"), job(), "Strategy.mesh.cp", "cp 8"),
    (MOE, strategy(dp=8, ep=4), engine("torch"), job(), "Strategy.mesh.ep", "ep 4"),
    (replace(GPT, num_heads=12), strategy(tp=8), MEGATRON, job(), "Strategy.mesh.tp", "12 heads"),
    (replace(GPT, num_kv_heads=3), strategy(tp=8), MEGATRON, job(), "Strategy.mesh.tp", "3 key/value heads"),
    (gpt(vocab=100), strategy(tp=8), MEGATRON, job(), "Strategy.mesh.tp", "100 vocabulary entries.*104"),
    (gpt(sequence=12), strategy(tp=8, sequence_parallel=True), MEGATRON, job(), "Strategy.sequence_parallel", "sequence 12"),
    (GPT, strategy(dp=8, sequence_parallel=True), MEGATRON, job(), "Strategy.sequence_parallel", "needs tp > 1"),
    (gpt(sequence=24), strategy(cp=8), MEGATRON, job(), "Strategy.mesh.cp", "2 x cp 8"),
    (GPT, strategy(cp=8, flash_attention=False), MEGATRON, job(), "Strategy.flash_attention", "flash attention"),
    (replace(GPT, num_heads=4), strategy(cp=8, cp_kind="all_to_all"), MEGATRON, job(), "Strategy.cp_kind", "4 heads"),
    (GPT, strategy(dp=8, ep=2), MEGATRON, job(), "Strategy.mesh.ep", "no experts"),
    (MOE, strategy(dp=8, ep=8), MEGATRON, job(), "Strategy.mesh.ep", "4 experts"),
    (replace(MOE, num_experts=6), strategy(dp=8, ep=3), MEGATRON, job(), "Strategy.mesh.ep", "= 8"),
    (MOE, strategy(dp=4, tp=2, ep=4), MEGATRON, job(), "Strategy.sequence_parallel", "needs sequence parallelism"),
    (GPT, strategy(tp=8, zero_stage=1), MEGATRON, job(), "Strategy.zero_stage", "1 rank"),
    (GPT, strategy(dp=8, schedule="1f1b"), MEGATRON, job(), "Strategy.schedule", "pp 1"),
    (GPT, strategy(pp=8, schedule="none"), MEGATRON, job(), "Strategy.schedule", "pp 8"),
    (GPT, strategy(pp=2, dp=4, vpp=2), MEGATRON, job(), "Strategy.vpp", "2 chunks"),
    (GPT, strategy(pp=8), MEGATRON, job(), "Strategy.mesh.pp", "6 layers"),
    (GPT, strategy(pp=2, dp=4, vpp=2, micro_batch=4, schedule="interleaved_1f1b"), MEGATRON, job(), "Strategy.schedule", "1 micro-batches"),
]  # fmt: skip


@pytest.mark.parametrize(("graph", "plan", "runtime", "task", "where", "text"), REFUSALS)
def test_refusals_name_the_field_and_the_numbers(graph, plan, runtime, task, where, text):
    with pytest.raises(InputError, match=text) as refusal:
        estimate_graph(graph, EIGHT, task, plan, runtime)
    assert refusal.value.where == where
    assert refusal.value.remedy
    assert len(list(problems(graph, EIGHT, task, plan, runtime))) >= 1
