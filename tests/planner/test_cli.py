"""The command line, run as a user would: answers on stdout, the rest on stderr, exit codes, JSON documents, nothing heavy imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from planner import cli
from planner.codec import load_plan, plan_from_json, save_plan
from tests.planner import samples

ROOT = Path(__file__).resolve().parents[2]
JOB = ("--seq-len", "1024", "--global-batch", "32")
SMALL = ("llama3.2-1b", "4xH100", *JOB)


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = cli.main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    assert cli.main(["plan", *SMALL, "-q", "-o", str(path)]) == 0
    return path


def python(*arguments, **environ):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
    )


def test_plan_prints_a_panel(run):
    code, out, err = run("plan", *SMALL)
    assert code == 0
    assert "llama3.2-1b on 4xH100" in out
    assert "optimal in the space" in out
    assert "\x1b" not in out
    assert err == ""


def test_plan_json_is_the_plan_file(run, plan_file):
    code, out, err = run("plan", *SMALL, "--json")
    assert code == 0
    assert err == ""
    assert out == plan_file.read_text()
    assert plan_from_json(out).estimate.fits


def test_the_same_file_whatever_the_hash_seed(plan_file):
    for seed in ("0", "123"):
        done = python("-m", "planner", "plan", *SMALL, "--json", PYTHONHASHSEED=seed)
        assert done.returncode == 0, done.stderr
        assert done.stdout == plan_file.read_text()


def test_planning_imports_no_torch():
    script = (
        "import sys, io, contextlib\nfrom planner.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "    code = main('plan llama3-8b 8xH100 --seq-len 8192 --global-batch 128 --json'.split())\n"
        "print(code, len(out.getvalue()) > 1000, sorted({'torch', 'transformers', 'rich'} & set(sys.modules)))"
    )
    done = python("-c", script)
    assert done.stdout.strip() == "0 True []", done.stderr


def test_fix_is_obeyed(run):
    code, out, _ = run("plan", *SMALL, "--json", "--fix", "tp=2,recompute=full")
    strategy = plan_from_json(out).strategy
    assert (code, strategy.mesh.tp, strategy.recompute) == (0, 2, "full")


def test_top_k(run):
    code, out, _ = run("plan", *SMALL, "--json", "--top-k", "6")
    plan = plan_from_json(out)
    times = [plan.estimate.step_s, *(other.step_s for other in plan.alternatives)]
    assert (code, len(times), times) == (0, 6, sorted(times))


def test_time_limit_and_require_optimal(run):
    code, out, err = run("plan", "llama3-8b", "8xH100*4", *JOB, "--time-limit", "0.000001", "--require-optimal", "--json")
    assert code == 5
    plan = plan_from_json(out)
    assert (plan.proof.status, plan.estimate.fits) == ("time limit", True)
    assert "stopped (time limit)" in err


@pytest.mark.parametrize(("text", "most"), [("25%", 0.75), ("0.5", 0.5), ("0", 1.0)])
def test_headroom(run, text, most):
    code, out, _ = run("plan", *SMALL, "--headroom", text, "--json")
    estimate = plan_from_json(out).estimate
    assert code == 0
    assert estimate.peak_bytes <= most * estimate.usable_bytes


@pytest.mark.parametrize("text", ["100%", "-5%", "much", "nan", "%"])
def test_wrong_headroom(run, text):
    code, _, err = run("plan", *SMALL, f"--headroom={text}")
    assert code == 2
    assert "--headroom" in err


def test_nothing_fits(run):
    code, out, err = run("plan", "llama3-8b", "1xA100-40GB", *JOB, "--json")
    assert code == 4
    assert json.loads(out)["exit_code"] == 4
    assert "no plan fits" in err
    assert "optimizer state" in err
    assert "--optimizer adamw_8bit" in err or "nodes instead of" in err


def test_estimate(run):
    code, out, _ = run("estimate", *SMALL, "--tp", "2", "--explain")
    assert code == 0
    assert "Time of a step" in out
    assert "Arithmetic" in out
    code, out, _ = run("estimate", *SMALL, "--tp", "2", "--json")
    document = json.loads(out)
    assert document["format"] == "autoplan/estimate"
    assert document["strategy"]["mesh"] == {"pp": 1, "dp_replicate": 2, "dp_shard": 1, "cp": 1, "tp": 2, "ep": 1}
    assert document["estimate"]["step_s"] > 0


def test_estimate_that_does_not_fit_says_so_and_what_would(run):
    code, out, err = run("estimate", "llama3-8b", "8xH100", *JOB, "--engine", "megatron", "-q")
    assert code == 4
    assert "DOES NOT FIT" in out
    assert err.startswith("does not fit: needs ")
    assert "what helps: --zero 1 (" in err
    code, out, err = run("estimate", "llama3-8b", "8xH100", *JOB, "--engine", "megatron", "--json")
    document = json.loads(out)
    assert (code, document["format"], document["fits"]) == (4, "autoplan/estimate", False)
    assert "does not fit" in err
    assert run("estimate", "llama3-8b", "8xH100", *JOB, "--engine", "megatron", "--zero", "1")[::2] == (0, "")


def test_estimate_of_the_plan_agrees_with_the_plan(run, plan_file):
    plan = load_plan(plan_file)
    mesh, strategy = plan.strategy.mesh, plan.strategy
    flags = ["--tp", mesh.tp, "--pp", mesh.pp, "--dp", mesh.dp, "--dp-replicate", mesh.dp_replicate, "--zero", strategy.zero_stage]
    flags += ["--micro-batch", strategy.micro_batch, "--recompute", strategy.recompute]
    _, out, _ = run("estimate", *SMALL, *map(str, flags), "--json")
    assert json.loads(out)["estimate"]["step_s"] == plan.estimate.step_s


def test_estimate_writes_a_plan(run, tmp_path):
    path = tmp_path / "given.json"
    assert run("estimate", *SMALL, "--zero", "3", "-o", str(path))[0] == 0
    assert load_plan(path).proof.status == "estimated"


def test_explain(run, plan_file):
    code, out, _ = run("explain", str(plan_file))
    assert code == 0
    for title in ("Why this plan", "What was second", "What was rejected", "What would have to change", "What the search vouches for"):
        assert title in out
    assert json.loads(run("explain", str(plan_file), "--json")[1])["text"] == out


def test_diff(run, plan_file, tmp_path):
    other = tmp_path / "other.json"
    assert run("plan", *SMALL, "-q", "-o", str(other), "--fix", "tp=2")[0] == 0
    code, out, _ = run("diff", str(plan_file), str(other))
    assert code == 0
    assert "strategy.mesh.tp" in out
    fields = {row["field"] for row in json.loads(run("diff", str(plan_file), str(other), "--json")[1])["changes"]}
    assert {"strategy.mesh.tp", "step", "peak"} <= fields
    assert run("diff", str(plan_file), str(plan_file))[1] == "the plans decide and cost the same\n"


def test_export_says_what_it_loses(run, plan_file, tmp_path):
    code, out, err = run("export", str(plan_file), "--to", "torchrun", "-o", str(tmp_path / "out"), "--allow-loss")
    assert code == 0, err
    assert "start: " in out
    assert (tmp_path / "out" / "launch.sh").exists()


def test_lossy_export_needs_permission(run, tmp_path):
    path = tmp_path / "plan.json"
    assert run("plan", "llama3-8b", "8xH100", *JOB, "--fix", "recompute=first_k,recompute_layers=3", "-q", "-o", str(path))[0] == 0
    code, _, err = run("export", str(path), "--to", "torchtitan")
    assert code == 3
    assert "--allow-loss" in err
    assert run("export", str(path), "--to", "torchtitan", "--allow-loss")[0] == 0


def test_hardware_and_models(run):
    assert "H100" in run("hardware")[1]
    assert "16 devices" in run("hardware", "show", "8xH100*2")[1]
    assert json.loads(run("hardware", "show", "8xH100*2", "--json")[1])["cluster"]["name"]
    assert "llama3-8b" in run("models")[1].splitlines()
    assert "llama3-8b" in json.loads(run("models", "list", "--json")[1])["models"]
    assert json.loads(run("models", "show", "llama3-8b", "--json")[1])["model"]["num_layers"] == 32


def test_help_has_examples(run):
    for verb in ("plan", "estimate"):
        code, out, _ = run(verb, "--help")
        assert code == 0
        assert f"autoplan {verb} llama3-8b 8xH100" in out
    assert "exit codes" in run("--help")[1]


def test_quiet_and_verbose_progress(run):
    assert run("plan", *SMALL, "-q")[2] == ""
    assert "best" in run("plan", *SMALL, "-v")[2]


def test_interrupt_keeps_the_best(run, monkeypatch):
    def stop(self, progress):
        if progress.best is not None:
            raise KeyboardInterrupt

    monkeypatch.setattr("planner.cli_output.Output.progress", stop)
    code, out, err = run("plan", *SMALL, "--json")
    plan = plan_from_json(out)
    assert code == 0
    assert plan.proof.status == "interrupted"
    assert plan.proof.bound_s <= plan.estimate.step_s
    assert "stopped (interrupted)" in err
    assert run("plan", *SMALL, "--json", "--require-optimal")[0] == 5


def test_a_bug_is_one_line(run, monkeypatch):
    def breaks(*_, **__):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("planner.cli_plan.problem_from", breaks)
    code, out, err = run("plan", *SMALL)
    assert (code, out) == (1, "")
    assert err.startswith("bug: ZeroDivisionError: oops")
    assert len(err.splitlines()) == 1
    assert "Traceback" in run("plan", *SMALL, "-v")[2]


class Terminal:
    """A stream that says it is a terminal."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("environ", "arguments", "coloured"), [({}, [], True), ({"NO_COLOR": "1"}, [], False), ({}, ["--no-color"], False)]
)
def test_colour_on_a_terminal_unless_told_otherwise(environ, arguments, coloured):
    from planner.cli_output import Output
    from planner.render import plan_panel

    terminal = Terminal()
    Output.of(arguments, environ, terminal, terminal).show(plan_panel(samples.plan()))
    assert ("\x1b[" in terminal.text) == coloured


def test_a_reader_that_leaves_is_no_error(plan_file):
    done = subprocess.run(
        f"{sys.executable} -m planner explain {plan_file} | head -1", cwd=ROOT, shell=True, capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("Why this plan")
    assert done.stderr == ""


def test_a_factory_is_captured(run, tmp_path):
    path = tmp_path / "gpt.json"
    arguments = ("examples/gpt.py:build_model", "4xH100", "--seq-len", "64", "--global-batch", "16", "-q")
    assert run("plan", *arguments, "-o", str(path))[0] == 0
    assert load_plan(path).model == "examples/gpt.py:build_model"
    assert load_plan(path).num_layers == 4


def test_a_plan_of_another_model_explains_itself(run, tmp_path):
    path = tmp_path / "plan.json"
    save_plan(replace(samples.plan(), model="other"), path)
    assert run("explain", str(path))[0] == 0


def test_export_offers_every_target():
    from planner.cli_tools import EXPORT_TARGETS
    from planner.export import TARGETS

    assert EXPORT_TARGETS == TARGETS
