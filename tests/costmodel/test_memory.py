"""Memory: classes by arithmetic, peaks by order."""

from __future__ import annotations

import pytest

from costmodel.engine import engine
from costmodel.estimate import MEMORY_CLASSES, StageMemory
from costmodel.mesh import Mesh
from costmodel.simulate import estimate_step
from tests.costmodel.steps import CPU, cluster, llama

SMALL = {"layers": 8, "hidden": 1024, "ffn": 4096, "heads": 8, "kv_heads": 8, "vocab": 8192, "sequence": 1024}
ELEMENTS = 8 * (4 * 1024 * 1024 + 3 * 1024 * 4096 + 2 * 1024) + 2 * 8192 * 1024


def classes(stage: StageMemory) -> dict[str, float]:
    return {line.name: line.amount for line in stage.classes}


@pytest.mark.parametrize(("zero", "parameters", "gradients", "states"), [(0, 1, 1, 1), (1, 1, 1, 8), (2, 1, 8, 8), (3, 8, 8, 8)])
def test_zero_stages_shard_what_they_say(zero: int, parameters: int, gradients: int, states: int) -> None:
    step = llama(mesh=Mesh(dp_shard=8), zero_stage=zero, num_micro_batches=2, parameter_dtype="bf16", **SMALL)
    (stage,) = estimate_step(step, cluster(), engine("megatron")).stages
    held = classes(stage)
    assert tuple(held) == MEMORY_CLASSES
    assert held["parameters"] == pytest.approx(2 * ELEMENTS / parameters)
    assert held["optimizer_state"] == pytest.approx(12 * ELEMENTS / states)
    assert held["gradients"] >= 4 * ELEMENTS / gradients * 0.999


def test_megatron_without_sharding_is_18_bytes_per_parameter() -> None:
    step = llama(mesh=Mesh(), zero_stage=1, num_micro_batches=2, parameter_dtype="bf16", **SMALL)
    held = classes(estimate_step(step, cluster(), engine("megatron")).stages[0])
    assert held["parameters"] + held["gradients"] + held["optimizer_state"] == pytest.approx(18 * ELEMENTS)


def test_early_1f1b_ranks_hold_more_micro_batches() -> None:
    step = llama(mesh=Mesh(pp=4, dp_shard=2), zero_stage=1, schedule="1f1b", num_micro_batches=16, **SMALL)
    stages = estimate_step(step, cluster(), engine("megatron")).stages
    assert [stage.in_flight for stage in stages] == [4.0, 3.0, 2.0, 1.0]
    held = [classes(stage)["activations"] for stage in stages]
    assert held[0] > held[1] > held[2]


def test_classes_add_up_to_the_step_peak_and_none_is_negative() -> None:
    for zero in (0, 2, 3):
        for stage in estimate_step(llama(mesh=Mesh(dp_shard=8), zero_stage=zero, **SMALL), cluster(), engine("torch")).stages:
            assert sum(line.amount for line in stage.classes) == pytest.approx(stage.step_peak_bytes)
            assert all(line.amount >= 0.0 for line in stage.classes)
            assert stage.init_peak_bytes <= stage.optimizer_peak_bytes


def test_a_cpu_rank_counts_tensors_only() -> None:
    step = llama(mesh=Mesh(dp_shard=2), **SMALL)
    held = classes(estimate_step(step, cluster(CPU, per_node=2), engine("torch")).stages[0])
    assert held["framework"] == held["communicators"] == held["reserve"] == 0.0
