"""A checkpoint continues the run that wrote it, under its plan or another; and what is half written is never read."""

from __future__ import annotations

import json

import pytest

from costmodel.errors import InputError
from runtime import checkpoint

pytestmark = pytest.mark.dist
CASES = "tests.runtime.checkpoint_cases"

PLANS = {
    "one": (1, {}),
    "ddp": (2, {"mesh": {"dp_replicate": 2}}),
    "zero 2": (4, {"mesh": {"dp_shard": 4}, "zero_stage": 2}),
    "hsdp": (4, {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "zero_stage": 3}),
    "fsdp, tp": (4, {"mesh": {"dp_shard": 2, "tp": 2}, "zero_stage": 3}),
    "tp": (4, {"mesh": {"tp": 4}}),
    "pp": (4, {"mesh": {"pp": 4}, "schedule": "1f1b", "micro_batch": 2}),
    "pp, fsdp, uneven": (4, {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": "1f1b", "zero_stage": 3, "stage_layers": (3, 1)}),
    "pp, interleaved": (2, {"mesh": {"pp": 2}, "schedule": "interleaved_1f1b", "vpp": 2}),
}
MOVES = [
    ("ddp", "ddp"), ("one", "fsdp, tp"), ("fsdp, tp", "pp, fsdp, uneven"), ("pp, fsdp, uneven", "pp, interleaved"), ("pp", "tp"), ("tp", "zero 2"),
    ("zero 2", "one"), ("hsdp", "pp"), ("pp, interleaved", "hsdp"),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second"), MOVES)
def test_a_checkpoint_continues_under_another_plan(pool, tmp_path, first, second):
    ranks, plan = PLANS[first]
    losses = pool.run(f"{CASES}:save", ranks=ranks, plan=plan, directory=str(tmp_path))[0]
    ranks, plan = PLANS[second]
    for result in pool.run(f"{CASES}:load", ranks=ranks, plan=plan, directory=str(tmp_path)):
        assert (result["step"], result["extra"], result["lr"]) == (2, {"note": "two steps"}, 5e-3)
        assert result["losses"] == pytest.approx(losses[2:], rel=1e-5)


@pytest.mark.parametrize(("first", "second"), [("pp", "zero 2"), ("fsdp, tp", "pp")])
def test_shared_embeddings(pool, tmp_path, first, second):
    (save_ranks, save), (load_ranks, load) = PLANS[first], PLANS[second]
    losses = pool.run(f"{CASES}:save", ranks=save_ranks, plan=save, directory=str(tmp_path), tied=True)[0]
    result = pool.run(f"{CASES}:load", ranks=load_ranks, plan=load, directory=str(tmp_path), tied=True)[0]
    assert result["losses"] == pytest.approx(losses[2:], rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_states_come_back_to_the_bit(pool, tmp_path, optimizer):
    plan = PLANS["fsdp, tp"][1]
    assert all(pool.run(f"{CASES}:same_again", ranks=4, plan=plan, directory=str(tmp_path), optimizer=optimizer))


def test_8bit_moments_move_between_plans(pool, tmp_path):
    (save_ranks, save), (load_ranks, load) = PLANS["zero 2"], PLANS["one"]
    losses = pool.run(f"{CASES}:save", ranks=save_ranks, plan=save, directory=str(tmp_path), optimizer="adamw_8bit")[0]
    result = pool.run(f"{CASES}:load", ranks=load_ranks, plan=load, directory=str(tmp_path), optimizer="adamw_8bit")[0]
    assert result["losses"] == pytest.approx(losses[2:], rel=1e-2)


def test_another_model_is_refused(pool, tmp_path):
    pool.run(f"{CASES}:save", ranks=1, plan={}, directory=str(tmp_path))
    with pytest.raises(AssertionError, match=r"InputError: checkpoint: parameters/embed.weight is \(96, 32\), this run has \(96, 64\)"):
        pool.run(f"{CASES}:load", ranks=1, plan={}, directory=str(tmp_path), hidden_size=64)


def whole(directory, step):
    (directory / f"step-{step:08d}").mkdir()
    (directory / f"step-{step:08d}" / "checkpoint.json").write_text(json.dumps({"format": 1, "step": step, "extra": {}}))


def test_the_newest_whole_checkpoint_is_found(tmp_path):
    with pytest.raises(InputError, match="no checkpoint in"):
        checkpoint.find(tmp_path / "missing")
    for step in (5, 100, 20):
        whole(tmp_path, step)
    (tmp_path / ".step-00000200.partial").mkdir()
    (tmp_path / "step-notes").mkdir()
    assert checkpoint.find(tmp_path).name == "step-00000100"
    assert checkpoint.read_position(checkpoint.find(tmp_path)).step == 100


def test_another_format_is_refused(tmp_path):
    whole(tmp_path, 1)
    (tmp_path / "step-00000001" / "checkpoint.json").write_text('{"format": 99}')
    with pytest.raises(InputError, match="format is 99"):
        checkpoint.read_position(tmp_path / "step-00000001")
