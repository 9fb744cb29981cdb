"""A plan file and a model's name become trained steps and a report, through torchrun."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from costmodel.errors import InputError
from costmodel.hardware import Cluster
from planner import codec
from runtime.launch import main, run_local
from runtime.target import load_target
from tests.runtime.plans import GPT_LAYOUTS, make_plan

pytestmark = pytest.mark.dist


def write(plan, path):
    codec.save_plan(plan, path)
    return path


def test_run_local_trains_and_reports(tmp_path, capfd):
    plan = make_plan(layouts=GPT_LAYOUTS, mesh={"pp": 2, "tp": 2}, schedule="1f1b", micro_batch=2, seq_len=32)
    path = write(plan, tmp_path / "plan.json")
    report = run_local(path, "examples.gpt:build_model", steps=4)
    out = capfd.readouterr().out
    assert "predicted" in out
    assert "step    4" in out
    assert report.losses[-1] < report.losses[0]
    assert [rank.pipeline_index for rank in report.ranks] == [0, 0, 1, 1]
    assert min(rank.measured_peak_bytes for rank in report.ranks) > 1e5
    assert report.measured_step_s > 0
    assert json.loads((tmp_path / "plan.measured.json").read_text())["num_steps"] == 4


def test_refused_before_anything_starts(tmp_path):
    path = write(make_plan(mesh={"cp": 2}), tmp_path / "plan.json")
    with pytest.raises(InputError, match="context parallel"):
        run_local(path, "examples.gpt:build_model")


def test_a_plan_for_gpus_starts_no_cpu_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    plan = replace(make_plan(mesh={"dp_replicate": 2}), cluster=Cluster.parse("2xH100"))
    with pytest.raises(InputError, match="this machine has no GPU"):
        run_local(write(plan, tmp_path / "plan.json"), "examples.gpt:build_model")


def test_what_ranks_refuse_comes_back_typed(tmp_path):
    path = write(make_plan(num_layers=7, mesh={"dp_replicate": 2}), tmp_path / "plan.json")
    with pytest.raises(InputError, match=r"names 3 blocks that GPT does not have, first 'blocks.4'") as caught:
        run_local(path, "examples.gpt:build_model", quiet=True)
    assert caught.value.remedy


BROKEN = {
    "raises": (
        "def build_model():\n    raise KeyError('no checkpoint')\n",
        r"target_raises.py:2: rank 0 failed with KeyError: 'no checkpoint'",
    ),
    "loss": (
        "from examples.gpt import build_model\ndef loss_fn(output, batch):\n    return output.sum(-1)\n",
        r"loss_fn gave a tensor of shape",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_target_is_named(tmp_path, monkeypatch, name):
    source, message = BROKEN[name]
    (tmp_path / f"target_{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    path = write(make_plan(seq_len=32), tmp_path / "plan.json")
    with pytest.raises(InputError, match=message):
        run_local(path, f"target_{name}:build_model", steps=2, quiet=True)


def test_the_report_must_be_writable(tmp_path):
    path = write(make_plan(), tmp_path / "plan.json")
    with pytest.raises(InputError, match="cannot write the report"):
        run_local(path, "examples.gpt:build_model", report=tmp_path / "missing" / "report.json")


@pytest.mark.parametrize("name", ["examples.gpt", "no.such:thing", "examples.gpt:nothing", ":build_model"])
def test_bad_targets(name):
    with pytest.raises(InputError) as caught:
        load_target(name)
    assert caught.value.remedy


def test_needs_a_launcher(monkeypatch, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as caught:
        main([str(tmp_path / "plan.json"), "examples.gpt:build_model"])
    assert caught.value.code == 2


def test_losses_do_not_depend_on_the_plan(pool):
    plans = [{"mesh": {"dp_replicate": 2}}, {"mesh": {"tp": 2}}, {"mesh": {"pp": 2}, "schedule": "gpipe"}]
    runs = [pool.run("tests.runtime.cases:train_target", ranks=2, plan=plan)[0] for plan in plans]
    for losses in runs[1:]:
        assert losses == pytest.approx(runs[0], rel=1e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_8bit"])
def test_other_optimizers_train_on_parts(pool, optimizer):
    losses = pool.run(
        "tests.runtime.cases:train_target", ranks=4, plan={"mesh": {"dp_shard": 2, "tp": 2}, "zero_stage": 3, "optimizer": optimizer}
    )
    assert losses[0][-1] < losses[0][0]


BF16 = {
    "ddp": {"mesh": {"dp_replicate": 2}},
    "zero 2": {"mesh": {"dp_shard": 2}, "zero_stage": 2},
    "zero 3": {"mesh": {"dp_shard": 2}, "zero_stage": 3},
    "tp": {"mesh": {"tp": 2}},
    "tp, sp": {"mesh": {"tp": 2}, "sequence_parallel": True},
    "pp": {"mesh": {"pp": 2}, "schedule": "1f1b", "micro_batch": 2},
}


@pytest.mark.parametrize("name", BF16)
def test_bf16(pool, name):
    exact = pool.run("tests.runtime.cases:train_target", ranks=2, plan=BF16[name])[0]
    half = pool.run("tests.runtime.cases:train_target", ranks=2, plan={**BF16[name], "precision": "bf16"})[0]
    assert half == pytest.approx(exact, rel=5e-3)
    assert half != exact
