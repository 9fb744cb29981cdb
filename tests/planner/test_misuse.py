"""The Python API and the streams under misuse: a typed error with its place, or a plain answer; never a traceback."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from costmodel.errors import InputError
from planner import Job, Mesh, Plan, Strategy, autoplan, cli, estimate
from tests.planner import samples

JOB = Job(global_batch=8, seq_len=128)
PLAIN = Strategy(mesh=Mesh(dp_replicate=2))
CALL = {"model": "gpt2", "cluster": "2xH100", "job": JOB, "strategy": PLAIN, "engine": "torch"}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in CALL for value in (None, 3, dict, object())] + [("model", ""), ("model", "a\0b"), ("engine", "warp")],
)
def test_wrong_types_are_named(name, value):
    with pytest.raises(InputError) as caught:
        estimate(**{**CALL, name: value})
    assert name in caught.value.where
    assert caught.value.remedy


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch": 1.5}, {"micro_batch": "2"}, {"micro_batch": True}, {"micro_batch": 0}, {"vpp": None}, {"zero_stage": True}, {"zero_stage": 3.0},
        {"stage_layers": [6, 6]}, {"stage_layers": (6.0, 6)}, {"recompute": "first_k"}, {"recompute_layers": 5},
        {"recompute": "first_k", "recompute_layers": -1}, {"sequence_parallel": "yes"}, {"compile": 1}, {"cp_kind": None},
    ],
)  # fmt: skip
def test_a_strategy_of_the_wrong_kind_is_refused(changes):
    with pytest.raises(InputError, match="Strategy"):
        replace(PLAIN, **changes)


@pytest.mark.parametrize("size", [8.0, "8", True, None])
def test_a_mesh_counts_in_whole_numbers(size):
    with pytest.raises(InputError, match=r"Mesh\.tp"):
        Mesh(tp=size)


@pytest.mark.parametrize(
    "changes", [{"global_batch": 10**25}, {"seq_len": 10**25}, {"dropout": "0"}, {"dropout": None}, {"global_batch": True}]
)
def test_a_job_no_search_could_hold_is_refused(changes):
    with pytest.raises(InputError, match="Job"):
        replace(JOB, **changes)


@pytest.mark.parametrize(
    "options",
    [{"fix": 3}, {"fix": {3: 8}}, {"fix": ","}, {"top_k": 0}, {"top_k": 1.5}, {"time_limit_s": -1}, {"time_limit_s": float("nan")}],
)  # fmt: skip
def test_options_of_the_search(options):
    with pytest.raises(InputError):
        autoplan("gpt2", "2xH100", JOB, **options)


@pytest.mark.parametrize("path", ["", "a\0b", None, 3.5])
def test_paths_that_are_none(path):
    with pytest.raises(InputError):
        Plan.load(path)
    with pytest.raises(InputError):
        samples.plan().save(path)


def test_a_plan_exports_itself():
    plan = samples.plan()
    with pytest.raises(InputError, match="bogus"):
        plan.export("bogus")


class Full(io.StringIO):
    """A stream on a full disk."""

    def write(self, text):
        raise OSError(28, "No space left on device")


class Left(io.StringIO):
    """A pipe whose reader left."""

    def write(self, text):
        raise BrokenPipeError


def test_a_full_disk_is_no_bug(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", Full())
    assert cli.main(["models"]) == 2
    assert "stdout: cannot write the answer (No space left on device)" in capsys.readouterr().err


@pytest.mark.parametrize("stream", [Left, lambda: None])
def test_nobody_listens(monkeypatch, capsys, stream):
    monkeypatch.setattr(sys, "stdout", stream())
    assert cli.main(["models"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments", [["estimate"], ["plan"], ["plan", "--json"]])
def test_an_ascii_terminal(monkeypatch, tmp_path, arguments):
    folder = tmp_path / "mödel"
    folder.mkdir()
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 256, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert cli.main([*arguments, str(folder), "1xH100", "--seq-len", "128", "--global-batch", "4"]) == 0
    text = raw.getvalue().decode("ascii")
    if "--json" in arguments:
        assert json.loads(text)["model"] == "mödel"
    else:
        assert "####" in text


def test_an_empty_output_path_is_refused():
    assert cli.main(["estimate", "gpt2", "1xH100", "--seq-len", "128", "--global-batch", "4", "-o", ""]) == 2


def test_a_reader_that_leaves_early():
    root = Path(__file__).resolve().parents[2]
    command = f"{sys.executable} -m planner models --json | head -c 1 > /dev/null; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], cwd=root, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
