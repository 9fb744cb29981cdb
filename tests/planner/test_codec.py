"""Plan files: canonical, lossless, strict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from costmodel.errors import InputError
from planner.codec import load_plan, plan_from_json, plan_to_json, save_plan
from planner.plan import FORMAT_VERSION, Plan
from tests.planner import samples

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def edited(path: str, value: object) -> str:
    """The sample plan's text with one field set (or removed when value is ...)."""
    document = json.loads(plan_to_json(samples.plan()))
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = document
    for part in parents:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(document)


def test_round_trip_is_lossless_and_canonical():
    plan = samples.plan()
    text = plan_to_json(plan)
    assert plan_from_json(text) == plan
    assert plan_to_json(plan_from_json(text)) == text
    assert text.endswith("}\n")


def test_awkward_floats_survive():
    plan = samples.plan()
    estimate = replace(plan.estimate, step_s=0.1 + 0.2, tokens_per_s=1e-300, host_bytes_per_node=3)
    plan = replace(plan, estimate=estimate, model="Größe 模型")
    text = plan_to_json(plan)
    assert plan_from_json(text) == plan
    assert '"host_bytes_per_node": 3.0' in text


def test_golden_file_is_what_this_release_writes():
    assert (GOLDEN / "plan.json").read_text() == plan_to_json(samples.plan())


def test_the_same_bytes_in_every_process():
    script = "from tests.planner import samples; from planner.codec import plan_to_json; print(plan_to_json(samples.plan()), end='')"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=GOLDEN.parents[1],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1", "4711")
    }
    assert outputs == {plan_to_json(samples.plan())}


def test_save_and_load(tmp_path):
    plan, path = samples.plan(), tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan == load_plan(path)
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    save_plan(samples.plan(), path)
    before = path.read_text()

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("planner.codec.os.replace", fails)
    with pytest.raises(InputError, match="No space left"):
        save_plan(replace(samples.plan(), model="other"), path)
    assert path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_newer_version_is_refused_with_the_one_understood():
    with pytest.raises(InputError) as caught:
        plan_from_json(edited("format_version", FORMAT_VERSION + 1), "p.json")
    assert caught.value.where == "p.json: format_version"
    assert str(FORMAT_VERSION) in caught.value.what


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        ("strategy.mesh.tp", ..., "strategy.mesh.tp"),
        ("strategy.mesh.tp", "8", "strategy.mesh.tp"),
        ("strategy.mesh.tp", 2.0, "strategy.mesh.tp"),
        ("strategy.mesh.tp", True, "strategy.mesh.tp"),
        ("strategy.mesh.tp", 4, "strategy.mesh"),
        ("strategy.mesh.ep", 3, "strategy.mesh.ep"),
        ("strategy.mesh.pp", 0, "strategy.mesh.pp"),
        ("strategy.mesh.tpp", 1, "strategy.mesh.tpp"),
        ("strategy.micro_batch", 0, "strategy.micro_batch"),
        ("strategy.micro_batch", 3, "strategy.micro_batch"),
        ("strategy.schedule", "zigzag", "strategy.schedule"),
        ("strategy.schedule", "none", "strategy.schedule"),
        ("strategy.vpp", 2, "strategy.vpp"),
        ("strategy.stage_layers", [1, 1], "strategy.stage_layers"),
        ("strategy.recompute", None, "strategy.recompute"),
        ("job.global_batch", -1, "job.global_batch"),
        ("job.precision", "bf17", "job.precision"),
        ("estimate", [], "estimate"),
        ("estimate.step_s", "fast", "estimate.step_s"),
        ("estimate.step_s", None, "estimate.step_s"),
        ("estimate.time.0.name", "luck", "estimate.time"),
        ("estimate.stages.1.classes.0.amount", {}, "estimate.stages[1].classes[0].amount"),
        ("estimate.stages.0.classes.0.name", "air", "estimate.stages[0].classes"),
        ("cluster.pools", [], "cluster.pools"),
        ("cluster.pools.0.num_nodes", 0, "cluster.pools[0].num_nodes"),
        ("cluster.pools.0.device.memory_bytes", 0, "cluster.pools[0].device.memory_bytes"),
        ("cluster.pools.0.device.peak_flops", [["bf16"]], "cluster.pools[0].device.peak_flops[0]"),
        ("cluster.pools.0.device.peak_flops", [["bf99", 1.0]], "cluster.pools[0].device.peak_flops"),
        ("stages", [], "stages"),
        ("stages.1.stage_index", 0, "stages[1].stage_index"),
        ("stages.1.rank_index", 0, "stages[1].rank_index"),
        ("stages.1.layer_paths", ["layers.0"], "stages"),
        ("proof", None, "proof"),
        ("format", "other", "format"),
        ("format_version", "1", "format_version"),
        ("format_version", 0, "format_version"),
        ("assumptions", "none", "assumptions"),
        ("assumptions", [1], "assumptions[0]"),
    ],
)
def test_the_first_fault_is_named_with_its_place(path, value, place):
    with pytest.raises(InputError) as caught:
        plan_from_json(edited(path, value), "p.json")
    assert caught.value.where == f"p.json: {place}"
    assert caught.value.remedy
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "not json",
        "[]",
        "null",
        '{"format": "autoplan/plan", "format": "autoplan/plan"}',
        '{"format": NaN}',
        '{"format": -Infinity}',
        plan_to_json(samples.plan())[:-40],
        edited("estimate.step_s", 0).replace('"step_s": 0', '"step_s": 1e999'),
        "[" * 100_000,
        '{"format_version": ' + "9" * 5000 + "}",
    ],
)
def test_malformed_text_is_an_input_error(text):
    with pytest.raises(InputError) as caught:
        plan_from_json(text, "p.json")
    assert caught.value.where.startswith("p.json")
    assert caught.value.remedy


def test_unreadable_files(tmp_path):
    binary = tmp_path / "plan.json"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.json", tmp_path, binary):
        with pytest.raises(InputError) as caught:
            load_plan(path)
        assert caught.value.where == str(path)
    with pytest.raises(InputError):
        save_plan(samples.plan(), tmp_path / "absent" / "plan.json")


def test_a_near_miss_is_suggested():
    with pytest.raises(InputError, match="did you mean 'micro_batch'"):
        plan_from_json(edited("strategy.micro_bath", 1))
