"""Lowering: Graph + Job + Strategy + Engine -> StepWork, one rank's work.

A block goes through these passes, in this order, each a function of its own:

    planner.attention   attention without a flash kernel becomes matmuls and a softmax      (Strategy.flash_attention)
    planner.dropout     masks                                                              (Job.dropout)
    planner.sums        gradients that are reduced together are added first
    planner.siblings    linears of one input become one matmul                             (Engine.fused_input_gradient)
    planner.fuse        kernels merge, saved tensors shrink                                (Engine.fused_kernels or Strategy.compile)
    planner.lean        less is kept by attention and experts                              (Engine.lean_layers)
    planner.probabilities  what the loss keeps                                             (Engine.fp32_probabilities)
    planner.recompute   what stays alive and what runs again                               (Strategy.recompute)
    planner.exchange    communication between the kernels                                  (Strategy.mesh, sequence_parallel, cp_kind)
    planner.emit        local sizes: Work                                                  (planner.division)
    planner.liveness    peaks inside forward and backward

Model flops (the numerator of MFU) are those of the graph, not of the strategy: 2mnk of every matmul forward and backward (6 x active matmul
parameters a token when all are trained; frozen weights have no weight gradient) plus 3 x 2 b h q kv (d + dv) for every attention, the
full square even when causal: the convention of PaLM (Chowdhery et al. 2022, appendix B), 12 L h q per token. Recompute, masks and
optimizer do not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from costmodel.engine import Engine
from costmodel.schedule import rules
from costmodel.work import BlockWork, StageWork, StepWork
from planner.block_work import block_work, is_tied, prepare
from planner.division import Division
from planner.graph import Block, Graph, Node, Tensor
from planner.job import Job
from planner.stages import split
from planner.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweringCache:
    """Lowered blocks and cuts of one graph, keyed by exactly what they depend on. Pass the same object to many estimates of the same graph."""

    entries: dict[object, object] = field(default_factory=dict)

    def of(self, graph: Graph) -> LoweringCache:
        """This cache, emptied when it was filled for another graph object."""
        if self.entries.get("graph") is not graph:
            self.entries.clear()
            self.entries["graph"] = graph
        return self


def lower(graph: Graph, job: Job, strategy: Strategy, engine: Engine, cache: LoweringCache | None = None) -> StepWork:
    """The work of one optimizer step. Assumes that planner.validity found nothing wrong; raises InputError when the batch or the layers do not divide."""
    cache = (cache or LoweringCache()).of(graph)
    mesh = strategy.mesh
    dtype = storage_dtype(job.precision)
    parameter_dtype = dtype if engine.parameters_dtype == "compute" else engine.parameters_dtype
    return StepWork(
        stages=tuple(_stages(graph, job, strategy, engine, cache)),
        mesh=mesh,
        schedule=strategy.schedule,
        vpp=strategy.vpp,
        num_micro_batches=strategy.num_micro_batches(job.global_batch),
        zero_stage=strategy.zero_stage,
        compute_dtype=job.precision,
        parameter_dtype=parameter_dtype,
        gradient_dtype=parameter_dtype if engine.gradient_dtype == "parameter" else engine.gradient_dtype,
        optimizer=job.optimizer,
        tokens_per_step=float(job.global_batch * graph.sequence),
        model_flops_per_step=model_flops(graph, cache) * job.global_batch / graph.batch,
        sequence_parallel=strategy.sequence_parallel,
        tied_embedding_params=_tied_parameters(graph, division_of(graph, job, strategy), cache),
        compiled=strategy.compile,
    )


def storage_dtype(precision: str) -> str:
    """What dtype "compute" means for stored tensors: fp8 jobs keep bf16 activations and weights."""
    return "bf16" if precision == "fp8" else precision


def division_of(graph: Graph, job: Job, strategy: Strategy) -> Division:
    """The division of `graph` under `strategy`."""
    mesh = strategy.mesh
    return Division(
        batch_frac=strategy.micro_batch / graph.batch, compute_dtype=storage_dtype(job.precision), cp=mesh.cp, tp=mesh.tp, ep=mesh.ep,
        kv_divisor=min(mesh.tp, graph.num_kv_heads or mesh.tp), sequence_parallel=strategy.sequence_parallel and mesh.tp > 1,
        all_to_all=strategy.cp_kind == "all_to_all",
    )  # fmt: skip


def model_flops(graph: Graph, cache: LoweringCache | None = None) -> float:
    """Model flops of one pass over graph.batch sequences; see the module docstring for the convention."""
    entries = (cache or LoweringCache()).of(graph).entries
    if "model_flops" not in entries:
        per_kind = {block.kind_id: sum(map(_model_flops, block.nodes)) for block in graph.kinds}
        entries["model_flops"] = sum(per_kind[layer.kind_id] for layer in graph.layers)
    flops = entries["model_flops"]
    assert isinstance(flops, float)
    return flops


def _model_flops(node: Node) -> float:
    if node.op != "attention":
        return node.flops
    loop = {item.name: item.size for item in node.loops}
    square = 2.0 * loop["batch"] * loop["heads"] * loop["q"] * loop["kv"] * (loop["head_dim"] + loop["v_dim"])
    return square * (2.0 if node.phase == "backward" else 1.0)


# -- stages ----------------------------------------------------------------------------------------------------------------------------


def _stages(graph: Graph, job: Job, strategy: Strategy, engine: Engine, cache: LoweringCache) -> Iterator[StageWork]:
    division = division_of(graph, job, strategy)
    key = (
        "stages",
        strategy.mesh.pp,
        strategy.vpp,
        rules(strategy.schedule).v_shaped,
        strategy.stage_layers,
        strategy.recompute,
        strategy.recompute_layers,
        engine,
    )
    if key not in cache.entries:
        cache.entries[key] = _stage_kinds(graph, strategy, engine)
    chunks = cache.entries[key]
    assert isinstance(chunks, tuple)
    works: dict[tuple[str, str], BlockWork] = {}
    blocks: dict[tuple[tuple[str, str, int], ...], tuple[tuple[BlockWork, int], ...]] = {}
    boundaries: dict[str, float] = {}
    for stage_index, rank_index, runs in chunks:
        if runs not in blocks:
            for kind, policy, _ in runs:
                if (kind, policy) not in works:
                    works[kind, policy] = lower_block(graph.kind(kind), policy, division, job, strategy, engine, cache)
            blocks[runs] = tuple((works[kind, policy], count) for kind, policy, count in runs)
        first = runs[0][0]
        if first not in boundaries:
            boundaries[first] = _boundary_bytes(graph.kind(first), division, cache)
        yield StageWork(
            stage_index=stage_index,
            rank_index=rank_index,
            blocks=blocks[runs],
            boundary_bytes=boundaries[first] if stage_index else 0.0,
        )


def _stage_kinds(graph: Graph, strategy: Strategy, engine: Engine) -> tuple[tuple[int, int, tuple[tuple[str, str, int], ...]], ...]:
    """(stage, rank, runs of (kind, recompute policy, count)) of every chunk."""
    kinds = {layer.path: layer.kind_id for layer in graph.layers}
    roles = {block.kind_id: block.role for block in graph.kinds}
    chunks = []
    for stage in split(graph, strategy, engine):
        runs: list[tuple[str, str, int]] = []
        layer_index = 0
        for path in stage.layer_paths:
            kind = kinds[path]
            policy = "none"
            if roles[kind] == "layer":
                policy = "full" if layer_index < stage.recompute_layers else "selective" if strategy.recompute == "selective" else "none"
                layer_index += 1
            if runs and runs[-1][:2] == (kind, policy):
                runs[-1] = (kind, policy, runs[-1][2] + 1)
            else:
                runs.append((kind, policy, 1))
        chunks.append((stage.stage_index, stage.rank_index, tuple(runs)))
    return tuple(chunks)


def _boundary_bytes(block: Block, division: Division, cache: LoweringCache) -> float:
    """Bytes that enter a stage whose first block is `block`: its inputs that are as wide as its hidden state (hidden state, encoder output)."""
    key = ("boundary", block.kind_id, division)
    if key not in cache.entries:
        rows = [tensor for tensor in block.tensors if tensor.tensor_id in block.inputs and _is_row(tensor)]
        width = rows[0].shape[-1] if rows else 0
        cache.entries[key] = sum(division.num_bytes(tensor) for tensor in rows if tensor.shape[-1] == width)
    size = cache.entries[key]
    assert isinstance(size, float | int)
    return float(size)


def _is_row(tensor: Tensor) -> bool:
    return tensor.dtype == "compute" and bool({"batch", "tokens"} & set(tensor.axes))


def lower_block(
    block: Block, policy: str, division: Division, job: Job, strategy: Strategy, engine: Engine, cache: LoweringCache | None = None
) -> BlockWork:
    """One block of one rank for one micro-batch under recompute `policy` (none, selective, full)."""
    entries = (cache or LoweringCache()).entries
    form = {
        "flash": strategy.flash_attention,
        "dropout": job.dropout > 0.0,
        "merge": engine.fused_input_gradient and division.kv_divisor == division.tp,
        "fused": engine.fused_kernels or strategy.compile,
        "leaner": engine.lean_layers,
        "probabilities": engine.fp32_probabilities,
    }
    shape = (block.kind_id, *form.values())
    halves = rules(strategy.schedule).splits_backward
    key = ("block", shape, policy, division, job.precision, engine, halves)
    found = entries.get(key)
    if found is None:
        prepared = entries.get(("prepared", shape))
        if prepared is None:
            prepared = entries[("prepared", shape)] = prepare(block, **form)
        assert isinstance(prepared, Block)
        tied = _tied_names(cache)
        found = entries[key] = block_work(prepared, policy, division, engine, fp8=job.precision == "fp8", tied=tied, halves=halves)
    assert isinstance(found, BlockWork)
    return found


def _tied_names(cache: LoweringCache | None) -> tuple[str, ...]:
    graph = cache.entries.get("graph") if cache else None
    return tuple(second for _, second in graph.tied) if isinstance(graph, Graph) else ()


def _tied_parameters(graph: Graph, division: Division, cache: LoweringCache) -> float:
    """Local elements of embeddings that the head shares."""
    key = ("tied", division.tp)
    if key not in cache.entries:
        names = tuple(second for _, second in graph.tied)
        heads = (block for block in graph.kinds if block.role == "head")
        shares = [
            t.num_elements * division.share(t.axes) for block in heads for t in block.parameters if is_tied(t.tensor_id, block, names)
        ]
        cache.entries[key] = float(sum(shares))
    amount = cache.entries[key]
    assert isinstance(amount, float)
    return amount
