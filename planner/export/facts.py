"""Facts of a plan that every exporter needs: layers per stage, hosts and ranks, the losses that do not depend on the launcher, the header."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from costmodel.errors import InputError
from planner.codec import plan_to_json
from planner.export.result import Loss
from planner.plan import Plan

_LAYER_INDEX = re.compile(r"(^|\.)\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """`num_nodes` hosts that start `per_node` ranks each."""

    num_nodes: int
    per_node: int


def plan_hash(plan: Plan) -> str:
    """First 16 hex digits of the SHA-256 of the plan's canonical JSON: the same plan has the same hash in every exported file."""
    return hashlib.sha256(plan_to_json(plan).encode()).hexdigest()[:16]


def ranks(plan: Plan) -> Ranks:
    """Hosts and ranks per host for the plan's mesh on the first hosts of its cluster.

    Raises InputError when the mesh has more ranks than the cluster, or would use only some devices of a host beyond the first.
    """
    num_devices, per_node = plan.strategy.mesh.num_devices, plan.cluster.pool.devices_per_node
    if num_devices > plan.cluster.num_devices:
        raise InputError(f"the mesh has {num_devices} ranks, the cluster {plan.cluster.num_devices} devices", where="Plan.strategy.mesh")
    if num_devices <= per_node:
        return Ranks(num_nodes=1, per_node=num_devices)
    if num_devices % per_node:
        raise InputError(
            f"{num_devices} ranks do not fill hosts of {per_node} devices", where="Plan.strategy.mesh", remedy="use whole hosts"
        )
    return Ranks(num_nodes=num_devices // per_node, per_node=per_node)


def layers_per_stage(plan: Plan) -> tuple[int, ...]:
    """How many layers (role "layer": paths that end in an index) every model chunk holds, in execution order.

    Raises InputError when they do not add up to `plan.num_layers`.
    """
    counts = tuple(sum(bool(_LAYER_INDEX.search(path)) for path in stage.layer_paths) for stage in plan.stages)
    if sum(counts) != plan.num_layers:
        raise InputError(f"the stages hold {sum(counts)} indexed layers of {plan.num_layers}", where="Plan.stages")
    return counts


def common_losses(plan: Plan, *, engine: str) -> tuple[Loss, ...]:
    """Losses that hold for every launcher: prices of another runtime, hosts that differ."""
    losses = []
    if plan.engine != engine:
        does = f"runs under {engine}; the predicted time and memory were priced for {plan.engine}"
        losses.append(Loss(field="engine", says=plan.engine, launcher_does=does))
    if len({pool.devices_per_node for pool in plan.cluster.pools}) > 1:
        says = ", ".join(f"{pool.num_nodes} x {pool.devices_per_node}" for pool in plan.cluster.pools)
        losses.append(Loss(field="cluster.pools", says=says, launcher_does="starts the same number of ranks on every host"))
    return tuple(losses)


def header(
    plan: Plan, *, launcher: str, losses: tuple[Loss, ...], environment: tuple[tuple[str, str], ...], command: str
) -> tuple[str, ...]:
    """The lines that open every exported file, without comment marks."""
    mesh, estimate = plan.strategy.mesh, plan.estimate
    axes = " ".join(f"{axis}={size}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep") if (size := mesh.size(axis)) > 1)
    return (
        f"{plan.model} on {plan.cluster.name}, written by autoplan {tool_version()} for {launcher}",
        f"plan {plan_hash(plan)}: predicted {estimate.step_s:.4g} s per step, peak {estimate.peak_bytes / 2**30:.1f} GiB per device",
        f"mesh, outer to inner: {axes or 'one device'} (tp neighbours are adjacent ranks; keep tp x cp inside one NVLink domain)",
        f"run: {command}",
        *(f"environment: {name}={value}" for name, value in environment),
        *(f"LOST: {loss}" for loss in losses),
        *(() if losses else ("loses nothing of the plan",)),
    )


def comment(lines: tuple[str, ...]) -> str:
    """The lines as a block of # comments."""
    return "".join(f"# {line}\n" for line in lines)


def script(top: tuple[str, ...], environment: tuple[tuple[str, str], ...], *lines: str) -> str:
    """A launch script: header, strict bash, `$here` (its own folder; the working directory stays the user's), environment, then `lines`."""
    exports = [f"export {name}={value}" for name, value in environment]
    body = ["set -euo pipefail", 'here="$(cd "$(dirname "$0")" && pwd)"', *exports, *lines]
    return "#!/usr/bin/env bash\n" + comment(top) + "\n".join(body) + "\n"


def tool_version() -> str:
    """Version of the installed distribution, "source" for a bare checkout."""
    try:
        return version("torch-autoplan")
    except PackageNotFoundError:
        return "source"


def torchrun(layout: Ranks, program: str) -> str:
    """The torchrun call for `program`. Several hosts meet at $MASTER_ADDR, which the user sets on each of them."""
    if layout.num_nodes == 1:
        return f"torchrun --standalone --nproc-per-node {layout.per_node} {program}"
    meet = '--rdzv-backend c10d --rdzv-id "${RUN_ID:-autoplan}" --rdzv-endpoint "${MASTER_ADDR:?the first host}:${MASTER_PORT:-29500}"'
    return f"torchrun --nnodes {layout.num_nodes} --nproc-per-node {layout.per_node} {meet} --max-restarts 0 {program}"
