"""Liveness: peaks counted by hand."""

from __future__ import annotations

from planner.graph import Node
from planner.liveness import peak_bytes

SIZES = {"a": 1.0, "b": 10.0, "c": 100.0, "d": 1000.0, "s": 5.0}


def _node(inputs: str, outputs: str) -> Node:
    return Node(node_id=outputs, op="elementwise", phase="forward", inputs=tuple(inputs), outputs=tuple(outputs))


def test_chain_holds_two_at_a_time():
    chain = [_node("", "a"), _node("a", "b"), _node("b", "c"), _node("c", "d")]
    assert peak_bytes(chain, SIZES.__getitem__) == 1100.0


def test_long_lived_tensor_counts_until_its_last_reader():
    chain = [_node("", "a"), _node("a", "b"), _node("b", "c"), _node("ca", "d")]
    assert peak_bytes(chain, SIZES.__getitem__) == 1101.0


def test_pinned_and_unread_tensors_stay():
    chain = [_node("", "a"), _node("a", "b"), _node("b", "c"), _node("c", "d")]
    assert peak_bytes(chain, SIZES.__getitem__, pinned=["a"]) == 1101.0
    assert peak_bytes([_node("", "b"), _node("", "c"), _node("", "d")], SIZES.__getitem__) == 1110.0


def test_initial_tensors_are_freed_after_their_last_reader():
    chain = [_node("s", "b"), _node("b", "c")]
    assert peak_bytes(chain, SIZES.__getitem__, initial=["s"]) == 110.0
    assert peak_bytes([_node("s", "b"), _node("bs", "c")], SIZES.__getitem__, initial=["s"]) == 115.0
    assert peak_bytes([_node("", "b")], SIZES.__getitem__, initial=["s"]) == 15.0


def test_tensors_of_others_are_not_counted():
    assert peak_bytes([_node("d", "b")], SIZES.__getitem__) == 10.0
