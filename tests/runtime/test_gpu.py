"""On a CUDA device: the same steps as on the CPU, and memory by the allocator's own counter."""

from __future__ import annotations

import pytest
import torch

from runtime.launch import run_local
from tests.runtime.plans import GPT_LAYOUTS, make_plan
from tests.runtime.test_launch import write

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "strategy", [{"mesh": {}}, {"mesh": {}, "zero_stage": 3, "recompute": "full"}, {"mesh": {}, "recompute": "selective"}]
)
def test_one_gpu_trains(tmp_path, precision, strategy):
    path = write(make_plan(layouts=GPT_LAYOUTS, precision=precision, seq_len=64, **strategy), tmp_path / "plan.json")
    report = run_local(path, "examples.gpt:build_model", steps=4)
    assert report.device == "cuda"
    assert report.losses[-1] < report.losses[0]
    assert report.ranks[0].measured_peak_bytes > 1e6


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="fewer than 4 CUDA devices")
@pytest.mark.parametrize(
    "strategy",
    [
        {"mesh": {"dp_replicate": 4}},
        {"mesh": {"dp_shard": 2, "tp": 2}, "zero_stage": 3, "sequence_parallel": True},
        {"mesh": {"pp": 2, "tp": 2}, "schedule": "1f1b"},
        {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": "interleaved_1f1b", "vpp": 2, "zero_stage": 2},
    ],
)
def test_four_gpus_train(tmp_path, strategy):
    path = write(make_plan(layouts=GPT_LAYOUTS, precision="bf16", seq_len=64, **strategy), tmp_path / "plan.json")
    report = run_local(path, "examples.gpt:build_model", steps=4)
    assert report.losses[-1] < report.losses[0]
