"""What must hold between the parts of a plan: sizes that multiply up, stages that cover the model. Used when a plan file is read."""

from __future__ import annotations

from dataclasses import fields

from costmodel.errors import InputError
from costmodel.estimate import MEMORY_CLASSES, TIME_CAUSES
from costmodel.mesh import Mesh
from costmodel.schedule import problem, rank_of_stage
from costmodel.work import DTYPE_BYTES
from planner.plan import Plan


def check_consistency(plan: Plan, where: str) -> None:
    """Raises InputError naming the first contradiction."""
    check_cluster(plan, where)
    check_mesh(plan.strategy.mesh, plan.cluster.num_devices, f"{where}: strategy.mesh")
    _check_strategy(plan, where)
    _check_stages(plan, where)
    _check_estimate(plan, where)


def check_mesh(mesh: Mesh, num_devices: int, where: str) -> None:
    """Raises InputError unless every axis is at least 1, ep folds, and the product is `num_devices`."""
    for field in fields(mesh):
        size = getattr(mesh, field.name)
        if size < 1:
            raise InputError(f"{field.name} is {size}", where=f"{where}.{field.name}", remedy="give at least 1")
    folded = mesh.dp_shard * mesh.cp * mesh.tp
    if folded % mesh.ep:
        what = f"ep {mesh.ep} does not divide dp_shard x cp x tp = {folded}"
        raise InputError(what, where=f"{where}.ep", remedy=f"use a divisor of {folded}")
    if mesh.num_devices != num_devices:
        factors = " x ".join(f"{name} {mesh.size(name)}" for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
        what = f"{factors} = {mesh.num_devices} ranks, but the cluster has {num_devices} devices"
        raise InputError(what, where=where, remedy="change an axis or the cluster so that they agree")


def check_cluster(plan: Plan, where: str) -> None:
    """Raises InputError when a pool has no devices, no memory or an unknown dtype."""
    if not plan.cluster.pools:
        raise InputError("no pools", where=f"{where}: cluster.pools", remedy="give at least one pool of nodes")
    for i, pool in enumerate(plan.cluster.pools):
        place = f"{where}: cluster.pools[{i}]"
        for name in ("num_nodes", "devices_per_node", "fast_domain"):
            if getattr(pool, name) < 1:
                raise InputError(f"{name} is {getattr(pool, name)}", where=f"{place}.{name}", remedy="give at least 1")
        if pool.device.memory_bytes <= 0:
            raise InputError(f"memory is {pool.device.memory_bytes} bytes", where=f"{place}.device.memory_bytes", remedy="give its memory")
        for dtype, _ in pool.device.peak_flops:
            if dtype not in DTYPE_BYTES:
                known = ", ".join(DTYPE_BYTES)
                raise InputError(f"unknown dtype {dtype!r}", where=f"{place}.device.peak_flops", remedy=f"use one of {known}")


def _check_strategy(plan: Plan, where: str) -> None:
    strategy = plan.strategy
    if (strategy.schedule == "none") != (strategy.mesh.pp == 1):
        what = f"schedule {strategy.schedule!r} with pp {strategy.mesh.pp}"
        raise InputError(what, where=f"{where}: strategy.schedule", remedy='use "none" exactly when pp is 1')
    try:
        num_micro_batches = strategy.num_micro_batches(plan.job.global_batch)
    except InputError as error:
        raise InputError(error.what, where=f"{where}: strategy.micro_batch", remedy=error.remedy) from None
    refused = problem(strategy.schedule, pp=strategy.mesh.pp, vpp=strategy.vpp, num_micro_batches=num_micro_batches)
    if refused is not None:
        raise InputError(refused.what, where=f"{where}: {refused.where.replace('Strategy', 'strategy')}", remedy=refused.remedy)


def _check_stages(plan: Plan, where: str) -> None:
    chunks = plan.strategy.mesh.pp * plan.strategy.vpp
    if len(plan.stages) != chunks:
        what = f"{len(plan.stages)} stages for pp {plan.strategy.mesh.pp} x vpp {plan.strategy.vpp} = {chunks} chunks"
        raise InputError(what, where=f"{where}: stages", remedy="give one stage for each chunk")
    ranks = rank_of_stage(plan.strategy.schedule, pp=plan.strategy.mesh.pp, vpp=plan.strategy.vpp)
    for i, stage in enumerate(plan.stages):
        if stage.stage_index != i:
            raise InputError(
                f"stage_index is {stage.stage_index}", where=f"{where}: stages[{i}].stage_index", remedy=f"give {i}: stages are in order"
            )
        if stage.rank_index != ranks[i]:
            remedy = f"chunk {i} of {plan.strategy.schedule} sits on rank {ranks[i]}"
            raise InputError(f"rank_index is {stage.rank_index}", where=f"{where}: stages[{i}].rank_index", remedy=remedy)
        if not stage.layer_paths:
            raise InputError("no layers", where=f"{where}: stages[{i}].layer_paths", remedy="give every chunk what it runs")
    paths = [path for stage in plan.stages for path in stage.layer_paths]
    if len(set(paths)) != len(paths):
        repeated = next(path for path in paths if paths.count(path) > 1)
        raise InputError(f"layer {repeated!r} appears twice", where=f"{where}: stages", remedy="give every layer to one stage")
    layers = plan.strategy.stage_layers
    if layers and (len(layers) != chunks or sum(layers) != plan.num_layers):
        what = f"{list(layers)} does not spread {plan.num_layers} layers over {chunks} chunks"
        raise InputError(what, where=f"{where}: strategy.stage_layers", remedy="give one count a chunk, summing to the layers of the model")


def _check_estimate(plan: Plan, where: str) -> None:
    estimate = plan.estimate
    for line in estimate.time:
        if line.name not in TIME_CAUSES:
            raise InputError(f"unknown cause {line.name!r}", where=f"{where}: estimate.time", remedy=f"causes are {', '.join(TIME_CAUSES)}")
    for name in ("step_s", "usable_bytes"):
        if not getattr(estimate, name) > 0.0:
            raise InputError(f"{name} is {getattr(estimate, name)}", where=f"{where}: estimate.{name}", remedy="give a positive number")
    if not estimate.stages:
        raise InputError("no pipeline rank", where=f"{where}: estimate.stages", remedy="give one entry a pipeline rank")
    for i, stage in enumerate(estimate.stages):
        if not stage.classes:
            raise InputError("no memory class", where=f"{where}: estimate.stages[{i}].classes", remedy=f"give {', '.join(MEMORY_CLASSES)}")
        for line in stage.classes:
            if line.name not in MEMORY_CLASSES:
                place = f"{where}: estimate.stages[{i}].classes"
                raise InputError(f"unknown class {line.name!r}", where=place, remedy=f"classes are {', '.join(MEMORY_CLASSES)}")
