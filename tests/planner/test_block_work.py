"""Programs of real families under every kind of division: executable, complete, and losing no flops."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from costmodel.work import BlockWork
from planner.block_work import BlockProgram, block_work, prepare, program
from planner.division import Division, routed_tensors
from planner.exchange import Exchange, Item, base
from planner.graph import Block, Graph
from planner.models import resolve, spec_graph
from tests.planner.graphs import MEGATRON, TORCH, gpt

_SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
    "vocab_size": 128, "max_position_embeddings": 128,
}  # fmt: skip
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8}
_LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 8,
}  # fmt: skip
CONFIGS = {
    "llama": _SMALL, "gemma2": _SMALL, "qwen3": _SMALL, "olmo2": _SMALL, "phi3": _SMALL,
    "mixtral": _SMALL | _MOE, "qwen3_moe": _SMALL | _MOE, "deepseek_v3": _SMALL | _MOE | _LATENT,
}  # fmt: skip


def _graph(model_type: str) -> Graph:
    return spec_graph(resolve({"model_type": model_type, **CONFIGS[model_type]}), sequence=32)


BLOCKS = {
    **{f"{name}-{block.kind_id}": block for name in CONFIGS for block in _graph(name).kinds},
    **{f"gpt-{block.kind_id}": block for block in gpt(separate=True).kinds},
}
DIVISIONS = {
    "one": Division(), "tp": Division(tp=4, kv_divisor=4), "sp": Division(tp=4, kv_divisor=4, sequence_parallel=True), "cp": Division(cp=2),
    "ep": Division(ep=4), "sp-ep": Division(tp=2, kv_divisor=2, ep=4, sequence_parallel=True),
}  # fmt: skip
FORMS = {
    "eager": {"flash": True, "dropout": False, "merge": False, "fused": False},
    "fused": {"flash": True, "dropout": True, "merge": True, "fused": True},
    "scores": {"flash": False, "dropout": True, "merge": False, "fused": True},
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("form", FORMS)
def test_programs_are_executable(name: str, form: str):
    """Every kernel reads what was made, gathered, reduced or kept before it, in the form it needs."""
    block = prepare(BLOCKS[name], **FORMS[form])
    for division in DIVISIONS.values():
        share = replace(division, routed=routed_tensors(block))
        for policy, engine in product(("none", "selective", "full"), (MEGATRON, TORCH)):
            _check(block, program(block, policy, share, engine), block_work(block, policy, share, engine))


def _check(block: Block, steps: BlockProgram, work: BlockWork) -> None:
    made = {output for node in block.nodes for output in node.outputs}
    given = {tensor.tensor_id for tensor in block.tensors} - made
    kept = {item.name for item in work.saved}
    exist = _run(steps.forward, given)
    assert kept <= exist
    assert {base(name) for name in kept} == set(steps.held.kept)
    after = _run((*steps.recompute, *steps.backward), given | kept)
    assert {output for node in block.nodes if node.phase == "backward" for output in node.outputs} <= {base(name) for name in after}
    for items in (steps.forward, steps.recompute, steps.backward):
        addends = {name for item in items for name in item.outputs if name.endswith("@partial")}
        assert addends <= {name for item in items for name in item.inputs}


def _run(items: tuple[Item, ...], exist: set[str]) -> set[str]:
    """What exists after `items`, each of which must find its inputs."""
    exist = set(exist)
    for item in items:
        assert set(item.inputs) <= exist, item
        exist |= set(item.outputs)
    return exist


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("form", FORMS)
def test_peaks_bound_what_lives(name: str, form: str):
    """Forward holds at least what it saves of its own; full recompute has everything back at once."""
    block = prepare(BLOCKS[name], **FORMS[form])
    none, full = (block_work(block, policy, Division(), TORCH) for policy in ("none", "full"))
    made = {output for node in block.nodes for output in node.outputs}
    own = sum(item.num_bytes for item in none.saved if item.name in made and item.num_bytes > 64 * 128)
    assert none.forward_peak_bytes >= own * 0.99
    assert full.saved_bytes <= none.saved_bytes
    assert full.saved_bytes + full.backward_peak_bytes >= 0.7 * none.saved_bytes


@pytest.mark.parametrize("name", BLOCKS)
def test_one_rank_exchanges_nothing(name: str):
    steps = program(prepare(BLOCKS[name], **FORMS["fused"]), "full", Division(), MEGATRON)
    assert not any(isinstance(item, Exchange) for item in (*steps.forward, *steps.recompute, *steps.backward))
