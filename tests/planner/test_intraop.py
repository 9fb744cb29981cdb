"""Intra-op layouts: known ones come out by themselves, the optimum is the oracle's, and every solve is priced again."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from costmodel.errors import InfeasibleError, InputError
from planner.graph import Block
from planner.intraop import BlockLayout, solve_layout
from planner.intraop import solve as solver
from planner.intraop.baseline import rule_based
from planner.intraop.borders import borders, choices
from planner.intraop.check import price_layout
from planner.intraop.price import Prices, can_reshard
from planner.intraop.rules import rules
from planner.models import resolve, spec_graph
from tests.planner.intraop_blocks import irregular_block, prices, random_block
from tests.planner.samples import cluster


def block_of(name: str, role: str = "layer", *, batch: int = 1, sequence: int = 4096) -> Block:
    graph = spec_graph(resolve(name), batch=batch, sequence=sequence)
    return next(block for block in graph.kinds if block.role == role)


def oracle(block: Block, prices: Prices, limit: float | None = None) -> float | None:
    """The least price over every combination of rules and placements; None when none fits `limit`."""
    tensors = {tensor.tensor_id: tensor for tensor in block.tensors}
    nodes = {node.node_id: node for node in block.nodes}
    ways = [rules(node, tensors, prices.size, nodes) for node in block.nodes]
    costs = {
        (node.node_id, rule): prices.kernel_s(node, rule, tensors) for node, found in zip(block.nodes, ways, strict=True) for rule in found
    }
    free = {**choices(block, prices.size, {}), **{item.owner: item.options for item in borders(block, prices.size, {}) if item.options}}
    moves: dict[tuple[str, str, str], float] = {}
    best = None
    for places in product(*free.values()):
        chosen = dict(zip(free, places, strict=True))
        for picked in product(*ways):
            owners, reads, total = dict(chosen), {}, 0.0
            for node, rule in zip(block.nodes, picked, strict=True):
                total += costs[node.node_id, rule]
                owners.update(zip(node.outputs, rule.outputs, strict=True))
                reads.update(dict.fromkeys(((name, place) for name, place in zip(node.inputs, rule.inputs, strict=True))))
            reads.update({(item.tensor_id, chosen[item.owner]): None for item in borders(block, prices.size, {})})
            if not all(can_reshard(owners[name], target) for name, target in reads):
                continue
            for name, target in reads:
                move = (name, owners[name], target)
                if move not in moves:
                    moves[move] = prices.reshard_s(tensors[name], owners[name], target)
                total += moves[move]
            held = [t.tensor_id for t in block.parameters] + list(block.saved)
            if limit is not None and sum(prices.num_bytes(tensors[name], owners[name]) for name in held) > limit:
                continue
            best = total if best is None else min(best, total)
    return best


@pytest.mark.parametrize("seed", range(110))
def test_the_optimum_is_the_oracles(seed):
    block, price = random_block(seed), prices(tp=2 if seed % 2 else 4)
    free = solve_layout(block, price)
    assert free.objective_s == pytest.approx(oracle(block, price), rel=1e-7)
    assert free.bound_s == pytest.approx(free.objective_s, rel=1e-6)
    if seed % 5 == 0:
        limit = 0.7 * free.memory_bytes
        known = oracle(block, price, limit)
        if known is None:
            with pytest.raises(InfeasibleError, match="no layout"):
                solve_layout(block, price, memory_bytes=limit)
        else:
            tight = solve_layout(block, price, memory_bytes=limit)
            assert tight.objective_s == pytest.approx(known, rel=1e-7)
            assert tight.memory_bytes <= limit * (1 + 1e-6)


def reads(layout: BlockLayout, part: str) -> tuple[str, ...]:
    """Placements of the inputs of the forward kernel whose module holds `part`."""
    return next(op.inputs for op in layout.ops if part in op.node_id and ":" not in op.node_id)


LLAMA = (("q_proj/", "k_proj/", "v_proj/", "gate_proj/", "up_proj/"), ("o_proj/", "down_proj/"))
GPT = (("c_attn/", "c_fc/"), ("attn.c_proj/", "mlp.c_proj/"))


@pytest.mark.parametrize(
    ("name", "sizes", "tp", "parts", "stored"),
    [
        ("llama3-8b", (1, 4096), 8, LLAMA, ("S0", "S1")),
        ("llama2-13b", (1, 4096), 8, LLAMA, ("S0", "S1")),
        ("gpt2-large", (2, 1024), 4, GPT, ("S1", "S0")),
    ],
)
def test_column_and_row_linears_with_sequence_parallelism_come_out(name, sizes, tp, parts, stored):
    """In the memory that this layout needs (and 2 % more), with 8 bytes of states a byte of parameters, 8 micro-batches; nothing else is prescribed."""
    price, block = prices(tp=tp), block_of(name, batch=sizes[0], sequence=sizes[1])
    known = rule_based(block, price, state_factor=8.0, num_micro_batches=8)
    layout = solve_layout(block, price, memory_bytes=1.02 * known.memory_bytes, state_factor=8.0, num_micro_batches=8)
    for part in parts[0]:
        assert reads(layout, part)[:2] == ("R", stored[0])
    for part in parts[1]:
        assert reads(layout, part)[:2] == ("S2", stored[1])
    assert dict(layout.borders)[block.outputs[0]] == "S1"
    kinds = [move.kind for move in layout.reshards if move.phase == "forward"]
    assert [kind for kind in kinds if kind != "local"] == ["all_gather", "reduce_scatter"] * 2
    assert layout.objective_s <= known.block_s * (1 + 1e-9)


def test_the_vocabulary_is_divided_in_the_head_and_the_embedding():
    price = prices()
    head = solve_layout(block_of("llama3-8b", "head"), price, fixed={"hidden_states": "S1"})
    assert reads(head, "lm_head/")[:2] == ("R", "S0")
    loss = next(op for op in head.ops if op.node_id.startswith("nll_loss_forward"))
    assert (loss.inputs[0], loss.outputs[0]) == ("S2", "P")
    embed = block_of("llama3-8b", "embedding")
    table, rows = "model.embed_tokens.weight", embed.outputs[0]
    layout = solve_layout(embed, price, fixed={table: "S0", rows: "S1"})
    assert layout.ops[0].inputs == ("R", "S0")
    assert [move.kind for move in layout.reshards if move.tensor_id == rows] == ["reduce_scatter"]


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "mixtral-8x7b", "t5-base", "vit-b", "deepseek-v3"])
@pytest.mark.parametrize("tp", [2, 4])
def test_no_layout_is_slower_than_the_rules(name, tp):
    price = prices(tp=tp)
    for block in spec_graph(resolve(name), batch=1, sequence=512).kinds:
        rule = rule_based(block, price)
        layout = solve_layout(block, price)
        assert layout.objective_s <= rule.block_s * (1 + 1e-9)
        tight = solve_layout(block, price, memory_bytes=rule.memory_bytes)
        assert layout.objective_s * (1 - 1e-9) <= tight.objective_s <= rule.block_s * (1 + 1e-9)
        assert tight.memory_bytes <= rule.memory_bytes * (1 + 1e-6)


def test_one_rank_divides_nothing():
    layout = solve_layout(block_of("gpt2", sequence=512), prices(tp=1))
    assert not layout.reshards
    assert {place for op in layout.ops for place in (*op.inputs, *op.outputs)} == {"R"}


def test_the_answer_depends_on_mesh_device_and_engine():
    block = block_of("gpt2", sequence=512)
    answers = [
        solve_layout(block, price).objective_s for price in (prices(tp=2), prices(tp=4), prices(cluster(), tp=2), prices("8xA100", tp=2))
    ]
    assert len(set(answers)) == len(answers)


def test_a_layout_that_no_rule_allows_is_refused():
    block, price = block_of("gpt2", sequence=512), prices(tp=2)
    layout = solve_layout(block, price)
    wrong = replace(layout.ops[0], inputs=("P",) * len(layout.ops[0].inputs))
    with pytest.raises(InputError, match="cannot run as"):
        price_layout(block, (wrong, *layout.ops[1:]), dict(layout.owners), price)


def test_every_solve_is_priced_again(monkeypatch):
    def cheaper(*args, **facts):
        found = price_layout(*args, **facts)
        return replace(found, block_s=0.9 * found.block_s)

    monkeypatch.setattr(solver, "price_layout", cheaper)
    with pytest.raises(AssertionError, match="its layout costs"):
        solve_layout(block_of("gpt2", sequence=512), prices(tp=2))


def test_the_same_problem_has_the_same_answer():
    block, price = block_of("mixtral-8x7b", sequence=512), prices()
    assert solve_layout(block, price) == solve_layout(block, price)


def test_an_irregular_block_is_proven():
    block = irregular_block(3, 300)
    layout = solve_layout(block, prices())
    assert layout.objective_s == pytest.approx(layout.bound_s, rel=1e-6)
    assert layout.objective_s < solve_layout(block, prices(tp=1)).objective_s
