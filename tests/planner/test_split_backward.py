"""Backward in halves: together the whole backward, executable one after the other, nothing of the second needed by the first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.work import Collective, Compute, Work
from planner.block_work import block_work, prepare, program
from planner.division import routed_tensors
from planner.exchange import Exchange
from planner.split_backward import split_backward, weight_inputs
from tests.planner.graphs import MEGATRON, TORCH
from tests.planner.test_block_work import BLOCKS, DIVISIONS, FORMS


def _flops(works: tuple[Work, ...]) -> float:
    return sum(work.flops for work in works if isinstance(work, Compute))


def _bytes(works: tuple[Work, ...]) -> float:
    return sum(work.full_bytes for work in works if isinstance(work, Collective))


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("form", FORMS)
def test_halves_make_the_whole(name: str, form: str) -> None:
    block = prepare(BLOCKS[name], **FORMS[form])
    for division in DIVISIONS.values():
        share = replace(division, routed=routed_tensors(block))
        for engine in (MEGATRON, TORCH):
            steps = program(block, "none", share, engine)
            first, second = split_backward(steps.backward, block)
            assert sorted(map(id, (*first, *second))) == sorted(map(id, steps.backward))
            made = {name for item in second for name in item.outputs}
            assert made.isdisjoint({name for item in first for name in item.inputs})
            between = set(weight_inputs(second)) & {name for item in steps.backward for name in item.outputs}
            assert between <= {name for item in first for name in item.outputs}
            work = block_work(block, "none", share, engine, halves=True)
            assert _flops(work.input_gradient) + _flops(work.weight_gradient) == pytest.approx(_flops(work.backward))
            assert _bytes(work.input_gradient) + _bytes(work.weight_gradient) == pytest.approx(_bytes(work.backward))
            assert 0.0 <= work.weight_saved_bytes <= min(work.saved_bytes, work.weight_inputs_bytes) * (1 + 1e-12)


@pytest.mark.parametrize("name", [name for name in BLOCKS if BLOCKS[name].role == "layer"])
def test_weight_gradients_are_the_weight_gradients(name: str) -> None:
    """Every weight-gradient matmul is in the second half, no attention is (a matmul with a cast weight is, whatever its role)."""
    block = prepare(BLOCKS[name], **FORMS["eager"])
    first, second = split_backward(program(block, "none", DIVISIONS["one"], MEGATRON).backward, block)
    kernels = [[(item.op, item.role) for item in half if not isinstance(item, Exchange)] for half in (first, second)]
    assert "attention" not in {op for op, _ in kernels[1]}
    assert ("gemm", "wgrad") in kernels[1]
    assert ("gemm", "wgrad") not in kernels[0]


def test_an_embedding_has_no_input_gradient() -> None:
    block = next(block for block in BLOCKS.values() if block.role == "embedding")
    first, second = split_backward(program(block, "none", DIVISIONS["one"], MEGATRON).backward, block)
    assert not first
    assert second


def test_halves_are_only_made_where_asked_for() -> None:
    work = block_work(next(iter(BLOCKS.values())), "none", DIVISIONS["one"], TORCH)
    assert (work.input_gradient, work.weight_gradient, work.weight_inputs_bytes) == ((), (), 0.0)
