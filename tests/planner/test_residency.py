"""The frontier of kept tensors: equal to exhaustive search, to the pricing of plans, and never worse than what engines do by name."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from costmodel.blocks import Machine
from costmodel.engine import Engine
from costmodel.hardware import Cluster
from costmodel.mesh import Mesh
from planner.block_work import prepare
from planner.division import Division, routed_tensors
from planner.graph import Block
from planner.residency import Tape, frontier, hull, record
from planner.residency.program import Choice, evaluate, solve
from tests.planner.graphs import MEGATRON, TORCH
from tests.planner.test_block_work import BLOCKS, DIVISIONS, FORMS

_CASES = [
    ("llama-layer", "eager", "one"), ("llama-layer", "fused", "sp"), ("llama-layer", "scores", "tp"), ("gpt-layer", "scores", "one"),
    ("mixtral-layer_sparse", "fused", "sp-ep"), ("olmo2-layer", "fused", "sp"), ("deepseek_v3-layer", "fused", "cp"),
]  # fmt: skip


def _tape(block: Block, division: Division, engine: Engine) -> Tape:
    share = replace(division, routed=routed_tensors(block)) if division.ep > 1 else division
    mesh = Mesh(tp=division.tp, cp=division.cp, dp_replicate=division.ep, ep=division.ep)
    return record(block, share, engine, Machine.of(Cluster.parse("8xH100").pool, mesh, engine))


def _case(name: str, form: str, division: str, engine: Engine) -> Tape:
    return _tape(prepare(BLOCKS[name], **FORMS[form]), DIVISIONS[division], engine)


@pytest.mark.parametrize("engine", [TORCH, MEGATRON], ids=["torch", "megatron"])
@pytest.mark.parametrize(("name", "form", "division"), _CASES)
def test_the_program_agrees_with_the_pricing_of_plans(name: str, form: str, division: str, engine: Engine):
    """Seconds and bytes of every vertex, recomputed by planner.block_work; the ends are no recompute and the least that full recompute keeps."""
    tape = _case(name, form, division, engine)
    points = hull(tape)
    assert len(points) >= 4
    for point in points:
        by_program = evaluate(tape, point.kept)
        assert by_program.extra_s == pytest.approx(point.extra_s, rel=1e-6, abs=1e-10)
        assert by_program.saved_bytes == pytest.approx(point.saved_bytes)
        assert point.peak_bytes >= point.saved_bytes
    none, full = tape.work("none"), tape.work("full")
    assert points[0].extra_s == pytest.approx(0.0, abs=1e-10)
    assert points[0].saved_bytes <= none.saved_bytes
    assert points[-1].saved_bytes <= full.saved_bytes
    slopes = [(b.extra_s - a.extra_s) / (a.saved_bytes - b.saved_bytes) for a, b in pairwise(points)]
    assert slopes == sorted(slopes)


@pytest.mark.parametrize("engine", [TORCH, MEGATRON], ids=["torch", "megatron"])
@pytest.mark.parametrize("division", ["one", "sp"])
@pytest.mark.parametrize("offered", [slice(0, None, 2), slice(1, None, 2)], ids=["even", "odd"])
def test_every_non_dominated_point_is_found(division: str, engine: Engine, offered: slice):
    """Against all subsets of what may be kept: every other tensor of the block, so that they can be counted."""
    tape = _case("gpt-layer", "fused", division, engine)
    tape = replace(tape, storable=tape.storable[offered])
    assert 8 <= len(tape.storable) <= 12
    subsets = [kept for size in range(len(tape.storable) + 1) for kept in combinations(tape.storable, size)]
    best = _non_dominated([evaluate(tape, kept) for kept in subsets])
    found = [evaluate(tape, point.kept) for point in frontier(tape)]
    assert [choice.saved_bytes for choice in found] == [choice.saved_bytes for choice in best]
    assert [choice.extra_s for choice in found] == pytest.approx([choice.extra_s for choice in best], abs=1e-10)


def _non_dominated(choices: list[Choice]) -> list[Choice]:
    best: list[Choice] = []
    for choice in sorted(choices, key=lambda item: (item.saved_bytes, item.extra_s)):
        if not best or choice.extra_s < best[-1].extra_s - 1e-12:
            best.append(choice)
    return best[::-1]


@pytest.mark.parametrize(("name", "form", "engine"), [("llama-layer", "eager", TORCH), ("gpt-layer", "scores", MEGATRON)])
def test_what_engines_call_selective_is_on_the_frontier_or_above_it(name: str, form: str, engine: Engine):
    """Within the bytes that the engine's own policy keeps, the frontier repeats no more."""
    tape = _case(name, form, "one", engine)
    for policy in ("none", "selective", "full"):
        named = tape.work(policy).saved_bytes
        chosen = solve(tape, seconds_weight=1.0, bytes_weight=0.0, most_bytes=named)
        assert chosen is not None
        assert chosen.saved_bytes <= named
        assert chosen.extra_s <= tape.extra_s(policy) + 1e-10


def test_epsilon_thins_the_frontier_and_keeps_its_ends():
    tape = _case("llama-layer", "eager", "one", TORCH)
    thin = frontier(tape, epsilon_frac=0.1)
    assert 2 < len(thin) <= 12
    assert (thin[0], thin[-1]) == (hull(tape)[0], hull(tape)[-1])
    assert [point.saved_bytes for point in thin] == sorted((point.saved_bytes for point in thin), reverse=True)


def test_a_limit_that_nothing_meets_has_no_answer():
    tape = _case("llama-layer", "eager", "one", TORCH)
    assert solve(tape, seconds_weight=1.0, bytes_weight=0.0, most_bytes=hull(tape)[-1].saved_bytes - 1.0) is None
    assert solve(tape, seconds_weight=1.0, bytes_weight=0.0, most_bytes=0.0) is None


def test_the_same_question_has_the_same_answer():
    first, second = (hull(_case("mixtral-layer_sparse", "fused", "sp", MEGATRON)) for _ in range(2))
    assert first == second
