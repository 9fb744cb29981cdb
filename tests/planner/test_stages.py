"""Stages: cuts against an exhaustive search, placement, and refusals with numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.errors import InputError
from planner.stages import balance, split
from tests.planner.graphs import MEGATRON, gpt, strategy


def _loads(weights: list[float], counts: tuple[int, ...]) -> list[float]:
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [sum(weights[start:stop]) for start, stop in pairwise([0, *ends])]


@given(st.lists(st.integers(min_value=1, max_value=9), min_size=1, max_size=9), st.integers(min_value=1, max_value=5))
def test_balance_is_optimal(weights: list[int], num_chunks: int):
    if len(weights) < num_chunks:
        return
    found = balance(weights, num_chunks)
    assert len(found) == num_chunks
    assert sum(found) == len(weights)
    assert min(found) >= 1

    def key(counts: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
        loads = _loads(weights, counts)
        return max(loads), sum(load * load for load in loads), counts

    cuts = combinations(range(1, len(weights)), num_chunks - 1)
    every = [tuple(stop - start for start, stop in pairwise((0, *cut, len(weights)))) for cut in cuts]
    assert key(found) == min(map(key, every))


def test_equal_layers_are_cut_evenly():
    assert balance([1.0] * 80, 8) == (10,) * 8


def test_heavy_head_makes_the_last_chunk_lighter():
    """Seventeen layers and a head worth three: four chunks of work five."""
    assert balance([1.0] * 16 + [4.0], 4) == (5, 5, 5, 2)


def test_chunks_are_placed_in_loops_and_carry_embedding_and_head():
    graph = gpt(layers=8)
    stages = split(graph, strategy(pp=2, vpp=2, schedule="interleaved_1f1b", stage_layers=(1, 3, 2, 2)), MEGATRON)
    assert [stage.rank_index for stage in stages] == [0, 1, 0, 1]
    assert stages[0].layer_paths == ("wte", "h.0")
    assert stages[1].layer_paths == ("h.1", "h.2", "h.3")
    assert stages[3].layer_paths == ("h.6", "h.7", "head")


def test_embedding_and_head_may_stand_alone():
    stages = split(gpt(layers=2), strategy(pp=4, stage_layers=(0, 1, 1, 0)), MEGATRON)
    assert [stage.layer_paths for stage in stages] == [("wte",), ("h.0",), ("h.1",), ("head",)]
    with pytest.raises(InputError, match="1, 0, 1, 0"):
        split(gpt(layers=2), strategy(pp=4, stage_layers=(1, 0, 1, 0)), MEGATRON)


def test_default_puts_fewer_layers_beside_a_heavy_head():
    graph = gpt(layers=8, vocab=2048)
    first, last = split(graph, strategy(pp=2), MEGATRON)
    assert len(first.layer_paths) - 1 > len(last.layer_paths) - 1


def test_recompute_layers_of_every_chunk():
    graph = gpt(layers=8)
    assert [stage.recompute_layers for stage in split(graph, strategy(pp=2, recompute="full", stage_layers=(3, 5)), MEGATRON)] == [3, 5]
    some = strategy(pp=2, recompute="first_k", recompute_layers=4, stage_layers=(3, 5))
    assert [stage.recompute_layers for stage in split(graph, some, MEGATRON)] == [3, 4]
    assert [stage.recompute_layers for stage in split(graph, strategy(pp=2, recompute="selective"), MEGATRON)] == [0, 0]


@pytest.mark.parametrize(
    ("counts", "text"),
    [((4, 4, 4), "3 numbers for pp 2"), ((4, 5), "sum to 9; the model has 8 layers"), ((9, -1), "9, -1")],
)
def test_wrong_stage_layers_are_refused_with_their_numbers(counts: tuple[int, ...], text: str):
    with pytest.raises(InputError, match=text) as refusal:
        split(gpt(layers=8), strategy(pp=2, stage_layers=counts), MEGATRON)
    assert refusal.value.where == "Strategy.stage_layers"


def test_engine_without_uneven_stages():
    engine = replace(MEGATRON, supports_uneven_stages=False)
    assert [len(stage.layer_paths) for stage in split(gpt(layers=8, vocab=4096), strategy(pp=2), engine)] == [5, 5]
    with pytest.raises(InputError, match="equal chunks"):
        split(gpt(layers=8), strategy(pp=2, stage_layers=(3, 5)), engine)
    with pytest.raises(InputError, match="equal chunks"):
        split(gpt(layers=7), strategy(pp=2), engine)


def test_more_chunks_than_layers():
    with pytest.raises(InputError, match="3 layers cannot fill pp 4"):
        split(gpt(layers=3), strategy(pp=4), MEGATRON)
