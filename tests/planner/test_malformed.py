"""Malformed input of every kind: always a typed error with its place and what to change, exit code 2, never a traceback."""

from __future__ import annotations

import json

import pytest

from planner import cli
from planner.codec import plan_to_json
from tests.planner import samples

JOB = ["--seq-len", "1024", "--global-batch", "32"]
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
CLUSTERS = [
    "", " ", "8x", "xH100", "8xB999", "0xH100", "-8xH100", "8xH100*0", "8xH100*two", "8xH100**2", "8xH100++8xA100", "p5.48xlarge*-1",
    "no-such-file.yaml", "8.5xH100", "local:none", "999999999xH100", "8xH100+8xA100",
]  # fmt: skip
FLAGS = [
    ["plan"],
    ["plan", "gpt2"],
    ["plan", "gpt2", "4xH100"],
    ["plan", "gpt2", "4xH100", "--seq-len", "1024"],
    ["plan", "gpt2", "4xH100", "--seq-len", "0", "--global-batch", "32"],
    ["plan", "gpt2", "4xH100", "--seq-len", "-5", "--global-batch", "32"],
    ["plan", "gpt2", "4xH100", "--seq-len", "1e3", "--global-batch", "32"],
    ["plan", "gpt2", "4xH100", "--seq-len", "1024", "--global-batch", "many"],
    ["plan", "gpt2", "4xH100", "--seq-len", "99999", "--global-batch", "32"],
    ["plan", "gpt2", "4xH100", *JOB, "--precision", "fp7"],
    ["plan", "gpt2", "4xH100", *JOB, "--optimizer", "adam8"],
    ["plan", "gpt2", "4xH100", *JOB, "--engine", "warp"],
    ["plan", "gpt2", "4xH100", *JOB, "--dropout", "1.5"],
    ["plan", "gpt2", "4xH100", *JOB, "--time-limit", "0"],
    ["plan", "gpt2", "4xH100", *JOB, "--time-limit", "inf"],
    ["plan", "gpt2", "4xH100", *JOB, "--top-k", "0"],
    ["plan", "gpt2", "4xH100", *JOB, "--fix", "tp"],
    ["plan", "gpt2", "4xH100", *JOB, "--fix", "tp=x"],
    ["plan", "gpt2", "4xH100", *JOB, "--fix", "warp=9"],
    ["plan", "gpt2", "4xH100", *JOB, "--fix", "recompute=everything"],
    ["plan", "gpt2", "4xH100", *JOB, "--unknown"],
    ["plan", "gpt2", "4xH100", *JOB, "-o", "no-such-folder/plan.json"],
    ["estimate", "gpt2", "4xH100", *JOB, "--tp", "3"],
    ["estimate", "gpt2", "4xH100", *JOB, "--tp", "8"],
    ["estimate", "gpt2", "5xH100", *JOB, "--tp", "5"],
    ["estimate", "gpt2", "4xH100", *JOB, "--zero", "4"],
    ["estimate", "gpt2", "4xH100", *JOB, "--zero", "1"],
    ["estimate", "gpt2", "4xH100", *JOB, "--micro-batch", "7"],
    ["estimate", "gpt2", "4xH100", *JOB, "--dp", "4", "--dp-replicate", "3"],
    ["estimate", "gpt2", "4xH100", *JOB, "--recompute", "first_k"],
    ["estimate", "gpt2", "4xH100", *JOB, "--recompute-layers", "2"],
    ["estimate", "gpt2", "4xH100", *JOB, "--pp", "2", "--stage-layers", "5,5"],
    ["estimate", "gpt2", "4xH100", *JOB, "--pp", "2", "--stage-layers", "6;6"],
    ["estimate", "gpt2", "4xH100", *JOB, "--pp", "2", "--schedule", "none"],
    ["estimate", "gpt2", "4xH100", *JOB, "--vpp", "2"],
    ["estimate", "gpt2", "4xH100", *JOB, "--ep", "2"],
    ["estimate", "gpt2", "4xH100", *JOB, "--cp", "2"],
    ["estimate", "gpt2", "4xH100", *JOB, "--sequence-parallel"],
    ["explain"],
    ["explain", "no-such-plan.json"],
    ["diff", "no-such-plan.json", "neither.json"],
    ["export", "no-such-plan.json", "--to", "torchrun"],
    ["export", "no-such-plan.json", "--to", "slurmish"],
    ["hardware", "show"],
    ["hardware", "show", "Z9000"],
    ["hardware", "list", "H100"],
    ["models", "show", "llama9"],
    ["models", "shew"],
    ["fly"],
    [],
]  # fmt: skip
MODELS = [
    "llama9-8b", "", "no-such-config.json", "no.such.module:build", "examples.gpt:no_such_function", "examples/none.py:build_model", "examples.gpt:",
    ":build_model", "json:loads", "os:getcwd",
]  # fmt: skip


@pytest.fixture
def refused(capsys):
    def call(arguments, code=2):
        assert cli.main(list(arguments)) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "Traceback" not in captured.err
        assert captured.err.startswith("error: ")
        assert "what helps: " in captured.err
        return captured.err

    return call


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_clusters(refused, cluster):
    refused(["plan", "gpt2", cluster, *JOB] if not cluster.startswith("-") else ["plan", *JOB, "--", "gpt2", cluster])


@pytest.mark.parametrize("arguments", FLAGS, ids=" ".join)
def test_flags(refused, arguments):
    refused(arguments)


@pytest.mark.parametrize("model", MODELS)
def test_models(refused, model):
    refused(["plan", model, "4xH100", *JOB])


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"model_type": "perceptron"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": 3}, ""),
        ({"num_key_value_heads": 3}, ""),
        ({"vocab_size": 1.5}, "vocab_size"),
        ({"intermediate_size": []}, "intermediate_size"),
    ],
)
def test_configs(refused, tmp_path, change, place):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **change}))
    assert place in refused(["plan", str(path), "4xH100", *JOB])


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", '{"model_type": NaN}'])
def test_config_files(refused, tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert "config.json" in refused(["plan", str(path), "4xH100", *JOB])


@pytest.mark.parametrize("text", ["", "pools: 3", "{", "a: [", "pools: [{device: H100, nodes: none}]"])
def test_cluster_files(refused, tmp_path, text):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    assert "cluster.yaml" in refused(["plan", "gpt2", str(path), *JOB])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("strategy.mesh.tp", "2"),
        ("strategy.mesh.tp", 5),
        ("format_version", 99),
        ("job.precision", "bf99"),
        ("estimate", None),
        ("strategy.micro_batch", 5),
    ],
)
@pytest.mark.parametrize("verb", ["explain", "export"])
def test_plans(refused, tmp_path, path, value, verb):
    document = json.loads(plan_to_json(samples.plan()))
    *parents, last = path.split(".")
    place = document
    for name in parents:
        place = place[name]
    place[last] = value
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(document))
    assert str(file) in refused([verb, str(file)] + (["--to", "torchrun"] if verb == "export" else []))


def test_a_cut_plan(refused, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(plan_to_json(samples.plan())[:1000])
    assert "line" in refused(["explain", str(path)])


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "llama3-70b", "2xH100", "--seq-len", "8192", "--global-batch", "8", "--fix", "recompute=none"],
        ["plan", "gpt2", "4xH100", "--seq-len", "1024", "--global-batch", "32", "--fix", "tp=3"],
    ],
)
def test_what_cannot_fit_is_infeasible(refused, arguments):
    refused(arguments, code=4)


def test_errors_are_documents_too(capsys):
    assert cli.main(["plan", "llama9", "8xH100", *JOB, "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "autoplan/error"
    assert document["what"]
    assert document["where"]
    assert document["remedy"]


def test_there_are_many():
    assert len(CLUSTERS) + len(FLAGS) + len(MODELS) >= 50
