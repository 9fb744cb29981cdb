"""The files for torchrun train: launch.sh starts real ranks of the runtime on this machine's CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from costmodel.mesh import Mesh
from planner.export import export, write_exported
from planner.facade import plan_for
from planner.job import Job
from planner.strategy import Strategy

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.dist
def test_launch_script_trains(tmp_path):
    from examples.gpt import build_model

    strategy = Strategy(mesh=Mesh(dp_shard=2, tp=2), zero_stage=3)
    plan = plan_for(build_model(), "4xCPU", Job(global_batch=8, seq_len=32, precision="fp32"), strategy, "torch")
    write_exported(export(plan, "torchrun"), tmp_path)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    command = ["bash", str(tmp_path / "launch.sh"), "examples.gpt:build_model", "--steps", "4"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(number) for number in re.findall(r"^step +\d+ +loss ([\d.]+)", done.stdout, re.MULTILINE)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert (tmp_path / "plan.measured.json").exists()
