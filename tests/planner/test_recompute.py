"""Recompute: what stays alive, and that what runs again suffices."""

from __future__ import annotations

import pytest

from planner.attention import unfuse_attention
from planner.fuse import fuse
from planner.graph import Block
from planner.models.resolve import resolve, spec_graph
from planner.recompute import Residency, residency
from tests.planner.graphs import gpt_layer

LLAMA = next(block for block in spec_graph(resolve("llama3-8b"), sequence=128).kinds if block.role == "layer")
BLOCKS = {
    "gpt": gpt_layer(), "gpt-separate": gpt_layer(separate=True), "llama": LLAMA, "llama-fused": fuse(LLAMA),
    "gpt-scores": unfuse_attention(gpt_layer(), dropout=True), "llama-scores-fused": fuse(unfuse_attention(LLAMA)),
}  # fmt: skip
POLICIES = [
    ("none", "keep_matmuls"),
    ("selective", "keep_matmuls"),
    ("selective", "core_attention"),
    ("selective", "keep_every_other_matmul"),
    ("full", "keep_matmuls"),
]


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(("policy", "selective"), POLICIES)
@pytest.mark.parametrize("stops_early", [False, True])
def test_what_is_kept_and_repeated_is_enough_for_backward(name: str, policy: str, selective: str, stops_early: bool):
    block = BLOCKS[name]
    held = residency(block, policy, selective=selective, stops_early=stops_early)
    exist = {tensor.tensor_id for tensor in block.tensors if tensor.kind != "activation"} | set(held.kept)
    for node in (*held.again, *(node for node in block.nodes if node.phase == "backward")):
        assert set(node.inputs) <= exist, node
        exist |= set(node.outputs)


def _flops(held: Residency) -> float:
    return sum(node.flops for node in held.again)


def test_none_repeats_nothing_and_full_repeats_the_whole_forward():
    block = BLOCKS["gpt"]
    assert residency(block, "none") == Residency(kept=block.saved, again=())
    full = residency(block, "full")
    assert full.kept == ("x",)
    assert _flops(full) == block.flops("forward")


def test_stopping_early_saves_the_last_matmul():
    block = BLOCKS["gpt"]
    down = next(node for node in block.nodes if node.node_id == "f2/mm")
    assert _flops(residency(block, "full", stops_early=True)) == block.flops("forward") - down.flops


def test_core_attention_drops_the_scores_only():
    block = BLOCKS["gpt-scores"]
    held = residency(block, "selective", selective="core_attention")
    dropped = set(block.saved) - set(held.kept)
    assert {block.tensor(name).shape for name in dropped} == {(1, 8, 32, 32)}
    assert len(dropped) == 3
    scores = next(node for node in block.nodes if node.node_id.endswith("flash/scores"))
    assert _flops(held) == scores.flops


def test_core_attention_with_flash_attention_changes_nothing():
    block = BLOCKS["gpt"]
    held = residency(block, "selective", selective="core_attention")
    assert set(held.kept) == set(block.saved)
    assert held.again == ()


@pytest.mark.parametrize("name", ["gpt", "gpt-separate", "llama", "llama-fused"])
def test_keep_matmuls_repeats_no_matmul(name: str):
    held = residency(BLOCKS[name], "selective", selective="keep_matmuls")
    assert {node.op for node in held.again}.isdisjoint({"gemm", "attention"})
    assert _bytes(BLOCKS[name], held.kept) < _bytes(BLOCKS[name], BLOCKS[name].saved)


def _bytes(block: Block, names: tuple[str, ...]) -> float:
    return sum(block.tensor(name).num_elements * (4 if block.tensor(name).dtype == "fp32" else 2) for name in names)
