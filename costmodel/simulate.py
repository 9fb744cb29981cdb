"""One optimizer step on the clock: blocks -> chunks -> pipeline -> gradient reduction -> optimizer, and the memory beside it.

Per chunk and micro-batch, forward and backward are sums over blocks (costmodel.blocks) plus what ZeRO exposes (costmodel.sharding), and at least the host's
dispatch of the kernels. The schedule simulator places them; after the last backward of a rank come the reductions no backward hid and the optimizer. The
critical rank is the one whose sum ends last; its decomposition is the estimate and adds up to step_s exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel import schedule as schedules
from costmodel.blocks import Amounts, Machine, Phase, price_block, price_halves, total_phase
from costmodel.collectives import collective_s
from costmodel.compute import peak_flops
from costmodel.engine import Engine
from costmodel.errors import InputError
from costmodel.estimate import Estimate, Line, StageMemory
from costmodel.hardware import Cluster
from costmodel.memory import all_backward_in_w, host_bytes, stage_memories, usable_bytes
from costmodel.mesh import Group
from costmodel.optimizers import optimizer, step_bytes_per_element
from costmodel.profiles import links
from costmodel.schedules.busy import busy_s
from costmodel.schedules.steady import runs
from costmodel.schedules.timeline import StageSeconds
from costmodel.sharding import (
    Traffic,
    local_elements,
    overlaps_reduction,
    prefetched_and_reduced_s,
    prefetched_s,
    reduced_behind_s,
    reduces_each_micro_batch,
    traffic,
)  # fmt: skip
from costmodel.work import DTYPE_BYTES, StageWork, StepWork

# Host time of one kernel in a torch.compile'd region over eager dispatch: the wrapper calls kernels without the dispatcher and autograd.
COMPILED_LAUNCH_FRAC = 0.5

# What a hidden collective takes from the kernels beside it: NCCL's bulk protocol runs on 16 to 24 of an A100's 108 or an H100's 132 cores.
CONTENTION_FRAC = 0.15

MODEL_FLOPS = "6 x active matmul parameters x tokens + attention as full square (PaLM), no recompute"

Priced = dict[int, tuple[Phase, Phase, tuple[Phase, Phase], Traffic]]


Seconds = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedStage:
    """One stage priced. phases and wall_s by kind of action (F, B, I, W), per micro-batch; per block (in execution order of its phase) compute, gather and
    reduction."""

    phases: dict[str, Phase]
    wall_s: dict[str, float]
    forward_blocks: Seconds
    backward_blocks: Seconds
    gathers: Seconds
    reduces: Seconds

    def host_s(self, kind: str) -> float:
        """Host-bound excess per micro-batch."""
        return max(0.0, self.wall_s[kind] - self.phases[kind].device_s)


def estimate_step(step: StepWork, cluster: Cluster, engine: Engine) -> Estimate:
    """Seconds and bytes of one optimizer step of `step` on `cluster` under `engine`.

    Raises InputError when the mesh needs more devices than there are, the schedule cannot run, or the device lacks the dtype.
    """
    mesh, pool = step.mesh, cluster.pool
    if mesh.num_devices > cluster.num_devices:
        raise InputError(
            f"the mesh needs {mesh.num_devices} devices, {cluster.name} has {cluster.num_devices}",
            where="Strategy.mesh",
            remedy="use a smaller mesh",
        )
    schedule = step.schedule if mesh.pp > 1 else "none"
    schedules.check(schedule, pp=mesh.pp, vpp=step.vpp, num_micro_batches=step.num_micro_batches)
    machine = Machine.of(pool, mesh, engine)
    priced: Priced = {}
    chunks = [_price_chunk(stage, step, engine, machine, priced) for stage in step.stages]
    rank = _critical_rank(step, engine, machine, chunks, schedule)
    few = schedules.fewest(schedule, pp=mesh.pp, num_micro_batches=step.num_micro_batches)
    orders = schedules.actions(schedule, pp=mesh.pp, vpp=step.vpp, num_micro_batches=few)
    memories = stage_memories(step, engine, pool, orders)
    return _assemble(step, cluster, engine, machine, chunks, rank, memories)


def least_step_s(step: StepWork, cluster: Cluster, engine: Engine) -> float:
    """What `estimate_step` never falls below, without playing the schedule: busy_s of the priced stages and of what each rank does once a step.

    Assumes that the schedule can run.
    """
    machine = Machine.of(cluster.pool, step.mesh, engine)
    priced: Priced = {}
    same: dict[int, PricedStage] = {}
    chunks = []
    for stage in step.stages:
        if engine.overlap_pipeline and id(stage.blocks) in same:
            chunks.append(same[id(stage.blocks)])
            continue
        chunks.append(_price_chunk(stage, step, engine, machine, priced))
        same[id(stage.blocks)] = chunks[-1]
    splits = schedules.rules(step.schedule).splits_backward
    extra_s = []
    for index in range(step.mesh.pp):
        mine = [chunk for chunk, stage in zip(chunks, step.stages, strict=True) if stage.rank_index == index]
        once_s = _step_traffic(mine, step, engine)[0]
        extra_s.append(once_s + _tied_s(step, machine, index) + _optimizer_s(step, engine, machine, index))
    seconds = [(stage.rank_index, _passing_s(chunk, splits=splits)) for chunk, stage in zip(chunks, step.stages, strict=True)]
    return busy_s(seconds, step.num_micro_batches, extra_s, fills=not splits)


def _passing_s(chunk: PricedStage, *, splits: bool) -> float:
    """One micro-batch forward and backward, whole or in halves."""
    wall = chunk.wall_s
    return wall["F"] + (min(wall["B"], wall["I"] + wall["W"]) if splits else wall["B"])


def _price_chunk(stage: StageWork, step: StepWork, engine: Engine, machine: Machine, priced: Priced) -> PricedStage:
    runs, splits = [], schedules.rules(step.schedule).splits_backward
    for block, repeat in stage.blocks:
        if id(block) not in priced:
            halves = price_halves(block, machine) if splits else (Phase(), Phase())
            priced[id(block)] = (*price_block(block, machine), halves, traffic(block.parameters, step, machine, engine))
        runs.append((priced[id(block)], repeat))
    one_by_one = [price for price, repeat in runs for _ in range(repeat)]
    forward_blocks = tuple(forward.device_s for forward, _, _, _ in one_by_one)
    backward_blocks = tuple(backward.device_s for _, backward, _, _ in reversed(one_by_one))
    gathers = tuple(moved.gather_s for _, _, _, moved in one_by_one)
    reduces = tuple(moved.reduce_s for _, _, _, moved in reversed(one_by_one))
    sharded = _sharding_phases(forward_blocks, backward_blocks, gathers, reduces, step, engine)
    hops = _blocking_hops(stage, step, engine, machine)
    phases = {
        "F": total_phase([*((price[0], repeat) for price, repeat in runs), (sharded[0], 1), (hops, 1)]),
        "B": total_phase([*((price[1], repeat) for price, repeat in runs), (sharded[1], 1), (hops, 1)]),
    }
    if splits and not all_backward_in_w(stage, engine):
        phases["I"] = total_phase([*((price[2][0], repeat) for price, repeat in runs), (sharded[1], 1), (hops, 1)])
        phases["W"] = total_phase((price[2][1], repeat) for price, repeat in runs)
    else:
        phases |= {"I": Phase(), "W": phases["B"]}
    return PricedStage(
        phases=phases, wall_s={kind: _wall_s(phase, step, engine, machine) for kind, phase in phases.items()},
        forward_blocks=forward_blocks, backward_blocks=backward_blocks, gathers=gathers, reduces=reduces,
    )  # fmt: skip


def _blocking_hops(stage: StageWork, step: StepWork, engine: Engine, machine: Machine) -> Phase:
    """What a stage's transfers from and to its neighbours cost per micro-batch and direction when they run in line with its kernels."""
    if engine.overlap_pipeline or step.mesh.pp == 1:
        return Phase()
    neighbours = sum(abs(other.stage_index - stage.stage_index) == 1 and other.rank_index != stage.rank_index for other in step.stages)
    boundary = max(other.boundary_bytes for other in step.stages)
    return Phase(exposed=(("pp", neighbours * machine.collective_s("p2p", boundary, "pp")),))


def _wall_s(phase: Phase, step: StepWork, engine: Engine, machine: Machine) -> float:
    """The device's seconds, or the host's when dispatch takes longer; a CPU rank dispatches and computes on the same core."""
    host = phase.num_kernels * engine.launch_s * (COMPILED_LAUNCH_FRAC if step.compiled else 1.0)
    return phase.device_s + host if machine.pool.device.kind == "cpu" else max(phase.device_s, host, phase.stall_s)


def _sharding_phases(
    forward: Seconds, backward: Seconds, gathers: Seconds, reduces: Seconds, step: StepWork, engine: Engine
) -> tuple[Phase, Phase]:
    """What every micro-batch exposes and hides of ZeRO-2/3 gathers and reductions, forward and backward."""
    each = reduces_each_micro_batch(step, engine)
    if step.zero_stage < 3 and not (step.zero_stage == 2 and each):
        return Phase(), Phase()
    none = (0.0,) * len(gathers)
    # Torch pipelining leaves parameters whole after a backward: the next forward finds them, and only a backward gathers again.
    ahead = gathers if each or not engine.fully_shard else none
    again = gathers[::-1] if step.zero_stage == 3 else none
    reduced = reduces if each else none
    return (
        _sharding_phase(prefetched_s(forward, ahead), sum(ahead)),
        _sharding_phase(prefetched_and_reduced_s(backward, again, reduced), sum(again) + sum(reduced)),
    )


def _sharding_phase(exposed: float, total: float) -> Phase:
    if total <= 0.0:
        return Phase()
    hidden = max(0.0, total - exposed)
    return Phase(exposed=(("dp_shard", exposed + CONTENTION_FRAC * hidden),), hidden_s=hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """The critical rank and its seconds outside the phases."""

    index: int
    bubble_s: float
    pipeline_s: float
    counts: dict[tuple[int, str], int]
    reduce_s: float
    reduce_hidden_s: float
    tied_s: float
    optimizer_s: float


def _critical_rank(step: StepWork, engine: Engine, machine: Machine, chunks: list[PricedStage], schedule: str) -> _Rank:
    by_kind = {kind: tuple(chunk.wall_s[kind] for chunk in chunks) for kind in "FBIW"}
    seconds = StageSeconds(forward_s=by_kind["F"], backward_s=by_kind["B"], input_s=by_kind["I"], weight_s=by_kind["W"])
    boundary = max(stage.boundary_bytes for stage in step.stages)
    p2p_s = machine.collective_s("p2p", boundary, "pp")
    transfers_s = (0.0, p2p_s) if p2p_s else (0.0,)
    timelines = runs(
        schedule, seconds, pp=step.mesh.pp, vpp=step.vpp, num_micro_batches=step.num_micro_batches, transfers_s=transfers_s
    )  # fmt: skip
    ideal, actual = timelines[0], timelines[-1]
    ranks = []
    for index in range(step.mesh.pp):
        mine = [chunk for chunk, stage in zip(chunks, step.stages, strict=True) if stage.rank_index == index]
        reduce_s, hidden = _step_traffic(mine, step, engine)
        ranks.append(_Rank(
            index=index, counts=actual.counts,
            bubble_s=max(0.0, ideal.idle_s[index]), pipeline_s=max(0.0, actual.finish_s[index] - ideal.finish_s[index]), reduce_s=reduce_s,
            reduce_hidden_s=hidden, tied_s=_tied_s(step, machine, index), optimizer_s=_optimizer_s(step, engine, machine, index),
        ))  # fmt: skip
    return max(ranks, key=lambda rank: actual.finish_s[rank.index] + rank.reduce_s + rank.tied_s + rank.optimizer_s)


def _step_traffic(chunks: list[PricedStage], step: StepWork, engine: Engine) -> tuple[float, float]:
    """(exposed, hidden) seconds of the gathers and reductions that happen once a step on one rank: DDP, ZeRO-1, ZeRO-2 without per-micro-batch reduction."""
    each = reduces_each_micro_batch(step, engine)
    backward = tuple(seconds for chunk in reversed(chunks) for seconds in chunk.backward_blocks)
    reduces = tuple(seconds for chunk in reversed(chunks) for seconds in chunk.reduces)
    exposed = total = 0.0
    if step.zero_stage < 2 or not each:
        total += sum(reduces)
        exposed += reduced_behind_s(backward, reduces) if overlaps_reduction(step, engine) else sum(reduces)
    if step.zero_stage == 1 or (step.zero_stage >= 2 and not each):
        gathers = tuple(seconds for chunk in chunks for seconds in chunk.gathers)
        forward = tuple(seconds for chunk in chunks for seconds in chunk.forward_blocks)
        total += sum(gathers)
        exposed += prefetched_s(forward, gathers) if engine.overlap_parameter_gather else sum(gathers)
    hidden = max(0.0, total - exposed)
    return exposed + CONTENTION_FRAC * hidden, hidden


def _tied_s(step: StepWork, machine: Machine, index: int) -> float:
    """Seconds of the all-reduce of a tied embedding's gradient between the ranks of the first and the last stage (one rank in a V: nothing)."""
    ends = step.stages[0].rank_index, step.stages[-1].rank_index
    if ends[0] == ends[1] or step.tied_embedding_params <= 0.0 or index not in ends:
        return 0.0
    apart = step.mesh.stride("pp") * abs(ends[1] - ends[0])
    pool = machine.pool
    group = Group(
        size=2, per_fast_domain=1 + (apart < pool.fast_domain), per_node=1 + (apart < pool.devices_per_node), stride=apart,
    )  # fmt: skip
    return collective_s("all_reduce", step.tied_embedding_params * DTYPE_BYTES[step.gradient_dtype], group, pool, machine.links)


def _optimizer_s(step: StepWork, engine: Engine, machine: Machine, index: int) -> float:
    """Seconds of the update of the elements this rank owns: bytes over achieved bandwidth, gradients read once more for the norm."""
    elements = sum(
        local_elements(block.parameters, step, 1, trainable=True) * repeat
        for stage in step.stages if stage.rank_index == index for block, repeat in stage.blocks
    )  # fmt: skip
    master = engine.master_weights and step.parameter_dtype != "fp32"
    gradient = float(DTYPE_BYTES[step.gradient_dtype])
    per_element = gradient + step_bytes_per_element(
        optimizer(step.optimizer), weight_bytes=float(DTYPE_BYTES[step.parameter_dtype]), gradient_bytes=gradient, master=master
    )
    device = machine.pool.device
    seconds = elements * per_element / (device.memory_bandwidth_bytes_per_s * machine.kernels.bandwidth("optimizer"))
    if step.offload_optimizer:
        seconds += 2.0 * elements * gradient / machine.pool.host_link.bandwidth_bytes_per_s
    return seconds


def _assemble(
    step: StepWork,
    cluster: Cluster,
    engine: Engine,
    machine: Machine,
    chunks: list[PricedStage],
    rank: _Rank,
    memories: tuple[StageMemory, ...],
) -> Estimate:
    mine = [
        (chunk, kind, rank.counts.get((stage.stage_index, kind), 0))
        for chunk, stage in zip(chunks, step.stages, strict=True) if stage.rank_index == rank.index for kind in "FBIW"
    ]  # fmt: skip
    host_s = sum(chunk.host_s(kind) * times for chunk, kind, times in mine)
    once = (("pp", rank.pipeline_s + rank.tied_s), ("dp_shard" if step.zero_stage else "dp", rank.reduce_s))
    outside = Phase(exposed=tuple((axis, seconds) for axis, seconds in once if seconds > 0.0), hidden_s=rank.reduce_hidden_s)
    phases = [(chunk.phases[kind], times) for chunk, kind, times in mine]
    total = total_phase([*phases, (outside, 1)])
    lines = (
        Line(name="compute", amount=total.compute_s, detail=f"{step.num_micro_batches} micro-batches on pipeline rank {rank.index}"),
        Line(name="exposed_communication", amount=total.exposed_s, detail="what no compute hides"),
        Line(name="exposed_copy", amount=total.copy_s),
        Line(name="bubble", amount=rank.bubble_s, detail=f"{step.schedule}, pp {step.mesh.pp}, vpp {step.vpp}"),
        Line(name="optimizer", amount=rank.optimizer_s, detail=step.optimizer),
        Line(name="host", amount=host_s, detail=f"dispatch at {engine.launch_s * 1e6:.1f} us a kernel beyond the device time"),
    )
    step_s = sum(line.amount for line in lines)
    devices, dtype = step.mesh.num_devices, step.compute_dtype
    peak = peak_flops(machine.pool.device, dtype)
    ranks_per_stage = devices / step.mesh.pp
    flops = sum(chunk.phases[kind].flops for chunk in chunks for kind in "FB") * step.num_micro_batches * ranks_per_stage
    return Estimate(
        step_s=step_s,
        time=lines,
        compute_by_class=_lines(total.compute),
        communication_by_axis=_lines(total.exposed),
        hidden_communication_s=total.hidden_s,
        tokens_per_s=step.tokens_per_step / step_s,
        tokens_per_s_per_device=step.tokens_per_step / step_s / devices,
        mfu_frac=step.model_flops_per_step / (step_s * devices * peak),
        hfu_frac=flops / (step_s * devices * peak),
        mfu_denominator=f"{dtype} dense peak {peak / 1e12:.1f} TFLOP/s per device, model flops = {MODEL_FLOPS}",
        stages=memories,
        usable_bytes=usable_bytes(machine.pool),
        host_bytes_per_node=host_bytes(step, engine, machine.pool),
        notes=_notes(cluster, machine),
    )


def _lines(amounts: Amounts) -> tuple[Line, ...]:
    return tuple(Line(name=name, amount=amount) for name, amount in sorted(amounts, key=lambda item: -item[1]))


def _notes(cluster: Cluster, machine: Machine) -> tuple[str, ...]:
    device = machine.pool.device
    notes = []
    if not machine.kernels.measured(device):
        notes.append(f"extrapolated: no kernel was measured on {device.device_id}; efficiencies of {machine.kernels.name} are used")
    if not links.measured(machine.pool):
        notes.append(f"extrapolated: no collective was measured on {device.device_id}; the {machine.links.name} is used")
    if len(cluster.pools) > 1:
        notes.append(f"mixed cluster: every rank is priced as {device.device_id}")
    return tuple(notes)
