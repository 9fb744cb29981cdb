"""Models that differ where parallelism is delicate: per-head norms, norms after the sublayer, layer types by position, Conv1D, tied embeddings."""

from __future__ import annotations

import pytest

from tests.runtime.test_parity import check_errors

pytestmark = pytest.mark.dist

PLANS = {
    "tp": {"mesh": {"tp": 2, "dp_replicate": 2}},
    "tp, sp": {"mesh": {"tp": 2, "dp_shard": 2}, "sequence_parallel": True, "zero_stage": 2, "recompute": "full"},
    "pp": {"mesh": {"pp": 4}, "schedule": "1f1b", "micro_batch": 2},
    "pp, interleaved, zero 3": {
        "mesh": {"pp": 2, "dp_shard": 2},
        "schedule": "interleaved_1f1b",
        "vpp": 2,
        "zero_stage": 3,
        "recompute": "selective",
    },
    "pp, tp, sp": {"mesh": {"pp": 2, "tp": 2}, "schedule": "1f1b", "sequence_parallel": True},
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("model", ["qwen3", "gemma2", "gpt2"])
def test_family(pool, model, name):
    if model == "gpt2" and "tp" in PLANS[name]["mesh"]:
        with pytest.raises(AssertionError, match="is a Conv1D with layout 'column'"):
            pool.run("tests.runtime.cases:parity", ranks=4, model=model, plan=PLANS[name])
        return
    check_errors(pool.run("tests.runtime.cases:parity", ranks=4, model=model, plan=PLANS[name]))


@pytest.mark.parametrize("name", ["tp", "tp, sp", "pp, tp, sp"])
def test_fused_projections_are_not_split_contiguously(pool, name):
    with pytest.raises(AssertionError, match=r"InputError: passes.selfcheck: model.layers.\d does not run split over tp = 2"):
        pool.run("tests.runtime.cases:parity", ranks=4, model="phi3", plan=PLANS[name])
