"""What the runtime refuses, before anything starts: every choice of a plan is obeyed or is an error that names the remedy."""

from __future__ import annotations

from costmodel.engine import engine
from costmodel.errors import InputError
from planner.plan import FORMAT_VERSION, Plan

ZERO_STAGES = (0, 2, 3)
PRECISIONS = ("bf16", "fp32")
ENGINE_SCHEDULES = engine("torch").schedules


def check_runnable(plan: Plan) -> None:
    """Raise InputError on the first thing in `plan` that this runtime cannot do exactly."""
    for refused, what, where, remedy in _refusals(plan):
        if refused:
            raise InputError(what, where=where, remedy=remedy)
    plan.strategy.num_micro_batches(plan.job.global_batch)
    if plan.strategy.mesh.pp > 1:
        _check_pipeline(plan)


def _refusals(plan: Plan) -> tuple[tuple[bool, str, str, str], ...]:
    strategy, mesh, job = plan.strategy, plan.strategy.mesh, plan.job
    sizes = (mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp, mesh.ep)
    replan = "plan for engine torch"
    return (
        (plan.format_version != FORMAT_VERSION, f"format_version is {plan.format_version}", "Plan.format_version", "make the plan again"),
        (plan.engine != "torch", f"the plan is for engine {plan.engine!r}", "Plan.engine", f"export it to that launcher, or {replan}"),
        (min(sizes) < 1, f"a mesh axis is {min(sizes)}", "Plan.strategy.mesh", "use sizes of at least 1"),
        (mesh.cp > 1, f"context parallel {mesh.cp} does not run here", "Plan.strategy.mesh.cp", f"{replan}, or export it"),
        (mesh.ep > 1, f"expert parallel {mesh.ep} does not run here", "Plan.strategy.mesh.ep", f"{replan}, or export it"),
        (
            strategy.zero_stage not in ZERO_STAGES,
            f"ZeRO stage {strategy.zero_stage} does not run here",
            "Plan.strategy.zero_stage",
            "use 0 (DDP), 2 or 3 (fully_shard)",
        ),
        (job.precision not in PRECISIONS, f"precision {job.precision!r} does not run here", "Plan.job.precision", "use bf16 or fp32"),
        (strategy.compile, "compile is on", "Plan.strategy.compile", "plan with compile off: blocks run eagerly here"),
        (
            not strategy.flash_attention,
            "flash_attention is off",
            "Plan.strategy.flash_attention",
            "the model decides which attention it calls",
        ),
        (strategy.sequence_parallel and mesh.tp == 1, "sequence_parallel needs tp > 1", "Plan.strategy.sequence_parallel", "switch it off"),
        (
            strategy.sequence_parallel and plan.job.seq_len % mesh.tp != 0,
            f"seq_len {plan.job.seq_len} is not a multiple of tp {mesh.tp}",
            "Plan.strategy.sequence_parallel",
            "change seq_len or switch sequence_parallel off",
        ),
        (
            (strategy.schedule == "none") != (mesh.pp == 1),
            f"schedule {strategy.schedule!r} with pp {mesh.pp}",
            "Plan.strategy.schedule",
            replan,
        ),
        (
            strategy.schedule not in ("none", *ENGINE_SCHEDULES),
            f"schedule {strategy.schedule!r} does not run here",
            "Plan.strategy.schedule",
            f"use one of {', '.join(ENGINE_SCHEDULES)}, or plan for engine torchtitan and export it",
        ),
        (
            len(plan.stages) != mesh.pp * strategy.vpp,
            f"{len(plan.stages)} stages for pp {mesh.pp} x vpp {strategy.vpp}",
            "Plan.stages",
            replan,
        ),
    )


def _check_pipeline(plan: Plan) -> None:
    """The conditions of torch.distributed.pipelining's schedules (torch 2.13, schedules.py)."""
    strategy, num_ranks = plan.strategy, plan.strategy.mesh.pp
    num_micro_batches = strategy.num_micro_batches(plan.job.global_batch)
    where, remedy = "Plan.strategy.schedule", "use more micro-batches (a smaller micro_batch or dp) or another schedule"
    if (strategy.schedule == "interleaved_1f1b") != (strategy.vpp > 1):
        raise InputError(
            f"schedule {strategy.schedule!r} with vpp {strategy.vpp}", where=where, remedy="interleaved_1f1b needs vpp > 1, others 1"
        )
    if strategy.schedule == "1f1b" and num_micro_batches < num_ranks:
        raise InputError(f"1f1b over {num_ranks} stages with {num_micro_batches} micro-batches", where=where, remedy=remedy)
    rounds = max(1, num_micro_batches // num_ranks)
    if strategy.schedule == "interleaved_1f1b" and num_micro_batches % rounds:
        raise InputError(f"{num_micro_batches} micro-batches do not divide into {rounds} rounds of {num_ranks}", where=where, remedy=remedy)
    for position, stage in enumerate(plan.stages):
        if stage.stage_index != position or stage.rank_index != position % num_ranks:
            raise InputError(
                f"stage {stage.stage_index} at position {position} is on pipeline rank {stage.rank_index}",
                where=f"Plan.stages[{position}]",
                remedy="stages are numbered in execution order and dealt to ranks in turn",
            )
