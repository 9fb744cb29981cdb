"""What the runtime cannot do is an error with a place and a remedy, before anything starts."""

from __future__ import annotations

import dataclasses

import pytest

from costmodel.errors import InputError
from runtime.check import check_runnable
from tests.runtime.plans import make_plan


def changed(plan, **fields):
    strategy = {name: value for name, value in fields.items() if hasattr(plan.strategy, name)}
    rest = {name: value for name, value in fields.items() if name not in strategy}
    return dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, **strategy), **rest)


PIPELINE = {"mesh": {"pp": 2}, "schedule": "1f1b", "micro_batch": 2}

REFUSED = {
    "cp": (make_plan(mesh={"cp": 2}), "Plan.strategy.mesh.cp"),
    "ep": (make_plan(mesh={"dp_shard": 2, "ep": 2}), "Plan.strategy.mesh.ep"),
    "zero 1": (make_plan(mesh={"dp_shard": 2}, zero_stage=1), "Plan.strategy.zero_stage"),
    "fp8": (make_plan(precision="fp8"), "Plan.job.precision"),
    "fp16": (make_plan(precision="fp16"), "Plan.job.precision"),
    "compile": (make_plan(compile=True), "Plan.strategy.compile"),
    "attention": (make_plan(flash_attention=False), "Plan.strategy.flash_attention"),
    "engine": (changed(make_plan(), engine="megatron"), "Plan.engine"),
    "version": (changed(make_plan(), format_version=99), "Plan.format_version"),
    "sp without tp": (make_plan(sequence_parallel=True), "Plan.strategy.sequence_parallel"),
    "sp, odd sequence": (make_plan(mesh={"tp": 2}, sequence_parallel=True, seq_len=17), "Plan.strategy.sequence_parallel"),
    "schedule without pp": (make_plan(schedule="1f1b"), "Plan.strategy.schedule"),
    "pp without schedule": (make_plan(mesh={"pp": 2}), "Plan.strategy.schedule"),
    "empty mesh": (make_plan(mesh={"dp_shard": 0}, num_layers=4), "Plan.strategy.mesh"),
    "too few stages": (changed(make_plan(**PIPELINE), stages=make_plan().stages), "Plan.stages"),
    "stage order": (changed(make_plan(**PIPELINE), stages=make_plan(**PIPELINE).stages[::-1]), "Plan.stages[0]"),
    "few micro-batches": (make_plan(mesh={"pp": 4}, schedule="1f1b", micro_batch=4), "Plan.strategy.schedule"),
    "vpp on 1f1b": (make_plan(mesh={"pp": 2}, schedule="1f1b", vpp=2), "Plan.strategy.schedule"),
    "no vpp on interleaved": (make_plan(mesh={"pp": 2}, schedule="interleaved_1f1b"), "Plan.strategy.schedule"),
    "rounds": (make_plan(mesh={"pp": 2}, schedule="interleaved_1f1b", vpp=2, global_batch=5), "Plan.strategy.schedule"),
    "batch": (make_plan(mesh={"dp_shard": 3}), "Strategy.micro_batch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_place_and_remedy(name):
    plan, where = REFUSED[name]
    with pytest.raises(InputError) as caught:
        check_runnable(plan)
    assert caught.value.where == where
    assert caught.value.remedy


def test_runnable_plans_pass():
    for plan in (make_plan(), make_plan(**PIPELINE), make_plan(mesh={"dp_replicate": 2, "dp_shard": 2}, zero_stage=3)):
        check_runnable(plan)
