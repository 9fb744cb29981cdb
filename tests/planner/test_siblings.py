"""Sibling linears: one matmul of the summed width, no kernels that add up gradients."""

from __future__ import annotations

from dataclasses import replace

from planner.graph import Block, Node
from planner.siblings import merge_siblings
from tests.planner.graphs import gpt_layer

SEPARATE = gpt_layer(kv_heads=4, separate=True)


def _gemms(block: Block, phase: str) -> list[Node]:
    return [node for node in block.nodes if node.op == "gemm" and node.phase == phase]


def _loops(node: Node) -> dict[str, int]:
    return {loop.name: loop.size for loop in node.loops}


def test_query_key_value_become_one_matmul_each_way():
    merged = merge_siblings(SEPARATE)
    assert next(_loops(node) for node in _gemms(merged, "forward")) == {"m": 32, "n": 64 + 32 + 32, "k": 64}
    assert len(_gemms(merged, "forward")) == 4
    dgrad, wgrad = (node for node in _gemms(merged, "backward") if "+" in node.node_id)
    assert (_loops(dgrad), dgrad.outputs) == ({"m": 32, "n": 64, "k": 128}, ("n1.grad",))
    assert (_loops(wgrad), wgrad.outputs) == ({"m": 128, "n": 64, "k": 32}, ("v.weight.grad", "k.weight.grad", "q.weight.grad"))
    assert {"n1.grad:qk/accumulate", "n1.grad/accumulate"}.isdisjoint(node.node_id for node in merged.nodes)


def test_flops_saved_tensors_and_dataflow_are_unchanged():
    merged = merge_siblings(SEPARATE)
    assert merged.saved == SEPARATE.saved
    for phase in ("forward", "backward"):
        assert merged.flops(phase) == SEPARATE.flops(phase)
    exist = {tensor.tensor_id for tensor in merged.tensors if tensor.kind != "activation"}
    for node in merged.nodes:
        assert set(node.inputs) <= exist, node
        exist |= set(node.outputs)


def test_frozen_siblings_have_no_weight_gradient():
    nodes = tuple(node for node in SEPARATE.nodes if node.node_id not in ("k/wgrad", "v/wgrad"))
    wgrad = next(node for node in merge_siblings(replace(SEPARATE, nodes=nodes)).nodes if node.node_id.endswith(":wgrad"))
    assert (_loops(wgrad)["m"], wgrad.outputs) == (64, ("q.weight.grad",))


def test_input_gradients_that_do_not_meet_stay_apart():
    nodes = tuple(node for node in SEPARATE.nodes if not node.node_id.endswith("/accumulate"))
    ids = {node.node_id for node in merge_siblings(replace(SEPARATE, nodes=nodes)).nodes}
    assert {"q/dgrad", "k/dgrad", "v/dgrad"} <= ids


def test_linears_of_different_inputs_are_no_siblings():
    block = gpt_layer()
    assert merge_siblings(block).nodes == block.nodes
