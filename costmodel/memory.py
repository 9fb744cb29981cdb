"""Device memory of every pipeline rank: what lives when.

Held through the step: parameters, optimizer state, fp32 masters, and gradients once they exist (flat buffers and DDP buckets: from the start; after the first
micro-batch: all; else block by block in backward). On top, at every block b of a chunk with n micro-batches in flight on the rank,

    forward of b :  saved of what is in flight, up to b + peak inside b + gathered
    backward of b:  saved of the other micro-batches and of blocks up to b + incoming gradient + peak inside b (recompute included) + gathered + gradients

gathered (costmodel.engine.Engine.fully_shard): ZeRO-3 holds its root (embedding, final norm, head) whole, this block, and one block whose buffer is being
filled or freed; in backward also the previous block's gradients on their way to the reduce-scatter and the root's gradients until the end; ZeRO-2 holds every
block between its forward and its backward; with a pipeline both hold everything. Peaks: init (weights in place), step (the largest moment), optimizer
(weights, gradients, states, temporaries of an update that is not fused). A CPU rank has no context, communicators or allocator: its bytes are live tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from costmodel.engine import Engine
from costmodel.estimate import Line, StageMemory
from costmodel.hardware import NodePool
from costmodel.optimizers import optimizer
from costmodel.schedule import Action, peak_in_flight
from costmodel.sharding import compute_bytes, local_elements, parameter_stage, reduces_each_micro_batch, shards, uses_torch_ddp
from costmodel.work import DTYPE_BYTES, BlockWork, StageWork, StepWork

# NCCL allocates its channel buffers per communicator: 342-392 MiB for the set of one 8-GPU node (aiconfigurator 0.12.0), about 0.13 GiB each.
COMMUNICATOR_BYTES = 0.13 * 2**30
# Pinned staging and data-loader memory per device (engineering default).
PINNED_HOST_BYTES = 4.0 * 2**30
NEVER_SHARDED = 9

Runs = tuple[tuple[BlockWork, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes one rank holds whatever runs. gradients_bytes: all of them, as they rest between micro-batches."""

    parameters_bytes: float
    gradients_bytes: float
    states_bytes: float
    copies_bytes: float
    library_bytes: float
    temporaries_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is alive at one point besides parameters, states and the saved tensors of whole micro-batches in flight.

    workspace_bytes counts from the full saved set of this micro-batch, so it is negative where not all of it exists yet.
    """

    workspace_bytes: float
    gathered_bytes: float
    gradients_bytes: float

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return self.workspace_bytes + self.gathered_bytes + self.gradients_bytes


def usable_bytes(pool: NodePool) -> float:
    """What the device offers to context, libraries and tensors."""
    return pool.device.memory_bytes


def stage_memories(step: StepWork, engine: Engine, pool: NodePool, orders: tuple[tuple[Action, ...], ...]) -> tuple[StageMemory, ...]:
    """Memory of every pipeline rank under the action lists `orders`."""
    return tuple(_rank_memory(step, engine, pool, rank, order) for rank, order in enumerate(orders))


def host_bytes(step: StepWork, engine: Engine, pool: NodePool) -> float:
    """Host memory of one node: pinned buffers and loaders per device, plus states that were offloaded."""
    cpu = pool.device.kind == "cpu"
    per_device = 0.0 if cpu else PINNED_HOST_BYTES
    if step.offload_optimizer or step.offload_parameters:
        held = [_held(step, engine, _blocks(step, rank), rank, cpu) for rank in range(step.mesh.pp)]
        per_device += max(item.states_bytes * step.offload_optimizer + item.parameters_bytes * step.offload_parameters for item in held)
    return per_device * pool.devices_per_node


def _blocks(step: StepWork, rank: int) -> Runs:
    return tuple(run for stage in step.stages if stage.rank_index == rank for run in stage.blocks)


def _held(step: StepWork, engine: Engine, blocks: Runs, rank: int, cpu: bool) -> Held:
    first, last = step.stages[0].rank_index, step.stages[-1].rank_index
    tied = step.tied_embedding_params if rank == last != first else 0.0

    def elements(stage: int, *, trainable: bool = True) -> float:
        own = sum(local_elements(block.parameters, step, stage, trainable=trainable) * repeat for block, repeat in blocks)
        return own + tied / shards(step, stage)[0]

    weight, gradient = float(DTYPE_BYTES[step.parameter_dtype]), float(DTYPE_BYTES[step.gradient_dtype])
    master = 4.0 if engine.master_weights and step.parameter_dtype != "fp32" else 0.0
    ddp_copy = engine.ddp_bucket_copy and uses_torch_ddp(step, engine)
    autocast = step.zero_stage == 0 and step.parameter_dtype == "fp32" and step.compute_dtype != "fp32"
    layers = sum(block.parameters.total * repeat for block, repeat in blocks if block.role != "embedding")
    largest = max(local_elements(block.parameters, step, 1, trainable=True) for block, _ in blocks)
    temporaries = 2.0 * largest if cpu else elements(1)
    whole = engine.fully_shard and step.zero_stage >= 2 and not reduces_each_micro_batch(step, engine)
    return Held(
        parameters_bytes=elements(parameter_stage(engine), trainable=False) * weight,
        gradients_bytes=elements(NEVER_SHARDED if whole else 2) * gradient,
        states_bytes=elements(1) * (optimizer(step.optimizer).state_bytes + master),
        copies_bytes=(elements(2) * gradient if ddp_copy else 0.0) + (layers * compute_bytes(step) if autocast else 0.0),
        library_bytes=0.0 if cpu else _library_bytes(step, engine, blocks),
        temporaries_bytes=elements(1) * engine.update_bytes if engine.fused_optimizer else temporaries * 4.0,
    )


def _library_bytes(step: StepWork, engine: Engine, blocks: Runs) -> float:
    """What libraries keep in the allocator: workspaces, the gather buffer of sequence parallelism, placeholders of weight gradients."""
    shapes = {item.name: item.num_bytes for block, _ in blocks if block.role == "layer" for item in block.weight_shapes}
    hidden = max((block.output_bytes for block, _ in blocks if block.role == "layer"), default=0.0)
    gathered = hidden * step.mesh.tp if engine.gather_buffer and step.sequence_parallel else 0.0
    return engine.workspace_bytes + gathered + (sum(shapes.values()) if engine.weight_gradient_placeholders else 0.0)


def _rank_memory(step: StepWork, engine: Engine, pool: NodePool, rank: int, order: tuple[Action, ...]) -> StageMemory:
    stages = [stage for stage in step.stages if stage.rank_index == rank]
    blocks, cpu = _blocks(step, rank), pool.device.kind == "cpu"
    held = _held(step, engine, blocks, rank, cpu)
    saved_bytes = {stage.stage_index: _saved(stage) for stage in stages}
    activations, live = peak_in_flight(order, saved_bytes, {stage.stage_index: _until_weights(stage, engine) for stage in stages})
    moment = max((point for stage in stages for point in _moments(stage, blocks, held, step, engine)), key=lambda point: point.total_bytes)
    boundaries = sum(_boundary_bytes(stage, step, engine, live.full[stage.stage_index]) for stage in stages)
    states = 0.0 if step.offload_optimizer else held.states_bytes
    saved = max(0.0, activations + min(0.0, moment.workspace_bytes))
    workspace = max(0.0, moment.workspace_bytes)
    logits = min(max((block.logits_bytes for block, _ in blocks), default=0.0), saved)
    copies = held.copies_bytes + held.library_bytes + boundaries
    tensors = held.parameters_bytes + moment.gradients_bytes + copies + states + saved + workspace + moment.gathered_bytes
    receive = sum(_boundary_bytes(stage, step, engine, 0) for stage in stages) if engine.pipeline_buffers else 0.0
    update = (
        held.parameters_bytes + _reduced_bytes(held, step, engine, blocks) + states + held.temporaries_bytes + receive + held.library_bytes
    )
    communicators = 0.0 if cpu else COMMUNICATOR_BYTES * _num_communicators(step)
    context = 0.0 if cpu else engine.context_bytes
    reserve = 0.0 if cpu else engine.allocator_reserve_frac * max(tensors, update)
    outside = communicators + context
    classes = (
        Line(name="parameters", amount=held.parameters_bytes, detail=f"stored in {step.parameter_dtype}"),
        Line(name="gradients", amount=moment.gradients_bytes, detail=f"{step.gradient_dtype}, ZeRO {step.zero_stage}"),
        Line(name="optimizer_state", amount=states, detail=step.optimizer),
        Line(name="activations", amount=saved - logits, detail=f"{live.total} micro-batches in flight"),
        Line(name="recompute_workspace", amount=workspace, detail="transient of the worst block: recompute, gradients of activations"),
        Line(name="logits", amount=logits, detail="kept by the head for its backward"),
        Line(name="gather_buffers", amount=moment.gathered_bytes + copies, detail="whole parameters, copies, stage boundaries, library workspaces"),
        Line(name="communicators", amount=communicators),
        Line(name="framework", amount=context, detail="context and libraries"),
        Line(name="reserve", amount=reserve, detail=f"{engine.allocator_reserve_frac:.0%} of the largest peak, held by the allocator"),
    )  # fmt: skip
    return StageMemory(
        rank_index=rank, classes=classes, init_peak_bytes=held.parameters_bytes + outside, step_peak_bytes=sum(line.amount for line in classes),
        optimizer_peak_bytes=outside + update + reserve, in_flight=float(live.total),
    )  # fmt: skip


def _reduced_bytes(held: Held, step: StepWork, engine: Engine, blocks: Runs) -> float:
    """Bytes of gradients when the optimizer runs: reduced, so sharded even where they accumulated whole."""
    if step.zero_stage < 2:
        return held.gradients_bytes
    size = float(DTYPE_BYTES[step.gradient_dtype])
    return sum(local_elements(block.parameters, step, 2, trainable=True) * repeat for block, repeat in blocks) * size


def _saved(stage: StageWork) -> float:
    return sum(block.saved_bytes * repeat for block, repeat in stage.blocks)


def all_backward_in_w(stage: StageWork, engine: Engine) -> bool:
    """Whether a split backward of `stage` does nothing for I and everything for W: torch's first stage, which sends no input gradient."""
    return engine.pipeline_buffers and stage.stage_index == 0


def _until_weights(stage: StageWork, engine: Engine) -> float:
    """Bytes one micro-batch holds between I and W of a split backward: what the weight gradients read, or with torch, whose I retains the autograd graph,
    everything saved and the gradients that I left for W."""
    if all_backward_in_w(stage, engine):
        return _saved(stage) + stage.blocks[-1][0].output_bytes
    kept = sum(block.weight_inputs_bytes * repeat for block, repeat in stage.blocks)
    more = sum((block.saved_bytes - block.weight_saved_bytes) * repeat for block, repeat in stage.blocks)
    return kept + (more if engine.pipeline_buffers else 0.0)


def _moments(stage: StageWork, blocks: Runs, held: Held, step: StepWork, engine: Engine) -> Iterator[Moment]:
    """The first and last block of every run, in forward and in backward."""
    size = float(DTYPE_BYTES[step.gradient_dtype])
    early = engine.flat_gradient_buffer or step.num_micro_batches > 1 or uses_torch_ddp(step, engine)
    total, before, unborn = _saved(stage), 0.0, 0.0
    for block, repeat in stage.blocks:
        # Outside the layers nothing accumulates inside the matmul.
        placeholders = engine.weight_gradient_placeholders and block.role == "layer"
        born = 0.0 if early else local_elements(block.parameters, step, 2, trainable=True) * size
        for index in sorted({1, repeat}):
            kept = before + block.saved_bytes * index
            forward = kept - block.saved_bytes + block.forward_peak_bytes - total
            inside = block.accumulate_peak_bytes if early and not placeholders else block.backward_peak_bytes
            backward = kept + inside + block.output_bytes - total
            alive = held.gradients_bytes - unborn - born * index if not early else held.gradients_bytes
            done = held.gradients_bytes if early else 0.0
            yield Moment(workspace_bytes=forward, gathered_bytes=_gathered(block, blocks, step, engine, False), gradients_bytes=done)
            yield Moment(
                workspace_bytes=backward, gathered_bytes=_gathered(block, blocks, step, engine, True), gradients_bytes=max(0.0, alive)
            )
        before += block.saved_bytes * repeat
        unborn += born * repeat


def _gathered(block: BlockWork, blocks: Runs, step: StepWork, engine: Engine, backward: bool) -> float:
    """Bytes of whole parameters, and of gradients not yet reduced, while `block` runs."""
    if step.zero_stage < 2 or step.mesh.size("dp_shard_cp") <= 1 or not engine.fully_shard:
        return 0.0
    size, gradient = compute_bytes(step), float(DTYPE_BYTES[step.gradient_dtype])
    everything = sum(other.parameters.total * repeat for other, repeat in blocks) * size
    if not reduces_each_micro_batch(step, engine):
        return everything
    root = [other for other, _ in blocks if other.role != "layer"]
    layers = [other.parameters for other, _ in blocks if other.role == "layer"]
    largest = max((shard.total for shard in layers), default=0.0)
    current = block.parameters if block.role == "layer" else None
    held = sum(other.parameters.total for other in root) * size + (largest + (current.total if current else 0.0)) * size
    if step.zero_stage == 2:
        held = max(held, everything)
    if not backward:
        return held
    queued = max((shard.trainable for shard in layers), default=0.0) if current else 0.0
    return held + (queued + sum(other.parameters.trainable for other in root if other.role == "head")) * gradient


def _boundary_bytes(stage: StageWork, step: StepWork, engine: Engine, in_flight: int) -> float:
    """Bytes that cross stages: what is received, and with torch pipelining every micro-batch's receive buffers and the outputs kept."""
    if step.mesh.pp == 1:
        return 0.0
    following = next((other for other in step.stages if other.stage_index == stage.stage_index + 1), None)
    received, sent = stage.boundary_bytes, following.boundary_bytes if following else 0.0
    if not engine.pipeline_buffers:
        return received + sent + (in_flight * sent if engine.keeps_stage_outputs else 0.0)
    # The first block's saved input is the receive buffer itself: not twice.
    return step.num_micro_batches * (received + sent) + in_flight * (sent - received)


def _num_communicators(step: StepWork) -> int:
    mesh = step.mesh
    return sum(mesh.size(axis) > 1 for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"))
