"""Validity: whether a strategy can run a graph on a cluster under an engine at all, each refusal a typed reason with its numbers.

`problems` yields InputErrors whose `where` is the field to change: `estimate` raises the first, the search counts them by `where` as rejections.
"""

from __future__ import annotations

from collections.abc import Iterator

from costmodel import schedule as schedules
from costmodel.engine import Engine
from costmodel.errors import InputError
from costmodel.hardware import Cluster
from planner.graph import Graph
from planner.job import Job
from planner.module_limits import heads_obstacle, pipeline_obstacle, sequence_obstacle, tensor_obstacle, uneven_obstacle
from planner.strategy import Strategy


def validate(graph: Graph, cluster: Cluster, job: Job, strategy: Strategy, engine: Engine) -> None:
    """Raise the first of `problems`."""
    for problem in problems(graph, cluster, job, strategy, engine):
        raise problem


def problems(graph: Graph, cluster: Cluster, job: Job, strategy: Strategy, engine: Engine) -> Iterator[InputError]:
    """Every reason why `strategy` cannot run, cheapest tests first."""
    yield from _devices(cluster, job, strategy)
    yield from _engine(job, strategy, engine)
    yield from _tensor_parallel(graph, strategy)
    if engine.splits_modules:
        yield from _own_module(graph, strategy, engine)
    yield from _context_parallel(graph, strategy)
    yield from _experts(graph, strategy)
    yield from _data_parallel(strategy)
    yield from _pipeline(graph, job, strategy)


def _devices(cluster: Cluster, job: Job, strategy: Strategy) -> Iterator[InputError]:
    mesh = strategy.mesh
    axes = {name: mesh.size(name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
    for name, size in axes.items():
        if size < 1:
            yield InputError(f"{name} is {size}", where=f"Strategy.mesh.{name}", remedy="give at least 1")
            return
    if mesh.num_devices != cluster.num_devices:
        text = " x ".join(f"{name} {size}" for name, size in axes.items() if name != "ep")
        yield InputError(
            f"{text} = {mesh.num_devices} devices, but {cluster.name} has {cluster.num_devices}", where="Strategy.mesh",
            remedy="make the product of the axes equal the devices",
        )  # fmt: skip
    device = cluster.pool.device
    needed = "bf16" if job.precision == "fp16" and not device.peak("fp16") else job.precision
    if not device.peak(needed):
        known = ", ".join(name for name, peak in device.peak_flops if peak)
        yield InputError(f"{device.device_id} has no {job.precision} units", where="Job.precision", remedy=f"use one of {known}")
    try:
        strategy.num_micro_batches(job.global_batch)
    except InputError as error:
        yield error


def _engine(job: Job, strategy: Strategy, engine: Engine) -> Iterator[InputError]:
    mesh = strategy.mesh
    if job.precision not in engine.precisions:
        text = ", ".join(engine.precisions)
        yield InputError(
            f"{engine.name} does not train in {job.precision}", where="Job.precision", remedy=f"use one of {text}, or another engine"
        )
    if strategy.compile and not engine.supports_compile:
        yield InputError(f"{engine.name} does not compile", where="Strategy.compile", remedy="switch it off, or use another engine")
    facts: tuple[tuple[str, object, tuple[object, ...]], ...] = (
        ("zero_stage", strategy.zero_stage, engine.zero_stages),
        ("schedule", strategy.schedule, ("none", *engine.schedules)),
        ("recompute", strategy.recompute, engine.recompute),
    )
    for name, value, known in facts:
        if value not in known:
            text = ", ".join(map(str, known))
            yield InputError(f"{engine.name} cannot run {name} {value}", where=f"Strategy.{name}", remedy=f"use one of {text}")
    if engine.pipeline_buffers and strategy.compile and schedules.rules(strategy.schedule).splits_backward:
        remedy = "switch compile off, or use a schedule with full backwards"
        yield InputError(
            f"torch cannot split the backward of compiled stages, as {strategy.schedule} needs", where="Strategy.compile", remedy=remedy
        )
    if engine.pipeline_buffers and strategy.recompute != "none" and schedules.rules(strategy.schedule).splits_backward:
        yield InputError(
            f"{strategy.schedule} splits backward, and torch recomputes a block again for each group of its weights",
            where="Strategy.recompute", remedy="use recompute none, or a schedule with full backwards",
        )  # fmt: skip
    if mesh.cp > 1 and not engine.supports_cp:
        yield InputError(
            f"{engine.name} has no context parallelism (cp {mesh.cp})", where="Strategy.mesh.cp", remedy="use cp 1 or another engine"
        )
    if mesh.ep > 1 and not engine.supports_ep:
        yield InputError(
            f"{engine.name} has no expert parallelism (ep {mesh.ep})", where="Strategy.mesh.ep", remedy="use ep 1 or another engine"
        )


def _own_module(graph: Graph, strategy: Strategy, engine: Engine) -> Iterator[InputError]:
    """What an engine that trains the user's module cannot do to it (planner.module_limits)."""
    mesh = strategy.mesh
    if not strategy.flash_attention:
        yield InputError(f"{engine.name} calls the attention that the model calls", where="Strategy.flash_attention", remedy="leave it on")
    obstacles = (
        ("Strategy.mesh.tp", "use tp 1", (tensor_obstacle(graph) or heads_obstacle(graph, mesh.tp)) if mesh.tp > 1 else ""),
        (
            "Strategy.sequence_parallel",
            "switch it off",
            (sequence_obstacle(graph) or uneven_obstacle(graph, mesh.tp)) if strategy.sequence_parallel else "",
        ),
        ("Strategy.mesh.pp", "use pp 1", pipeline_obstacle(graph) if mesh.pp > 1 else ""),
    )
    for where, remedy, what in obstacles:
        if what:
            yield InputError(f"{engine.name} cannot: {what}", where=where, remedy=f"{remedy}, or an engine with model code of its own")


def _tensor_parallel(graph: Graph, strategy: Strategy) -> Iterator[InputError]:
    tp = strategy.mesh.tp
    if strategy.sequence_parallel and tp == 1:
        yield InputError("sequence_parallel needs tp > 1", where="Strategy.sequence_parallel", remedy="switch it off or raise tp")
    if tp == 1:
        return
    where = "Strategy.mesh.tp"
    if graph.num_heads and graph.num_heads % tp:
        yield InputError(f"tp {tp} does not divide {graph.num_heads} heads", where=where, remedy="use a divisor of the heads")
    if graph.num_kv_heads and graph.num_kv_heads % tp and tp % graph.num_kv_heads:
        remedy = "use a divisor or a multiple of the key/value heads"
        yield InputError(f"tp {tp} and {graph.num_kv_heads} key/value heads do not divide one another", where=where, remedy=remedy)
    for axis, size in _widths(graph):
        if size % tp:
            what = "hidden features of an MLP" if axis == "ffn" else "vocabulary entries"
            remedy = "use a divisor" if axis == "ffn" else f"use a divisor, or pad the vocabulary to {-(-size // tp) * tp}"
            yield InputError(f"tp {tp} does not divide {size} {what}", where=where, remedy=remedy)
            return
    if strategy.sequence_parallel and graph.sequence % (tp * strategy.mesh.cp):
        yield InputError(
            f"sequence {graph.sequence} is not a multiple of tp {tp} x cp {strategy.mesh.cp}", where="Strategy.sequence_parallel",
            remedy="switch sequence parallelism off or change the sequence length",
        )  # fmt: skip


def _widths(graph: Graph) -> list[tuple[str, int]]:
    """Distinct (axis, size) of the ffn and vocab dims of parameters."""
    return sorted(
        {
            (axis, size)
            for block in graph.kinds
            for tensor in block.parameters
            for axis, size in zip(tensor.axes, tensor.shape, strict=True)
            if axis in ("ffn", "vocab")
        }
    )


def _context_parallel(graph: Graph, strategy: Strategy) -> Iterator[InputError]:
    cp, where = strategy.mesh.cp, "Strategy.mesh.cp"
    if cp == 1:
        return
    if graph.sequence % (2 * cp):
        yield InputError(
            f"sequence {graph.sequence} is not a multiple of 2 x cp {cp} (zig-zag chunks)",
            where=where,
            remedy="change cp or the sequence length",
        )
    if not strategy.flash_attention:
        yield InputError(f"cp {cp} needs flash attention", where="Strategy.flash_attention", remedy="switch flash attention on or use cp 1")
    if strategy.cp_kind == "all_to_all" and graph.num_heads % (cp * strategy.mesh.tp):
        yield InputError(
            f"{graph.num_heads} heads are not a multiple of cp {cp} x tp {strategy.mesh.tp}",
            where="Strategy.cp_kind",
            remedy="use cp_kind ring",
        )


def _experts(graph: Graph, strategy: Strategy) -> Iterator[InputError]:
    mesh, where = strategy.mesh, "Strategy.mesh.ep"
    if mesh.ep == 1:
        return
    if not graph.num_experts:
        yield InputError(f"ep {mesh.ep}, but {graph.name} has no experts", where=where, remedy="use ep 1")
    elif graph.num_experts % mesh.ep:
        yield InputError(f"ep {mesh.ep} does not divide {graph.num_experts} experts", where=where, remedy="use a divisor of the experts")
    ranks = mesh.dp_shard * mesh.cp * mesh.tp
    if ranks % mesh.ep:
        yield InputError(f"ep {mesh.ep} does not divide dp_shard x cp x tp = {ranks}", where=where, remedy="use a divisor of it")
    if mesh.tp > 1 and not strategy.sequence_parallel:
        remedy = "switch sequence_parallel on: otherwise every tp rank would send the same tokens"
        yield InputError(f"ep {mesh.ep} with tp {mesh.tp} needs sequence parallelism", where="Strategy.sequence_parallel", remedy=remedy)


def _data_parallel(strategy: Strategy) -> Iterator[InputError]:
    mesh = strategy.mesh
    if strategy.zero_stage and mesh.dp_shard * mesh.cp == 1:
        yield InputError(
            f"zero_stage {strategy.zero_stage} shards over dp_shard x cp = 1 rank", where="Strategy.zero_stage",
            remedy="use zero_stage 0 or a larger dp_shard",
        )  # fmt: skip


def _pipeline(graph: Graph, job: Job, strategy: Strategy) -> Iterator[InputError]:
    pp, vpp, schedule = strategy.mesh.pp, strategy.vpp, strategy.schedule
    if (pp == 1) != (schedule == "none"):
        remedy = 'use schedule "none"' if pp == 1 else "choose a pipeline schedule"
        yield InputError(f"schedule {schedule} with pp {pp}", where="Strategy.schedule", remedy=remedy)
        return
    if pp * vpp > graph.num_layers and not strategy.stage_layers:
        yield InputError(
            f"{graph.num_layers} layers cannot fill pp {pp} x vpp {vpp} chunks", where="Strategy.mesh.pp", remedy="use fewer chunks"
        )
    refused = schedules.problem(
        schedule, pp=pp, vpp=vpp, num_micro_batches=max(1, job.global_batch // (strategy.micro_batch * strategy.mesh.dp))
    )
    if refused is not None:
        yield refused
