"""Every file of examples/ runs as its docstring says and prints what it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from costmodel.mesh import Mesh
from planner.facade import plan_for
from planner.job import Job
from planner.strategy import Strategy

ROOT = Path(__file__).resolve().parents[2]
COVERED = {"gpt", "compare_layouts", "plan_hf_config", "plan_module", "train_loop"}


def run(*arguments: str) -> str:
    """Standard output of a Python command at the root of the tree."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_run_here():
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == COVERED


def test_plan_hf_config():
    lines = run("-W", "error", "-m", "examples.plan_hf_config").splitlines()
    assert [line.split()[0] for line in lines] == ["8xA100-40GB", "8xA100-80GB*2", "8xH100*2", "8xH200"]
    assert any("no plan fits" in line for line in lines)
    speeds = [float(match[1].replace(",", "")) for line in lines if (match := re.search(r"([\d,]+) tokens/s", line))]
    assert speeds
    assert min(speeds) > 0


def test_plan_module():
    output = run("-W", "error", "-m", "examples.plan_module")
    assert "on 4xA100-40GB (4 devices)" in output
    assert "Why this plan" in output


def test_compare_layouts():
    lines = run("-W", "error", "-m", "examples.compare_layouts").splitlines()
    steps = [float(re.search(r": +([\d.]+) s", line)[1]) for line in lines]
    tensor, pipeline = steps[::2], steps[1::2]
    assert len(tensor) == len(pipeline) == 3
    gains = [one / other for one, other in zip(tensor, pipeline, strict=True)]
    assert gains == sorted(gains), "more micro-batches shrink the bubble, so pipelining gains on tensor parallelism"


@pytest.mark.dist
def test_train_loop(tmp_path):
    from examples.gpt import build_model

    strategy = Strategy(mesh=Mesh(dp_shard=2, tp=2), zero_stage=3)
    plan_for(build_model(), "4xCPU", Job(global_batch=8, seq_len=32, precision="fp32"), strategy, "torch").save(tmp_path / "plan.json")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "examples.train_loop")
    losses = [float(number) for number in re.findall(r"loss ([\d.]+)", run(*launch, str(tmp_path / "plan.json")))]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
