"""apply: a plan and a model become a Trainer. The order is fixed and matters:

check the plan -> mesh -> split -> tensor placements -> recompute -> fully_shard / DDP -> pipeline stages -> optimizer
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import nn

from costmodel.errors import InputError
from passes.chain import ModelPart, block_paths
from passes.sequence import rewrite
from passes.split import Inbox
from planner.plan import Plan
from runtime.batch import Loss
from runtime.check import check_runnable
from runtime.data_parallel import distribute
from runtime.loss import VocabParallelLoss
from runtime.mesh import Place, build_mesh, local_device
from runtime.optimizer import OptimizerFactory, build_optimizer
from runtime.pipeline import between_stages, build_pipeline, tie_stages, tied_groups
from runtime.stage import StageModule
from runtime.state import first_names
from runtime.trainer import Trainer, parameter_groups

_log = logging.getLogger(__name__)


def apply(
    plan: Plan, model: nn.Module, *, loss_fn: Loss, optimizer_factory: OptimizerFactory | None = None, local_rank: int = 0
) -> Trainer:
    """Rewrite `model` as `plan` says, on every rank of an initialised process group. Consumes `model`.

    model: the whole model with equal weights on every rank. loss_fn(output, micro_batch) gives the mean loss of a micro-batch.
    optimizer_factory(groups): an Optimizer over parameter groups; the plan's optimizer with default settings when absent.
    local_rank: index of this process on its host, which picks the GPU.
    Raises InputError, before any change, when the plan asks for what this runtime cannot do or the model is not the plan's.
    """
    check_runnable(plan)
    _check_model(model, plan)
    place = build_mesh(plan.strategy.mesh, local_device(local_rank))
    model.to(place.device)
    _check_equal_weights(model, place)
    _stop_caching(model)
    shared = tied_groups(model)
    tied = between_stages(shared, model, block_paths(model, plan)) if plan.strategy.mesh.pp > 1 else ()
    tensor_mesh = place.axis("tp") if plan.strategy.mesh.tp > 1 else None
    rewritten = rewrite(plan, model, rank_index=place.pipeline_index, tensor_mesh=tensor_mesh)
    chunks = tuple(chunk for chunk, _ in rewritten)
    stages = tuple(_stage(chunk, inbox, loss_fn, plan) for chunk, inbox in rewritten)
    modules = tuple(distribute(stage, chunk, plan, place) for stage, chunk in zip(stages, chunks, strict=True))
    parameters = [parameter for chunk in chunks for parameter in chunk.module.parameters()]
    groups = parameter_groups(parameters)
    optimizer: object = optimizer_factory(groups) if optimizer_factory else build_optimizer(plan.job.optimizer, groups)
    if not isinstance(optimizer, torch.optim.Optimizer):
        remedy = "return a torch.optim.Optimizer over the groups"
        raise InputError(f"optimizer_factory gave a {type(optimizer).__name__}", where="optimizer_factory", remedy=remedy)
    return Trainer(
        plan=plan,
        place=place,
        chunks=chunks,
        stages=stages,
        modules=modules,
        optimizer=optimizer,
        pipeline=build_pipeline(modules, chunks, plan, place) if plan.strategy.mesh.pp > 1 else None,
        tied=tie_stages(tied, chunks, plan, place),
        first_names=tuple(first_names(shared).items()),
    )


def _stage(chunk: ModelPart, inbox: Inbox, loss_fn: Loss, plan: Plan) -> StageModule:
    half = torch.bfloat16 if plan.job.precision == "bf16" else None
    sharded = plan.strategy.zero_stage >= 2
    return StageModule(
        chunk,
        inbox,
        VocabParallelLoss(loss_fn) if plan.strategy.mesh.tp > 1 else loss_fn,
        loss_scale=1.0 / plan.strategy.num_micro_batches(plan.job.global_batch),
        autocast=None if sharded else half,
        cast=half if sharded else None,
    )


def _check_model(model: object, plan: Plan) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"a {type(model).__name__} is no nn.Module", where="model", remedy="let build_model return the module")
    count = sum(parameter.numel() for parameter in model.parameters())
    if plan.num_parameters and count != plan.num_parameters:
        raise InputError(
            f"{type(model).__name__} has {count:,} parameters, the plan was made for {plan.model} with {plan.num_parameters:,}",
            where="Plan.model",
            remedy="run the plan with the model it was made for, or plan again",
        )
    meta = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if meta is not None:
        raise InputError(f"parameter {meta!r} is on the meta device", where="model", remedy="build the model with real weights")


def _check_equal_weights(model: nn.Module, place: Place) -> None:
    """Ranks that build different weights would train something else, silently: compare a checksum."""
    sums = torch.stack([parameter.detach().double().sum() for parameter in model.parameters()])
    low, high = sums.clone(), sums.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    if not torch.equal(low, high):
        names = [name for name, _ in model.named_parameters()]
        first = names[int((low != high).nonzero()[0])]
        raise InputError(
            f"parameter {first!r} differs between ranks",
            where="model",
            remedy="seed build_model, or load the same checkpoint on every rank",
        )


def _stop_caching(model: nn.Module) -> None:
    """Training never reads the key-value cache of a Hugging Face model; left on, it keeps every layer's keys and values."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "use_cache", False):
            config.use_cache = False
