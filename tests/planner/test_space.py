"""The space: complete, without duplicates, within the limits of engine, model and cluster; restrictions are obeyed and strict."""

from __future__ import annotations

import pytest

from costmodel.errors import InputError
from costmodel.schedule import problem, rules
from planner.restrict import parse_restrictions
from planner.space import Branch, Extents, Rejected, describe, divisors
from tests.planner.samples import space


def split(spanned):
    items = list(spanned.branches())
    return [item for item in items if isinstance(item, Branch)], [item for item in items if isinstance(item, Rejected)]


@pytest.mark.parametrize("engine_name", ["torch", "torchtitan", "megatron"])
@pytest.mark.parametrize("num_experts", [0, 8])
def test_members_are_valid_and_distinct(engine_name, num_experts):
    spanned = space(engine_name=engine_name, num_experts=num_experts, num_nodes=3, global_batch=48, num_layers=6)
    branches, _ = split(spanned)
    strategies = [strategy for branch in branches for strategy in branch.strategies()]
    assert len(strategies) == len(set(strategies)) == sum(branch.options.count for branch in branches)
    for strategy in strategies:
        mesh = strategy.mesh
        assert mesh.num_devices == spanned.cluster.num_devices
        assert mesh.dp_shard * mesh.cp * mesh.tp % mesh.ep == 0
        assert mesh.tp <= spanned.cluster.pool.fast_domain
        assert (strategy.schedule == "none") == (mesh.pp == 1)
        assert strategy.zero_stage in spanned.engine.zero_stages
        assert problem(strategy.schedule, pp=mesh.pp, vpp=strategy.vpp, num_micro_batches=strategy.num_micro_batches(48)) is None
        assert strategy.recompute == "none" or not (spanned.engine.pipeline_buffers and rules(strategy.schedule).splits_backward)
        assert mesh.pp * strategy.vpp <= 6
        assert not strategy.sequence_parallel or mesh.tp > 1
        strategy.num_micro_batches(48)


def test_divisors_that_are_no_powers_of_two():
    branches, _ = split(space("tp=1,recompute=none", num_nodes=3, global_batch=120, num_layers=12))
    assert {branch.mesh.pp for branch in branches} == {1, 2, 3, 4, 6, 8, 12}
    assert {branch.micro_batch for branch in branches if branch.mesh.dp == 24} == {1, 5}
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)


def test_tp_leaves_the_fast_domain_only_when_asked():
    branches, rejected = split(space(num_nodes=2, heads=64))
    assert max(branch.mesh.tp for branch in branches) == 8
    assert "tensor parallel would leave the fast domain" in {item.reason for item in rejected}
    branches, _ = split(space("tp=16", num_nodes=2, heads=64))
    assert {branch.mesh.tp for branch in branches} == {16}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"heads": 6}, "tensor parallel does not divide the model's heads"),
        ({"num_layers": 2}, "more pipeline stages than layers"),
        ({"global_batch": 3}, "the global batch does not divide over the data-parallel ranks"),
        ({"engine_name": "torch"}, "engine torch has no context parallelism"),
        ({"engine_name": "torchtitan", "seq_len": 6}, "the sequence does not divide over context parallel"),
        ({"engine_name": "torchtitan", "num_experts": 6}, "expert parallel does not divide the experts"),
        ({"engine_name": "torch", "num_experts": 8}, "engine torch has no expert parallelism"),
    ],
)
def test_what_cannot_run_is_said(changes, reason):
    _, rejected = split(space(**changes))
    assert reason in {item.reason for item in rejected}
    assert all(item.what for item in rejected)


@pytest.mark.parametrize(
    ("fix", "holds"),
    [
        ("tp=2", lambda s: s.mesh.tp == 2),
        ("tp=1|4, pp<=2", lambda s: s.mesh.tp in (1, 4) and s.mesh.pp <= 2),
        ("dp>1", lambda s: s.mesh.dp > 1),
        ("dp=4,zero=3", lambda s: s.mesh.dp == 4 and s.zero_stage == 3),
        ("recompute!=none", lambda s: s.recompute != "none"),
        ("recompute=first_k,recompute_layers=2", lambda s: s.recompute_layers == 2),
        ("mb>=4", lambda s: s.micro_batch >= 4),
        ("num_micro_batches<8", lambda s: s.num_micro_batches(16) < 8),
        ("schedule=gpipe", lambda s: s.schedule == "gpipe"),
        ("sp=false", lambda s: not s.sequence_parallel),
        ("compile=true,flash=off", lambda s: s.compile and not s.flash_attention),
        (
            {"tp": 2, "pp": "<=2", "recompute": ("full", "none")},
            lambda s: s.mesh.tp == 2 and s.mesh.pp <= 2 and s.recompute in ("full", "none"),
        ),
    ],
)
def test_restrictions_are_obeyed(fix, holds):
    branches, _ = split(space(fix))
    strategies = [strategy for branch in branches for strategy in branch.strategies()]
    assert strategies
    assert all(holds(strategy) for strategy in strategies)


def test_restrictions_only_remove():
    everything = {strategy for branch in split(space())[0] for strategy in branch.strategies()}
    some = {strategy for branch in split(space("tp<=4,zero!=2"))[0] for strategy in branch.strategies()}
    assert some == {strategy for strategy in everything if strategy.mesh.tp <= 4 and strategy.zero_stage != 2}


@pytest.mark.parametrize(
    "fix",
    [
        "tp", "tp=", "=8", "tp=0", "tp=-1", "tp=two", "tp=2,tp=4", "speed=9", "recompute=some", "recompute<=full", "tp<=1|2", "zero=x", "sp=maybe",
        "tp=2,,pp=1", "schedule=none|zigzag",
    ],
)  # fmt: skip
def test_bad_restrictions_are_refused(fix):
    with pytest.raises(InputError) as caught:
        parse_restrictions(fix)
    assert caught.value.where == "--fix"
    assert caught.value.remedy


def test_restrictions_print_as_they_parse():
    text = "tp=2|4,pp<=4,recompute!=none,sequence_parallel=true"
    assert str(parse_restrictions(text)) == text
    assert parse_restrictions("") == parse_restrictions(None)


def test_chains_grow_in_recompute():
    branches, _ = split(space("pp=1,tp=8", num_layers=4))
    for branch in branches:
        for chain in branch.chains():
            members = [chain.member(index) for index in range(chain.count)]
            assert [s.recompute for s in members] in (["none", "first_k", "first_k", "first_k", "full"], ["selective"])
            assert [s.recompute_layers for s in members] in ([0, 1, 2, 3, 0], [0])
            assert chain.part(1).count == chain.count - 1
            assert chain.member(-1) == members[-1]


def test_describe():
    branches, _ = split(space("pp=2,tp=2,dp_shard=2,mb=1,schedule=interleaved_1f1b,recompute=full,zero=3,sp=true"))
    (strategy,) = [strategy for branch in branches for strategy in branch.strategies() if strategy.vpp == 2]
    assert (
        describe(strategy)
        == "pp 2 x dp_shard 2 x tp 2, micro-batch 1, ZeRO-3, interleaved_1f1b x 2 chunks, sequence parallel, recompute full"
    )


def test_extents_of_a_graph():
    from planner.models import resolve, spec_graph

    extents = Extents.of(spec_graph(resolve("llama3-8b"), sequence=128))
    assert extents.num_layers == 32
    assert {("heads", 32), ("kv_heads", 8), ("ffn", 14336)} <= set(extents.tp_extents)
