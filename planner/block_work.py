"""One block of one rank for one micro-batch: from the eager kernels of a graph to `BlockWork`, by the passes listed in planner.lower."""

from __future__ import annotations

from dataclasses import dataclass, replace

from costmodel.engine import Engine
from costmodel.work import DTYPE_BYTES, BlockWork, MemoryItem, ParameterShard
from planner.attention import unfuse_attention
from planner.division import Division, has_tokens, routed_tensors
from planner.dropout import add_dropout
from planner.emit import Emitter, linears
from planner.exchange import MATMULS, Item, base, exchanger
from planner.fuse import fuse
from planner.graph import Block, Node, Tensor
from planner.lean import lean
from planner.liveness import peak_bytes
from planner.probabilities import keep_probabilities
from planner.recompute import Policy, Residency, residency
from planner.siblings import merge_siblings
from planner.split_backward import split_backward, weight_inputs
from planner.sums import sum_partials_first


def prepare(
    block: Block, *, flash: bool, dropout: bool, merge: bool, fused: bool, leaner: bool = False, probabilities: bool = False
) -> Block:
    """`block` as the engine's kernels run it, unsharded: attention, dropout, merged linears, fusion, what the loss keeps."""
    if not flash:
        block = unfuse_attention(block, dropout=dropout)
    if dropout:
        block = add_dropout(block)
    block = sum_partials_first(block)
    if merge:
        block = merge_siblings(block)
    if fused:
        block = fuse(block)
    if leaner:
        block = lean(block)
    return keep_probabilities(block) if probabilities else block


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProgram:
    """Kernels and exchanges of one rank in order: forward, then (recompute and) backward, and what stays alive between them."""

    forward: tuple[Item, ...]
    recompute: tuple[Item, ...]
    backward: tuple[Item, ...]
    held: Residency


def program(block: Block, policy: Policy, division: Division, engine: Engine) -> BlockProgram:
    """The program of a prepared block under recompute `policy`.

    Backward finds gathered what recompute or (for kept tensors) forward gathered, if the engine keeps that; rows at the experts are always kept there.
    """
    held = residency(block, policy, selective=engine.selective_recompute, stops_early=engine.recompute_stops_early)
    insert = exchanger(block, division, engine).insert
    forward = insert(tuple(node for node in block.nodes if node.phase == "forward"))
    kept = frozenset(name for name in gathered(forward, engine) if base(name) in held.kept)
    again = insert(held.again, kept)
    backward = insert(tuple(node for node in block.nodes if node.phase == "backward"), kept | gathered(again, engine))
    return BlockProgram(forward=forward, recompute=again, backward=backward, held=held)


def block_work(
    block: Block, policy: Policy, division: Division, engine: Engine, *, fp8: bool = False, tied: tuple[str, ...] = (), halves: bool = False
) -> BlockWork:
    """The work of a prepared block. `fp8`: linears of layers run in fp8. `tied`: names of parameters that another block counts. `halves`: backward also in
    halves (planner.split_backward)."""
    division = replace(division, routed=routed_tensors(block)) if division.ep > 1 else division
    tensors = {tensor.tensor_id: tensor for tensor in block.tensors}
    low = linears(block.nodes, tensors) if fp8 and block.role == "layer" else frozenset[str]()
    emitter = Emitter(division=division, engine=engine, tensors=tensors, fp8=low)
    steps = program(block, policy, division, engine)
    later = (*steps.recompute, *steps.backward)
    saved = _saved(steps.held, later, emitter, fp8_copies=engine.fused_kernels)
    forward_peak, backward_peak, accumulate_peak = _peaks(block, steps, saved, emitter)
    of_input, of_weight = split_backward(steps.backward, block) if halves else ((), ())
    read = [name for name in weight_inputs(of_weight) if not is_parameter_like(emitter.tensors[base(name)])]
    return BlockWork(
        kind_id=block.kind_id,
        variant=policy if isinstance(policy, str) else "tensors",
        role=block.role,
        forward=emitter.works(steps.forward),
        backward=emitter.works(steps.backward),
        recompute=emitter.works(steps.recompute),
        parameters=parameter_shard(block, division, tied),
        saved=tuple(MemoryItem(name=name, num_bytes=amount) for name, amount in saved.items()),
        forward_peak_bytes=forward_peak,
        backward_peak_bytes=backward_peak,
        accumulate_peak_bytes=accumulate_peak,
        weight_shapes=_weight_shapes(steps.backward, emitter),
        output_bytes=sum(emitter.size(name) for name in block.outputs if has_tokens(tensors[name])),
        logits_bytes=sum(amount for name, amount in saved.items() if "vocab" in tensors[base(name)].axes),
        input_gradient=emitter.works(of_input),
        weight_gradient=emitter.works(of_weight),
        weight_inputs_bytes=sum(saved.get(name, emitter.size(name)) for name in read),
        weight_saved_bytes=sum(saved.get(name, 0.0) for name in read),
    )


def _peaks(block: Block, steps: BlockProgram, saved: dict[str, float], emitter: Emitter) -> tuple[float, float, float]:
    """Most bytes alive in forward beyond the inputs; in (recompute and) backward beyond what was saved and the incoming gradient; the same when weight
    gradients are tensors of their own until they have been added up."""
    later = (*steps.recompute, *steps.backward)
    made = {name for item in steps.forward for name in item.outputs}
    pinned = [*(name for name in made if name in saved), *block.outputs]
    incoming = [name for name in _incoming(block, emitter.tensors) if any(name in item.inputs for item in steps.backward)]

    def size(name: str) -> float:
        return 0.0 if is_parameter_like(emitter.tensors[base(name)]) else saved.get(name, emitter.size(name))

    def passing(name: str) -> float:
        tensor = emitter.tensors[base(name)]
        return emitter.size(name) if tensor.kind == "activation" and is_parameter_like(tensor) else 0.0

    initial = (*saved, *incoming)
    start = sum(map(size, initial))
    backward, accumulate = (max(0.0, peak_bytes(later, size, initial=initial, passing=more) - start) for more in (None, passing))
    return peak_bytes(steps.forward, size, pinned=pinned), backward, accumulate


def _weight_shapes(backward: tuple[Item, ...], emitter: Emitter) -> tuple[MemoryItem, ...]:
    """Bytes of every distinct shape of weight whose gradient a matmul makes; the weights of a grouped matmul are one for each expert."""
    shapes = {}
    for item in backward:
        if isinstance(item, Node) and item.role == "wgrad" and item.op in MATMULS:
            loops = emitter.division.loops(item)
            m, n = loops.get("m", 1), loops.get("n", 1)
            shapes[f"{m} x {n}"] = float(m * n * DTYPE_BYTES[emitter.division.compute_dtype])
    return tuple(MemoryItem(name=name, num_bytes=size) for name, size in sorted(shapes.items()))


def gathered(items: tuple[Item, ...], engine: Engine) -> frozenset[str]:
    """Gathered forms that `items` make and later phases find again."""
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


def is_parameter_like(tensor: Tensor) -> bool:
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
    """Whether a parameter outside the layers is the second of a tied pair (named by its full path, or its path from some module on)."""
    return block.role != "layer" and any(
        tensor_id == name or name.endswith(f".{tensor_id}") or tensor_id.endswith(f".{name}") for name in tied
    )
