"""Megatron-LM: a bash array of flags (one per line), the same flags as JSON, and nothing else to write.

Facts read in megatron-core 0.19.2 `megatron/training/arguments.py` and checked with its own parse_args and validate_args:
* the mesh order is tp, cp, dp, pp from the inside, as in costmodel.mesh; data parallelism is what remains of the world size;
* stage boundaries, virtual stages included, are one string (`--pipeline-model-parallel-layout`): E embedding, t layer, L loss, chunks by `|`;
* CUDA_DEVICE_MAX_CONNECTIONS must be 1 with tp or cp before Blackwell, and must not be 1 with Megatron-FSDP: both are asserted;
* dropout defaults to 0.1 and is always written; sequence parallelism needs tp > 1;
* interleaved 1F1B needs a number of micro-batches that is a multiple of pp (core/pipeline_parallel/schedules.py).
"""

from __future__ import annotations

import json
import shlex

from costmodel.engine import engine
from costmodel.errors import InputError
from planner.export.facts import comment, common_losses, header, layers_per_stage, ranks, script, torchrun
from planner.export.megatron_model import Flag, decoder_spec, model_flags, model_losses
from planner.export.result import Exported, Loss
from planner.plan import Plan

LAUNCHER = "Megatron-LM with megatron-core 0.19.2"
_COMMAND = "MEGATRON=path/to/Megatron-LM bash launch.sh"


def export_megatron(plan: Plan) -> Exported:
    """launch.sh, megatron_args.sh (the array MEGATRON_ARGS) and megatron_args.json.

    Raises InputError when the plan has no model shape or asks for what Megatron refuses to run.
    """
    if plan.spec is None:
        raise InputError(f"the plan of {plan.model} carries no sizes", where="Plan.spec", remedy="plan from a config.json or a known name")
    spec = decoder_spec(plan.spec)
    flags = (
        *model_flags(plan, spec),
        *_parallel_flags(plan),
        *_recompute_flags(plan),
        *_precision_flags(plan),
        *_training_flags(plan),
    )
    losses = (*common_losses(plan, engine="megatron"), *model_losses(spec), *_losses(plan))
    environment = _environment(plan)
    top = header(plan, launcher=LAUNCHER, losses=losses, environment=environment, command=_COMMAND)
    lines = "".join(f"    {shlex.join(flag)}\n" for flag in flags)
    start = torchrun(ranks(plan), '"${MEGATRON:?folder of Megatron-LM}/pretrain_gpt.py" "${MEGATRON_ARGS[@]}" "$@"')
    document = {
        "world_size": plan.strategy.mesh.num_devices,
        "environment": dict(environment),
        "arguments": [part for flag in flags for part in flag],
    }
    files = (
        ("launch.sh", script(top, environment, 'source "$here/megatron_args.sh"', start)),
        ("megatron_args.sh", f"{comment(top)}MEGATRON_ARGS=(\n{lines})\n"),
        ("megatron_args.json", json.dumps(document, indent=2) + "\n"),
    )
    return Exported(target="megatron", files=files, losses=losses, command=_COMMAND)


def pipeline_layout(counts: tuple[int, ...]) -> str:
    """Megatron's layout string for `counts` layers per chunk, in execution order: (7, 9, 9, 7) is `Et*7|t*9|t*9|t*7L`."""
    chunks = ["t" if count == 1 else f"t*{count}" if count else "" for count in counts]
    chunks[0], chunks[-1] = f"E{chunks[0]}", f"{chunks[-1]}L"
    return "|".join(chunks)


def _parallel_flags(plan: Plan) -> list[Flag]:
    strategy, mesh = plan.strategy, plan.strategy.mesh
    flags: list[Flag] = [
        ("--tensor-model-parallel-size", str(mesh.tp)),
        ("--pipeline-model-parallel-size", str(mesh.pp)),
        ("--context-parallel-size", str(mesh.cp)),
    ]
    if strategy.sequence_parallel and mesh.tp > 1:
        flags.append(("--sequence-parallel",))
    if mesh.pp > 1:
        flags.append(("--pipeline-model-parallel-layout", pipeline_layout(layers_per_stage(plan))))
    if mesh.cp > 1:
        flags.append(("--cp-comm-type", "a2a" if strategy.cp_kind == "all_to_all" else "p2p"))
    if mesh.ep > 1:
        flags.append(("--expert-model-parallel-size", str(mesh.ep)))
    return flags + _zero_flags(plan)


def _zero_flags(plan: Plan) -> list[Flag]:
    stage, mesh = plan.strategy.zero_stage, plan.strategy.mesh
    flags: list[Flag] = [("--overlap-grad-reduce",)]
    if stage >= 1:
        flags += [("--use-distributed-optimizer",), ("--overlap-param-gather",)]
        if mesh.dp_replicate > 1:
            flags.append(("--num-distributed-optimizer-instances", str(mesh.dp_replicate)))
    if stage >= 2:
        sharding = "optim_grads" if stage == 2 else "optim_grads_params"
        flags += [
            ("--use-megatron-fsdp",),
            ("--data-parallel-sharding-strategy", sharding),
            ("--no-gradient-accumulation-fusion",),
            ("--ckpt-format", "fsdp_dtensor"),
        ]
    return flags


def _recompute_flags(plan: Plan) -> list[Flag]:
    recompute = plan.strategy.recompute
    if recompute == "selective":
        return [("--recompute-granularity", "selective"), ("--recompute-modules", "core_attn")]
    if recompute == "full":
        return [("--recompute-granularity", "full"), ("--recompute-method", "uniform"), ("--recompute-num-layers", "1")]
    if recompute == "first_k":
        return [("--recompute-granularity", "full"), ("--recompute-method", "block"), ("--recompute-num-layers", str(_prefix(plan)))]
    return []


def _prefix(plan: Plan) -> int:
    return max((stage.recompute_layers for stage in plan.stages), default=0) or plan.strategy.recompute_layers


def _precision_flags(plan: Plan) -> list[Flag]:
    blackwell = _is_blackwell(plan)
    match plan.job.precision:
        case "bf16":
            return [("--bf16",)]
        case "fp16":
            return [("--fp16",)]
        case "fp8":
            return [
                ("--bf16",),
                ("--fp8-format", "e4m3" if blackwell else "hybrid"),
                ("--fp8-recipe", "mxfp8" if blackwell else "tensorwise"),
            ]
    return []


def _training_flags(plan: Plan) -> list[Flag]:
    strategy, job = plan.strategy, plan.job
    micro_batches, pp = strategy.num_micro_batches(job.global_batch), strategy.mesh.pp
    if strategy.vpp > 1 and micro_batches % pp:
        raise InputError(
            f"interleaved 1F1B in Megatron needs a multiple of pp = {pp} micro-batches, the plan has {micro_batches}",
            where="Plan.strategy.micro_batch",
        )
    if strategy.mesh.cp > 1 and job.seq_len % (2 * strategy.mesh.cp):
        raise InputError(f"{job.seq_len} tokens do not divide by 2 x cp = {2 * strategy.mesh.cp}", where="Plan.job.seq_len")
    flags: list[Flag] = [
        ("--micro-batch-size", str(strategy.micro_batch)),
        ("--global-batch-size", str(job.global_batch)),
        ("--train-iters", "20"),
        ("--lr", "1e-4"),
        ("--attention-backend", "auto" if strategy.flash_attention else "unfused"),
        ("--optimizer", "sgd" if job.optimizer == "sgd" else "adam"),
    ]
    if job.optimizer == "adamw_8bit" and strategy.zero_stage == 1:
        flags += [("--use-precision-aware-optimizer",), ("--exp-avg-dtype", "fp8"), ("--exp-avg-sq-dtype", "fp8")]
    return flags


def _is_blackwell(plan: Plan) -> bool:
    return plan.cluster.pool.device.arch.startswith("blackwell")


def _environment(plan: Plan) -> tuple[tuple[str, str], ...]:
    strategy = plan.strategy
    if strategy.zero_stage < 2 and not _is_blackwell(plan) and (strategy.mesh.tp > 1 or strategy.mesh.cp > 1):
        return (("CUDA_DEVICE_MAX_CONNECTIONS", "1"),)
    return ()


def _losses(plan: Plan) -> tuple[Loss, ...]:
    strategy, job = plan.strategy, plan.job
    losses = []
    if strategy.schedule == "gpipe":
        losses.append(
            Loss(field="strategy.schedule", says="gpipe", launcher_does="runs 1F1B: the same bubble, fewer micro-batches in flight")
        )
    recompute = engine(plan.engine).selective_recompute
    if strategy.recompute == "selective" and recompute != "core_attention":
        losses.append(Loss(field="strategy.recompute", says=f"selective ({recompute})", launcher_does="recomputes core attention only"))
    if strategy.compile:
        losses.append(Loss(field="strategy.compile", says="True", launcher_does="runs Transformer Engine kernels without torch.compile"))
    prefixes = [stage.recompute_layers for stage in plan.stages]
    if strategy.recompute == "first_k" and prefixes != [min(count, _prefix(plan)) for count in layers_per_stage(plan)]:
        does = f"recomputes the first {_prefix(plan)} layers of every chunk"
        losses.append(Loss(field="stages.recompute_layers", says=", ".join(map(str, prefixes)), launcher_does=does))
    if job.optimizer == "adamw_8bit":
        does = "keeps Adam moments in fp8 with one scale per tensor" if strategy.zero_stage == 1 else "keeps Adam moments in fp32"
        losses.append(Loss(field="job.optimizer", says="adamw_8bit", launcher_does=does))
    return tuple(losses)
