"""Device memory of every pipeline rank: what lives when.

Held through the step: parameters, gradients (flat, or born block by block in backward), optimizer state, fp32 masters. On top, walking the rank's actions:

    forward of block b :  saved of the micro-batches in flight + saved of the blocks before b + peak inside b
    backward of block b:  saved of the others + saved of blocks up to b + incoming gradient + peak inside b (with recompute: its whole saved set again)
                          + gradients born so far + what ZeRO-3 has gathered (this block and the prefetched one) + gradients not yet reduced

Peaks: init (weights in place), step (largest of the above), optimizer (weights, gradients, states, temporaries of an update
that is not fused). A CPU rank has no
context, communicator or allocator overhead: its bytes are those of live tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.engine import Engine
from costmodel.estimate import Line, StageMemory
from costmodel.hardware import NodePool
from costmodel.optimizers import optimizer
from costmodel.schedule import Action, peak_in_flight
from costmodel.sharding import compute_bytes, local_elements, shards
from costmodel.work import DTYPE_BYTES, BlockWork, StageWork, StepWork

# NCCL allocates its channel buffers per communicator: 342-392 MiB for the set of one 8-GPU node (aiconfigurator 0.12.0), about 0.13 GiB each.
COMMUNICATOR_BYTES = 0.13 * 2**30
PINNED_HOST_BYTES_PER_DEVICE = 4.0 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes one rank holds whatever runs."""

    parameters_bytes: float
    gradients_bytes: float
    states_bytes: float
    buckets_bytes: float
    temporaries_bytes: float


def usable_bytes(pool: NodePool) -> float:
    """What the device offers to context, libraries and tensors."""
    return pool.device.memory_bytes


def stage_memories(step: StepWork, engine: Engine, pool: NodePool, orders: tuple[tuple[Action, ...], ...]) -> tuple[StageMemory, ...]:
    """Memory of every pipeline rank under the action lists `orders`."""
    return tuple(_rank_memory(step, engine, pool, rank, order) for rank, order in enumerate(orders))


def host_bytes(step: StepWork, engine: Engine, pool: NodePool) -> float:
    """Host memory of one node: pinned buffers and loaders per device, plus states that were offloaded."""
    per_device = PINNED_HOST_BYTES_PER_DEVICE if pool.device.kind != "cpu" else 0.0
    if step.offload_optimizer or step.offload_parameters:
        held = [_held(step, engine, _blocks(step, rank), rank) for rank in range(step.mesh.pp)]
        worst = max(item.states_bytes * step.offload_optimizer + item.parameters_bytes * step.offload_parameters for item in held)
        per_device += worst
    return per_device * pool.devices_per_node


def _blocks(step: StepWork, rank: int) -> list[tuple[BlockWork, int]]:
    return [run for stage in step.stages if stage.rank_index == rank for run in stage.blocks]


def _held(step: StepWork, engine: Engine, blocks: list[tuple[BlockWork, int]], rank: int) -> Held:
    def elements(stage: int, trainable: bool) -> float:
        return sum(local_elements(block.parameters, step, stage, trainable=trainable) * repeat for block, repeat in blocks)

    tied = step.tied_embedding_params if step.mesh.pp > 1 and rank == step.mesh.pp - 1 else 0.0
    weight, gradient = float(DTYPE_BYTES[step.parameter_dtype]), float(DTYPE_BYTES[step.gradient_dtype])
    trainable = elements(1, True) + tied / shards(step, 1)[0]
    state = optimizer(step.optimizer).state_bytes + (4.0 if engine.master_weights and step.parameter_dtype != "fp32" else 0.0)
    gradient_elements = elements(2, True) + tied / shards(step, 2)[0]
    unreduced = step.zero_stage >= 2 and not (engine.reduces_each_micro_batch and step.mesh.pp == 1)
    copied = engine.ddp_bucket_copy and step.zero_stage == 0 and step.mesh.size("dp_cp") > 1
    extra = gradient_elements * gradient if copied else 0.0
    if unreduced:
        extra = (elements(9, True)) * gradient
    return Held(
        parameters_bytes=(elements(3, False) + tied / shards(step, 3)[0]) * weight,
        gradients_bytes=gradient_elements * gradient,
        states_bytes=trainable * state,
        buckets_bytes=extra,
        temporaries_bytes=0.0 if engine.fused_optimizer else trainable * 4.0,
    )


def _rank_memory(step: StepWork, engine: Engine, pool: NodePool, rank: int, order: tuple[Action, ...]) -> StageMemory:
    stages = [stage for stage in step.stages if stage.rank_index == rank]
    blocks = _blocks(step, rank)
    held = _held(step, engine, blocks, rank)
    weights = {stage.stage_index: _saved(stage) for stage in stages}
    activations, live = peak_in_flight(order, weights)
    inside = max((_inside(stage, held, step, engine) for stage in stages), key=lambda item: item[0])
    logits = max((block.logits_bytes for block, _ in blocks), default=0.0)
    gathered = _gathered(stages, step)
    boundary = sum(stage.boundary_bytes for stage in stages) if step.mesh.pp > 1 else 0.0
    cpu = pool.device.kind == "cpu"
    tensors = (
        held.parameters_bytes
        + held.gradients_bytes
        + held.states_bytes
        + held.buckets_bytes
        + activations
        + inside[0]
        + gathered
        + boundary
    )
    tensors -= held.states_bytes * step.offload_optimizer + inside[1]
    reserve = 0.0 if cpu else engine.allocator_reserve_frac * tensors
    communicators = 0.0 if cpu else COMMUNICATOR_BYTES * _num_communicators(step)
    framework = (0.0 if cpu else engine.context_bytes) + reserve
    temporaries = held.temporaries_bytes
    fixed = communicators + framework
    states = 0.0 if step.offload_optimizer else held.states_bytes
    logits = min(logits, activations + inside[0])
    from_inside = min(logits, inside[0])
    classes = (
        Line(name="parameters", amount=held.parameters_bytes, detail=f"stored in {step.parameter_dtype}"),
        Line(
            name="gradients",
            amount=held.gradients_bytes + held.buckets_bytes - inside[1],
            detail=f"{step.gradient_dtype}, ZeRO {step.zero_stage}",
        ),
        Line(name="optimizer_state", amount=states, detail=step.optimizer),
        Line(name="activations", amount=activations - (logits - from_inside), detail=f"{sum(live.values())} micro-batches in flight"),
        Line(name="recompute_workspace", amount=inside[0] - from_inside, detail="largest transient of one block"),
        Line(name="logits", amount=logits, detail="head output, its fp32 copy and gradient"),
        Line(name="gather_buffers", amount=gathered + boundary, detail="gathered parameters and stage boundaries"),
        Line(name="communicators", amount=communicators),
        Line(name="framework", amount=framework, detail=f"context, and {engine.allocator_reserve_frac:.0%} allocator reserve"),
    )
    return StageMemory(
        rank_index=rank, classes=classes, init_peak_bytes=held.parameters_bytes + fixed, step_peak_bytes=sum(line.amount for line in classes),
        optimizer_peak_bytes=held.parameters_bytes + held.gradients_bytes + held.buckets_bytes + states + temporaries + fixed,
        in_flight=float(sum(live.values())),
    )  # fmt: skip


def _saved(stage: StageWork) -> float:
    return sum(block.saved_bytes * repeat for block, repeat in stage.blocks)


def _inside(stage: StageWork, held: Held, step: StepWork, engine: Engine) -> tuple[float, float]:
    """(bytes above the saved set of a full micro-batch at the worst point of its forward or backward, gradients not yet born there)."""
    size = float(DTYPE_BYTES[step.gradient_dtype])
    early = engine.flat_gradient_buffer or step.num_micro_batches > 1
    total = _saved(stage)
    best, best_unborn, before = float("-inf"), 0.0, 0.0
    unborn_before = 0.0
    for block, repeat in stage.blocks:
        saved = block.saved_bytes
        gradient = 0.0 if early else local_elements(block.parameters, step, 2, trainable=True) * size
        for index in {1, repeat}:
            kept = before + saved * index
            unborn = unborn_before + gradient * (index - 1)
            forward = kept - saved + block.forward_peak_bytes - total - (0.0 if early else held.gradients_bytes)
            backward = kept + block.backward_peak_bytes + block.output_bytes - total - unborn
            for amount, missing in ((backward, unborn), (forward, 0.0 if early else held.gradients_bytes)):
                if amount > best:
                    best, best_unborn = amount, missing
        before += saved * repeat
        unborn_before += gradient * repeat
    return best + best_unborn, best_unborn


def _gathered(stages: list[StageWork], step: StepWork) -> float:
    """Bytes of whole parameters and unreduced gradients that ZeRO-3 (two blocks) or ZeRO-2 of FSDP2 (every block) holds."""
    if step.zero_stage < 2 or step.mesh.size("dp_shard_cp") <= 1:
        return 0.0
    size = compute_bytes(step)
    wholes = [(block.parameters.total * size, repeat) for stage in stages for block, repeat in stage.blocks]
    largest = max(whole for whole, _ in wholes)
    gradient = max(block.parameters.trainable for stage in stages for block, _ in stage.blocks) * DTYPE_BYTES[step.gradient_dtype]
    if step.zero_stage == 2:
        return sum(whole * repeat for whole, repeat in wholes) + gradient
    second = largest if any(whole == largest and repeat > 1 for whole, repeat in wholes) else sorted(whole for whole, _ in wholes)[-2:][0]
    return largest + second + gradient


def _num_communicators(step: StepWork) -> int:
    mesh = step.mesh
    return sum(mesh.size(axis) > 1 for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"))
