"""Training under a plan equals training in one process: loss, every gradient and every weight over several AdamW steps, in fp32."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.dist
TOLERANCE = 1e-4

CASES = {
    "ddp": (4, {"mesh": {"dp_replicate": 4}}),
    "ddp, accumulation": (4, {"mesh": {"dp_replicate": 4}, "recompute": "full"}),
    "zero 2": (4, {"mesh": {"dp_shard": 4}, "zero_stage": 2}),
    "zero 3": (4, {"mesh": {"dp_shard": 4}, "zero_stage": 3}),
    "hsdp": (4, {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "zero_stage": 3, "recompute": "selective"}),
    "tp": (4, {"mesh": {"tp": 4}, "micro_batch": 4}),
    "tp, dp": (4, {"mesh": {"tp": 2, "dp_replicate": 2}, "micro_batch": 2}),
    "tp, sp": (4, {"mesh": {"tp": 4}, "sequence_parallel": True, "micro_batch": 4, "recompute": "full"}),
    "fsdp, tp": (4, {"mesh": {"dp_shard": 2, "tp": 2}, "zero_stage": 3, "recompute": "first_k", "recompute_layers": 2}),
    "fsdp, tp, sp": (4, {"mesh": {"dp_shard": 2, "tp": 2}, "zero_stage": 3, "sequence_parallel": True, "recompute": "selective"}),
}

PIPELINE_CASES = {
    "1f1b": (4, {"mesh": {"pp": 4}, "schedule": "1f1b", "micro_batch": 2}),
    "1f1b, uneven": (4, {"mesh": {"pp": 2, "dp_replicate": 2}, "schedule": "1f1b", "stage_layers": (3, 1), "recompute": "full"}),
    "gpipe": (4, {"mesh": {"pp": 2, "dp_replicate": 2}, "schedule": "gpipe", "recompute": "first_k", "recompute_layers": 1}),
    "interleaved": (4, {"mesh": {"pp": 2, "dp_replicate": 2}, "schedule": "interleaved_1f1b", "vpp": 2, "recompute": "selective"}),
    "pp, fsdp": (4, {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": "1f1b", "zero_stage": 3}),
    "pp, zero 2, interleaved": (4, {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": "interleaved_1f1b", "vpp": 2, "zero_stage": 2}),
    "pp, tp": (4, {"mesh": {"pp": 2, "tp": 2}, "schedule": "1f1b", "micro_batch": 2, "recompute": "full"}),
    "pp, tp, sp": (4, {"mesh": {"pp": 2, "tp": 2}, "schedule": "1f1b", "micro_batch": 2, "sequence_parallel": True}),
    "pp, fsdp, tp": (8, {"mesh": {"pp": 2, "dp_shard": 2, "tp": 2}, "schedule": "1f1b", "zero_stage": 3}),
    "pp, fsdp, tp, sp, interleaved": (
        8,
        {
            "mesh": {"pp": 2, "dp_shard": 2, "tp": 2},
            "schedule": "interleaved_1f1b",
            "vpp": 2,
            "zero_stage": 2,
            "sequence_parallel": True,
            "recompute": "selective",
        },
    ),
}
CASES = CASES | PIPELINE_CASES


def check_errors(results):
    for result in results:
        assert result["loss"] < TOLERANCE, result
        assert result["gradient"] < TOLERANCE, result
        assert result["weight"] < TOLERANCE, result


def check(results, num_parameters):
    check_errors(results)
    assert len({name for result in results for name in result["names"]}) == num_parameters


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("model", "num_parameters"), [("gpt", 2 + 4 * 16 + 3), ("llama", 1 + 4 * 9 + 2)])
def test_parity(pool, name, model, num_parameters):
    ranks, plan = CASES[name]
    if model == "llama" and plan["mesh"].get("tp") == 4:
        plan = {**plan, "mesh": {"tp": 2, "dp_replicate": 2}, "micro_batch": 2}
    check(pool.run("tests.runtime.cases:parity", ranks=ranks, model=model, plan=plan), num_parameters)


TIED_CASES = {
    "ddp": (4, {"mesh": {"dp_replicate": 4}}),
    "zero 3": (4, {"mesh": {"dp_shard": 4}, "zero_stage": 3}),
    "tp": (4, {"mesh": {"tp": 4}, "micro_batch": 4, "sequence_parallel": True}),
    "pp": (4, {"mesh": {"pp": 4}, "schedule": "1f1b"}),
    "pp, interleaved, fsdp": (4, {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": "interleaved_1f1b", "vpp": 2, "zero_stage": 3}),
    "pp, fsdp, tp": (8, {"mesh": {"pp": 2, "dp_shard": 2, "tp": 2}, "schedule": "1f1b", "zero_stage": 3}),
}


@pytest.mark.parametrize("name", TIED_CASES)
def test_tied_embeddings(pool, name):
    ranks, plan = TIED_CASES[name]
    pipelined = plan["mesh"].get("pp", 1) > 1
    check(pool.run("tests.runtime.cases:tied", ranks=ranks, plan=plan, vocab_size=97), 2 + 4 * 16 + 2 + pipelined)


def test_loss_runs_on_split_logits_and_gathers_them_when_it_must(pool):
    plan = {"mesh": {"tp": 2}}
    split = pool.run("tests.runtime.cases:split_loss", ranks=2, plan=plan, mixes=False)
    assert not any(result["gathers"] for result in split)
    gathered = pool.run("tests.runtime.cases:split_loss", ranks=2, plan=plan, mixes=True)
    assert all(result["gathers"] for result in gathered)
    assert max(result["error"] for result in split + gathered) < 1e-5
