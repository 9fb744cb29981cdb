"""Lowering: Graph + Job + Strategy + Engine -> StepWork, one rank's work.

A block goes through these passes, in this order, each a function of its own:

    planner.attention   attention without a flash kernel becomes matmuls and a softmax      (Strategy.flash_attention)
    planner.dropout     masks                                                              (Job.dropout)
    planner.sums        gradients that are reduced together are added first
    planner.siblings    linears of one input become one matmul                             (Engine.fused_input_gradient)
    planner.fuse        kernels merge, saved tensors shrink                                (Engine.fused_kernels or Strategy.compile)
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
from dataclasses import dataclass, field, replace

from costmodel.engine import Engine
from costmodel.work import BlockWork, MemoryItem, ParameterShard, StageWork, StepWork
from planner.attention import unfuse_attention
from planner.division import Division, has_tokens, routed_tensors
from planner.dropout import add_dropout
from planner.emit import Emitter, linears
from planner.exchange import Item, base, exchanger
from planner.fuse import fuse
from planner.graph import Block, Graph, Node, Tensor
from planner.job import Job
from planner.liveness import peak_bytes
from planner.recompute import Residency, residency
from planner.siblings import merge_siblings
from planner.stages import split
from planner.strategy import Strategy
from planner.sums import sum_partials_first


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
    key = ("stages", strategy.mesh.pp, strategy.vpp, strategy.stage_layers, strategy.recompute, strategy.recompute_layers, engine)
    if key not in cache.entries:
        cache.entries[key] = _stage_kinds(graph, strategy, engine)
    chunks = cache.entries[key]
    assert isinstance(chunks, tuple)
    for stage_index, rank_index, runs in chunks:
        blocks = tuple(
            (lower_block(graph.kind(kind), policy, division, job, strategy, engine, cache), count) for kind, policy, count in runs
        )
        boundary = _boundary_bytes(graph.kind(runs[0][0]), division, cache) if stage_index else 0.0
        yield StageWork(stage_index=stage_index, rank_index=rank_index, blocks=blocks, boundary_bytes=boundary)


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


# -- blocks ----------------------------------------------------------------------------------------------------------------------------


def prepare(block: Block, *, flash: bool, dropout: bool, merge: bool, fused: bool) -> Block:
    """`block` as the engine's kernels run it, unsharded: attention, dropout, merged linears, fusion."""
    if not flash:
        block = unfuse_attention(block, dropout=dropout)
    if dropout:
        block = add_dropout(block)
    block = sum_partials_first(block)
    if merge:
        block = merge_siblings(block)
    return fuse(block) if fused else block


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
    }
    shape = (block.kind_id, *form.values())
    key = ("block", shape, policy, division, job.precision, engine)
    found = entries.get(key)
    if found is None:
        prepared = entries.get(("prepared", shape))
        if prepared is None:
            prepared = entries[("prepared", shape)] = prepare(block, **form)
        assert isinstance(prepared, Block)
        found = entries[key] = _lower(prepared, policy, division, job.precision == "fp8", engine, _tied_names(cache))
    assert isinstance(found, BlockWork)
    return found


def _tied_names(cache: LoweringCache | None) -> tuple[str, ...]:
    graph = cache.entries.get("graph") if cache else None
    return tuple(second for _, second in graph.tied) if isinstance(graph, Graph) else ()


def _lower(block: Block, policy: str, division: Division, fp8: bool, engine: Engine, tied: tuple[str, ...]) -> BlockWork:
    division = replace(division, routed=routed_tensors(block)) if division.ep > 1 else division
    tensors = {tensor.tensor_id: tensor for tensor in block.tensors}
    low = linears(block.nodes, tensors) if fp8 and block.role == "layer" else frozenset[str]()
    emitter = Emitter(division=division, engine=engine, tensors=tensors, fp8=low)
    held = residency(block, policy, selective=engine.selective_recompute, stops_early=engine.recompute_stops_early)
    forward, again, backward = _phases(block, held, division, engine)
    saved = _saved(held, (*again, *backward), emitter, fp8_copies=engine.fused_kernels)
    made = {name for item in forward for name in item.outputs}
    pinned = [name for name in made if name in saved] + list(block.outputs)
    incoming = [name for name in _incoming(block, tensors) if any(name in item.inputs for item in backward)]
    start = sum(saved.values()) + sum(map(emitter.size, incoming))

    def size(name: str) -> float:
        return 0.0 if _is_parameter_like(tensors[base(name)]) else saved.get(name, emitter.size(name))

    return BlockWork(
        kind_id=block.kind_id,
        variant=policy,
        role=block.role,
        forward=emitter.works(forward),
        backward=emitter.works(backward),
        recompute=emitter.works(again),
        parameters=parameter_shard(block, division, tied),
        saved=tuple(MemoryItem(name=name, num_bytes=amount) for name, amount in saved.items()),
        forward_peak_bytes=peak_bytes(forward, size, pinned=pinned),
        backward_peak_bytes=max(0.0, peak_bytes((*again, *backward), size, initial=(*saved, *incoming)) - start),
        output_bytes=sum(emitter.size(name) for name in block.outputs if has_tokens(tensors[name])),
        logits_bytes=sum(amount for name, amount in saved.items() if "vocab" in tensors[base(name)].axes),
    )


def _phases(
    block: Block, held: Residency, division: Division, engine: Engine
) -> tuple[tuple[Item, ...], tuple[Item, ...], tuple[Item, ...]]:
    """Forward, recompute and backward with their exchanges. Backward finds what recompute or (for kept tensors) forward gathered, if the engine keeps it;
    rows at the experts are always kept there."""
    insert = exchanger(block, division, engine).insert
    forward = insert(tuple(node for node in block.nodes if node.phase == "forward"))
    kept = frozenset(name for name in _gathered(forward, engine) if base(name) in held.kept)
    again = insert(held.again, kept)
    backward = insert(tuple(node for node in block.nodes if node.phase == "backward"), kept | _gathered(again, engine))
    return forward, again, backward


def _gathered(items: tuple[Item, ...], engine: Engine) -> frozenset[str]:
    names = {name for item in items for name in item.outputs}
    return frozenset(name for name in names if name.endswith("@routed") or (name.endswith("@whole") and engine.saves_gathered_input))


def _saved(held: Residency, later: tuple[Item, ...], emitter: Emitter, *, fp8_copies: bool) -> dict[str, float]:
    """Bytes of every kept tensor in the form backward reads. With `fp8_copies` what only fp8 matmuls read is kept in one byte (TransformerEngine)."""
    made: set[str] = set()
    readers: dict[str, list[Item]] = {}
    for item in later:
        for name in item.inputs:
            if name not in made:
                readers.setdefault(name, []).append(item)
        made.update(item.outputs)
    saved = {}
    for name in held.kept:
        forms = [form for form in readers if base(form) == name] or [name]
        for form in forms:
            only_fp8 = form in readers and all(isinstance(item, Node) and item.forward_id in emitter.fp8 for item in readers[form])
            low = fp8_copies and only_fp8 and emitter.tensors[name].dtype == "compute"
            saved[form] = emitter.size(form) * (0.5 if low else 1.0)
    return saved


def _incoming(block: Block, tensors: dict[str, Tensor]) -> list[str]:
    """Gradients of the block's outputs: input tensors that only backward reads."""
    read = {name for node in block.nodes if node.phase == "forward" for name in node.inputs}
    return [name for name, tensor in tensors.items() if tensor.kind == "input" and name not in read and name not in block.inputs]


def _is_parameter_like(tensor: Tensor) -> bool:
    """Parameters, buffers and gradients of parameters (no token axis): accounted by the cost model."""
    return tensor.kind in ("parameter", "buffer") or not has_tokens(tensor)


def parameter_shard(block: Block, division: Division, tied: tuple[str, ...] = ()) -> ParameterShard:
    """Elements of the block's parameters on one rank. Experts count as dense when ep == 1: tp divides them and data parallelism replicates them alike."""
    totals = {"dense": 0.0, "expert": 0.0, "frozen_dense": 0.0, "frozen_expert": 0.0}
    for tensor in block.parameters:
        if is_tied(tensor.tensor_id, block, tied):
            continue
        group = "expert" if "experts" in tensor.axes and division.ep > 1 else "dense"
        totals[group if tensor.trainable else f"frozen_{group}"] += division.num_elements(tensor)
    return ParameterShard(**totals)


def is_tied(tensor_id: str, block: Block, tied: tuple[str, ...]) -> bool:
    """Whether a parameter of a head is the second of a tied pair (named by its full path, or its path from some module on)."""
    return block.role == "head" and any(
        tensor_id == name or name.endswith(f".{tensor_id}") or tensor_id.endswith(f".{name}") for name in tied
    )


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
