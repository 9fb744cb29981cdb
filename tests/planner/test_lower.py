"""Lowering against textbook facts: activation bytes, collectives, flops, invariants of the mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.engine import Engine
from costmodel.work import BlockWork, Collective, Compute, StepWork, Work
from planner.graph import Graph
from planner.lower import LoweringCache, lower, model_flops
from planner.models.resolve import resolve, spec_graph
from planner.strategy import Strategy
from tests.planner.graphs import MEGATRON, TORCH, gpt, job, strategy

S, B, H, A = 32, 2, 64, 8
GPT = gpt(batch=1, sequence=S, hidden=H, heads=A, kv_heads=A)
SEPARATE = gpt(batch=1, sequence=S, hidden=H, heads=A, kv_heads=4, separate=True)


def _layer(graph: Graph, plan: Strategy, engine: Engine = MEGATRON, **changes: object) -> BlockWork:
    return next(block for stage in _step(graph, plan, engine, **changes).stages for block, _ in stage.blocks if block.role == "layer")


def _step(graph: Graph, plan: Strategy, engine: Engine = MEGATRON, **changes: object) -> StepWork:
    return lower(graph, job(**changes), plan, engine)


def _calls(works: tuple[Work, ...], axis: str = "tp") -> list[str]:
    return [work.kind for work in works if isinstance(work, Collective) and work.axis == axis and work.kind != "wait"]


def _flops(works: tuple[Work, ...], op_class: str = "") -> float:
    return sum(work.flops for work in works if isinstance(work, Compute) and op_class in ("", work.op_class))


def _statistics(block: BlockWork) -> float:
    """Bytes of the fp32 row statistics and log-sum-exps, which the textbook formulas leave out."""
    return sum(item.num_bytes for item in block.saved if item.name.endswith((".mean", ".rstd", "lse")))


# -- memory: Korthikanti et al. 2022, table 2 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activation_bytes_of_a_gpt_layer(tp: int, sequence_parallel: bool, recompute: str):
    if sequence_parallel and tp == 1:
        return
    plan = strategy(tp=tp, micro_batch=B, sequence_parallel=sequence_parallel, recompute=recompute, flash_attention=False)
    block = _layer(GPT, plan, dropout=0.1)
    sbh, scores = S * B * H, 5 * A * S / H
    formula = {
        "none": sbh / tp * (34 + scores) if sequence_parallel else sbh * (10 + (24 + scores) / tp),
        "selective": sbh / tp * 34 if sequence_parallel else sbh * (10 + 24 / tp),
        "full": 2 * sbh / tp if sequence_parallel else 2 * sbh,
    }
    assert block.saved_bytes - _statistics(block) == pytest.approx(formula[recompute])


def test_flash_attention_keeps_no_scores():
    """34 s b h without the attention term and, dropout being off, without the two masks."""
    block = _layer(GPT, strategy(micro_batch=B))
    assert block.saved_bytes - _statistics(block) == S * B * H * 32


def test_gathered_inputs_are_kept_by_dtensor_only():
    plan = strategy(tp=4, sequence_parallel=True)
    whole = {item.name: item.num_bytes for item in _layer(GPT, plan, TORCH).saved}
    local = {item.name: item.num_bytes for item in _layer(GPT, plan, MEGATRON).saved}
    assert whole["n1@whole"] == 4 * local["n1"]
    assert whole["x"] == local["x"]


def test_logits_have_a_line_of_their_own():
    head = _step(GPT, strategy(tp=2)).stages[-1].blocks[-1][0]
    assert head.role == "head"
    assert head.logits_bytes == S * 128 / 2 * 4  # Megatron's loss keeps fp32 probabilities


def test_peaks_cover_what_one_kernel_needs():
    """The backward of the second linear makes a 4h gradient from an h one; full recompute brings all activations back."""
    none, full = _layer(GPT, strategy(micro_batch=B)), _layer(GPT, strategy(micro_batch=B, recompute="full"))
    assert none.backward_peak_bytes >= 4 * H * S * B * 2
    assert full.backward_peak_bytes > none.saved_bytes - full.saved_bytes
    assert none.forward_peak_bytes >= none.saved_bytes - 2 * S * B * H


# -- communication ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [GPT, SEPARATE])
def test_tensor_parallel_layer_has_two_all_reduces_each_way(graph: Graph):
    block = _layer(graph, strategy(tp=4))
    assert _calls(block.forward) == ["all_reduce"] * 2
    assert _calls(block.backward) == ["all_reduce"] * 2


def test_unfused_projections_reduce_their_input_gradients_one_by_one():
    """q, k, v and the first linear of the MLP: what DTensor was measured to do (five with a gated MLP)."""
    block = _layer(SEPARATE, strategy(tp=4), TORCH)
    assert _calls(block.forward) == ["all_reduce"] * 2
    assert _calls(block.backward) == ["all_reduce"] * 4
    llama = spec_graph(resolve("llama3-8b"), sequence=128)
    assert _calls(_layer(llama, strategy(tp=4), TORCH).backward) == ["all_reduce"] * 5


@pytest.mark.parametrize("graph", [GPT, SEPARATE])
def test_sequence_parallel_layer(graph: Graph):
    """Two gathers and two scatters each way, and in backward Megatron gathers both inputs once more."""
    plan = strategy(tp=4, sequence_parallel=True)
    megatron, dtensor = _layer(graph, plan), _layer(graph, plan, TORCH)
    for block in (megatron, dtensor):
        assert _calls(block.forward) == ["all_gather", "reduce_scatter"] * 2
    assert sorted(_calls(megatron.backward)) == ["all_gather"] * 4 + ["reduce_scatter"] * 2
    assert sorted(_calls(dtensor.backward)) == ["all_gather"] * 2 + ["reduce_scatter"] * 2


def test_collectives_carry_the_hidden_state():
    for plan in (strategy(tp=4, micro_batch=B), strategy(tp=4, micro_batch=B, sequence_parallel=True)):
        calls = [work for work in _layer(GPT, plan).forward if isinstance(work, Collective)]
        assert {call.full_bytes for call in calls} == {2.0 * S * B * H}


def test_full_recompute_repeats_the_communication():
    block = _layer(GPT, strategy(tp=4, sequence_parallel=True, recompute="full"))
    assert _calls(block.recompute) == ["all_gather", "reduce_scatter"] * 2


def test_vocabulary_parallel_embedding_and_loss():
    step = _step(GPT, strategy(tp=4))
    embedding, head = step.stages[0].blocks[0][0], step.stages[-1].blocks[-1][0]
    assert _calls(embedding.forward) == ["all_reduce"]
    assert _calls(embedding.backward) == []
    assert _calls(head.forward) == ["all_reduce"] * 3
    assert [work.full_bytes for work in head.forward if isinstance(work, Collective)] == [4.0 * S] * 3
    assert _calls(head.backward) == ["all_reduce"]


def test_every_overlapping_call_ends_in_a_wait():
    works = _layer(GPT, strategy(tp=4, sequence_parallel=True)).backward
    pending = 0
    for work in works:
        if isinstance(work, Collective):
            pending = 0 if work.kind == "wait" else pending + work.overlaps
    assert pending == 0
    assert any(isinstance(work, Collective) and work.overlaps for work in works)


@pytest.mark.parametrize("cp", [2, 4])
def test_ring_attention_passes_keys_and_values(cp: int):
    block = _layer(GPT, strategy(cp=cp), replace(MEGATRON, supports_cp=True))
    ring = [work for work in block.forward if isinstance(work, Collective) and work.kind == "p2p"]
    assert len(ring) == cp - 1
    assert {call.full_bytes for call in ring} == {2.0 * S / cp * H * 2}
    back = [work for work in block.backward if isinstance(work, Collective) and work.kind == "p2p"]
    assert [call.full_bytes for call in back] == [2 * ring[0].full_bytes] * (cp - 1) + [ring[0].full_bytes]
    assert [call.overlaps for call in (*ring, *back)] == [True] * (2 * cp - 2) + [False]


@pytest.mark.parametrize("cp", [2, 4])
def test_ring_attention_runs_step_by_step(cp: int):
    whole, block = _layer(GPT, strategy()), _layer(GPT, strategy(cp=cp))
    for one, works in ((whole.forward, block.forward), (whole.backward, block.backward)):
        (alone,) = (work for work in one if isinstance(work, Compute) and work.op_class == "attention")
        parts = [work for work in works if isinstance(work, Compute) and work.op_class == "attention"]
        assert [part.num_kernels for part in parts] == [cp - 1, 1]
        assert {(part.m, part.n) for part in parts} == {(S // cp, S // cp)}
        assert sum(part.flops for part in parts) == pytest.approx(alone.flops / cp)
        between = works[works.index(parts[0]) + 1 : works.index(parts[1])]
        assert [work.kind for work in between if isinstance(work, Collective)] == ["wait"]
        merge = next(work for work in works if work.name.endswith("/merge"))
        assert merge.num_kernels == cp - 1
        assert merge.write_bytes == pytest.approx(0.75 * (cp - 1) * sum(part.write_bytes for part in parts))


def test_all_to_all_attention_exchanges_four_tensors_each_way():
    block = _layer(GPT, strategy(cp=4, cp_kind="all_to_all"))
    for works in (block.forward, block.backward):
        assert _calls(works, "cp") == ["all_to_all"] * 4
    attention = next(work for work in block.forward if isinstance(work, Compute) and work.op_class == "attention")
    assert (attention.m, attention.heads) == (S, A // 4)


def test_stage_boundary_is_the_hidden_state():
    assert [stage.boundary_bytes for stage in _step(GPT, strategy(pp=2, micro_batch=B)).stages] == [0.0, 2.0 * S * B * H]
    scattered = _step(GPT, strategy(pp=2, tp=4, cp=2, micro_batch=B, sequence_parallel=True)).stages[1]
    assert scattered.boundary_bytes == 2.0 * S * B * H / 8


# -- flops -----------------------------------------------------------------------------------------------------------------------------


def _total_flops(step: StepWork) -> float:
    """Flops of all ranks for one pass over the batch of every data-parallel rank."""
    per_rank = sum((_flops(b.forward) + _flops(b.backward)) * count for stage in step.stages for b, count in stage.blocks)
    return per_rank * step.mesh.tp * step.mesh.cp


@pytest.mark.parametrize(
    "plan",
    [
        strategy(tp=2), strategy(tp=8), strategy(tp=4, sequence_parallel=True), strategy(cp=4), strategy(cp=2, tp=4, sequence_parallel=True),
        strategy(cp=4, cp_kind="all_to_all"), strategy(pp=2, tp=2), strategy(pp=2, vpp=2, schedule="interleaved_1f1b"), strategy(pp=4),
    ],
)  # fmt: skip
@pytest.mark.parametrize("graph", [GPT, SEPARATE])
@pytest.mark.parametrize("engine", [MEGATRON, TORCH])
def test_parallelism_divides_the_flops_and_loses_none(graph: Graph, engine: Engine, plan: Strategy):
    """More ranks than kv heads repeat the k and v matmuls of every layer, three each; everything else is divided."""
    copies = max(1, plan.mesh.tp // graph.num_kv_heads) - 1
    replicated = 4 * 2 * 3 * (2.0 * S * H * (H // 2)) * copies
    assert _total_flops(_step(graph, plan, engine)) == pytest.approx(_total_flops(_step(graph, strategy(), engine)) + replicated)


def test_micro_batch_scales_everything_but_parameters():
    one, four = _layer(GPT, strategy(micro_batch=1)), _layer(GPT, strategy(micro_batch=4))
    assert four.saved_bytes == 4 * one.saved_bytes
    assert _flops(four.forward) == 4 * _flops(one.forward)
    assert four.parameters == one.parameters


@pytest.mark.parametrize("flash", [True, False])
def test_full_recompute_costs_exactly_one_forward(flash: bool):
    block = _layer(GPT, strategy(recompute="full", flash_attention=flash))
    assert _flops(block.recompute) == _flops(block.forward)
    assert _flops(_layer(GPT, strategy(recompute="none", flash_attention=flash)).recompute) == 0.0


def test_scores_cost_the_whole_square():
    flash, plain = (_layer(GPT, strategy(flash_attention=on)) for on in (True, False))
    square = 4.0 * S * S * H
    assert _flops(flash.forward, "attention") == square / 2
    assert _flops(plain.forward) - _flops(flash.forward) == square / 2
    assert _flops(plain.backward) - _flops(flash.backward) == 2 * square - 2.5 * square / 2


def test_model_flops_are_six_per_parameter_and_token():
    layer, head = GPT.kinds[1], GPT.kinds[2]
    matmul = 4 * (12 * H * H) + 128 * H
    assert model_flops(GPT) == 6.0 * matmul * S + 4 * 12.0 * S * S * H
    assert layer.num_parameters + head.num_parameters > 0
    step = _step(GPT, strategy(tp=2, dp=2), global_batch=16)
    assert step.model_flops_per_step == 16 * model_flops(GPT)
    assert step.tokens_per_step == 16 * S


# -- parameters and dtypes -------------------------------------------------------------------------------------------------------------


def test_parameters_are_divided_or_replicated_by_their_axes():
    whole, half = _layer(GPT, strategy()).parameters, _layer(GPT, strategy(tp=2)).parameters
    assert whole.dense == 12 * H * H + 2 * H
    assert half.dense == 6 * H * H + 2 * H
    assert whole.expert == 0.0


def test_key_value_heads_are_replicated_beyond_their_number():
    """4 kv heads over 8 ranks: each rank holds one head, twice 1/8 of k and v."""
    block = _layer(SEPARATE, strategy(tp=8))
    kv = H // 2
    assert block.parameters.dense == 2 * H + (H * H * 2 + 8 * H * H) / 8 + 2 * H * kv / 4
    attention = next(work for work in block.forward if isinstance(work, Compute) and work.op_class == "attention")
    assert (attention.heads, attention.kv_heads) == (1, 1)


def test_frozen_parameters_have_no_gradient():
    block = GPT.kinds[1]
    tensors = tuple(replace(tensor, trainable=tensor.tensor_id != "f1.weight") for tensor in block.tensors)
    graph = replace(GPT, kinds=(GPT.kinds[0], replace(block, tensors=tensors), GPT.kinds[2]))
    shard = _layer(graph, strategy(tp=2)).parameters
    assert shard.frozen_dense == 4 * H * H / 2
    assert shard.trainable == _layer(GPT, strategy(tp=2)).parameters.trainable - 4 * H * H / 2


@pytest.mark.parametrize("pp", [1, 2])
def test_tied_head_is_not_counted_again(pp: int):
    step = _step(gpt(tied=True), strategy(pp=pp, tp=2))
    assert step.tied_embedding_params == 128 * H / 2
    assert step.stages[-1].blocks[-1][0].parameters.dense == H
    assert _step(GPT, strategy(tp=2)).tied_embedding_params == 0.0


def test_dtypes_follow_the_engine():
    megatron, torch = _step(GPT, strategy()), _step(GPT, strategy(), TORCH)
    assert (megatron.parameter_dtype, megatron.gradient_dtype) == ("bf16", "fp32")
    assert (torch.parameter_dtype, torch.gradient_dtype) == ("fp32", "fp32")
    assert _layer(GPT, strategy(), precision="fp32").saved_bytes > 1.9 * _layer(GPT, strategy()).saved_bytes


def test_fp8_runs_linears_of_layers_in_fp8_after_casts():
    step = _step(GPT, strategy(), precision="fp8")
    layer, head = step.stages[0].blocks[1][0], step.stages[0].blocks[2][0]
    gemms = [work for work in layer.forward if isinstance(work, Compute) and work.op_class == "gemm"]
    assert [work.dtype for work in gemms] == ["fp8"] * 4
    assert {work.dtype for work in head.forward if isinstance(work, Compute)} == {"bf16"}
    casts = [work for work in layer.forward if work.name.endswith("cast_fp8")]
    assert [work.name for work in casts] == ["n1/cast_fp8", "context/cast_fp8", "n2/cast_fp8", "g/cast_fp8"]
    assert step.parameter_dtype == "bf16"
    assert layer.saved_bytes < _layer(GPT, strategy()).saved_bytes
    scores = _layer(GPT, strategy(flash_attention=False), precision="fp8")
    assert {work.dtype for work in scores.forward if isinstance(work, Compute) and "/flash/" in work.name} == {"bf16"}


# -- experts ---------------------------------------------------------------------------------------------------------------------------

MIXTRAL = spec_graph(
    resolve(
        {
            "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 8, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 128,
        }
    ),
    sequence=64,
)  # fmt: skip
ROWS = 2 * 64


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        (strategy(), 1), (strategy(dp=8, ep=8), 1), (strategy(dp=4, ep=2), 1), (strategy(tp=2), 2), (strategy(tp=4, sequence_parallel=True), 4),
        (strategy(dp=4, tp=2, ep=8, sequence_parallel=True), 2), (strategy(cp=2, dp=2, ep=4), 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("engine", [MEGATRON, TORCH])
def test_experts_compute_the_same_wherever_they_are(plan: Strategy, ranks: int, engine: Engine):
    """Balanced routing: expert parallelism moves rows and divides weights, it does not change the flops of a rank."""
    for phase in ("forward", "backward"):
        one, many = (getattr(_layer(MIXTRAL, p, engine), phase) for p in (strategy(), plan))
        assert _flops(many, "grouped_gemm") * ranks == pytest.approx(_flops(one, "grouped_gemm"))
        assert all(work.m and work.n and work.k for work in many if isinstance(work, Compute) and work.op_class == "grouped_gemm")


def test_expert_parallelism_dispatches_and_combines_each_way():
    block = _layer(MIXTRAL, strategy(dp=8, ep=8))
    for works in (block.forward, block.backward):
        calls = [work for work in works if isinstance(work, Collective)]
        assert [(call.kind, call.axis, call.full_bytes) for call in calls] == [("all_to_all", "ep", 2.0 * ROWS * 64)] * 2
    recompute = _layer(MIXTRAL, strategy(dp=8, ep=8, recompute="full"))
    assert _calls(recompute.recompute, "ep") == ["all_to_all"] * 2


def test_expert_weights_are_divided_by_ep_and_kept_whole_from_tp():
    weights = 8 * 3 * 64 * 96
    assert _layer(MIXTRAL, strategy(dp=8, ep=8)).parameters.expert == weights / 8
    folded = _layer(MIXTRAL, strategy(dp=4, tp=2, ep=8, sequence_parallel=True)).parameters
    assert folded.expert == weights / 8
    none = _layer(MIXTRAL, strategy(tp=2)).parameters
    assert none.expert == 0.0
    assert none.dense == folded.dense + weights / 2


def test_tensor_parallel_experts_sum_their_rows():
    block = _layer(MIXTRAL, strategy(tp=2))
    calls = [(work.kind, work.full_bytes) for work in block.forward if isinstance(work, Collective)]
    assert calls == [("all_reduce", 2.0 * 64 * 64), ("all_reduce", 2.0 * ROWS * 64)]


# -- cache -----------------------------------------------------------------------------------------------------------------------------


def test_cache_changes_nothing():
    cache = LoweringCache()
    plans = [
        strategy(tp=tp, pp=pp, micro_batch=mb, sequence_parallel=tp > 1, recompute=policy, flash_attention=flash)
        for tp in (1, 2) for pp in (1, 2) for mb in (1, 2) for policy in ("none", "selective", "full") for flash in (True, False)
    ]  # fmt: skip
    for _ in range(2):
        for engine in (MEGATRON, TORCH):
            for plan in plans:
                for dropout in (0.0, 0.1):
                    task = job(dropout=dropout)
                    assert lower(GPT, task, plan, engine, cache) == lower(GPT, task, plan, engine)
    other = gpt(layers=6, hidden=32)
    assert lower(other, job(), strategy(), MEGATRON, cache) == lower(other, job(), strategy(), MEGATRON)


def test_attention_that_is_not_divided_by_heads_sees_all_tokens():
    """Sequence parallelism divides tokens, attention mixes them: without a heads axis every tp rank does all of it, after gathering q, k and v."""
    block = GPT.kinds[1]
    tensors = tuple(replace(t, axes=tuple("" if axis == "heads" else axis for axis in t.axes)) for t in block.tensors)
    nodes = tuple(
        replace(node, loops=tuple(replace(loop, axis="" if "heads" in loop.axis else loop.axis) for loop in node.loops))
        for node in block.nodes
    )
    graph = replace(GPT, kinds=(GPT.kinds[0], replace(block, tensors=tensors, nodes=nodes), GPT.kinds[2]))
    layer, whole = _layer(graph, strategy(tp=4, sequence_parallel=True)), _layer(graph, strategy())
    assert _flops(layer.forward, "attention") == _flops(whole.forward, "attention")
    assert _flops(layer.forward, "gemm") == _flops(whole.forward, "gemm") / 4
    assert "qkv/all_gather" in {work.name for work in layer.forward}


def test_kernels_without_loops_do_their_share():
    """A patch convolution is priced by flops alone: they follow its activations."""
    vit = spec_graph(resolve("vit-b"), sequence=128)
    one, plan = (_step(vit, p).stages[0].blocks[0][0] for p in (strategy(), strategy(cp=1, micro_batch=4)))
    assert _flops(plan.forward) == 4 * _flops(one.forward) > 0.0


def test_every_family_loses_no_flops_to_parallelism():
    """Replicated parts (routers, latent projections, heads beyond their number) may be repeated, nothing may vanish."""
    for name in ("bert-base", "t5-small", "vit-l", "gemma2-2b", "deepseek-v2-lite", "qwen3-30b-a3b", "gpt-oss-20b"):
        graph = spec_graph(resolve(name), sequence=64)
        cache = LoweringCache()
        base = _total_flops(lower(graph, job(), strategy(), TORCH, cache))
        for plan in (strategy(tp=2), strategy(tp=2, sequence_parallel=True), strategy(cp=2), strategy(pp=2)):
            assert 0.999999 <= _total_flops(lower(graph, job(), plan, TORCH, cache)) / base < 1.1, (name, plan.mesh)
