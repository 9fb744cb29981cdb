"""Trainer: a plan ready to train. `trainer.step(batch)` is one optimizer step; the loop around it stays the user's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from passes.chain import ModelPart
from planner.plan import Plan
from runtime.batch import Batch, micro_batches
from runtime.data_parallel import average_gradients, settle_gradients, uses_ddp
from runtime.loss import vocab_parallel
from runtime.mesh import Place
from runtime.pipeline import Pipeline, TiedParameters
from runtime.stage import StageModule


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """What `runtime.apply` returns on every rank.

    stages: this rank's stage modules; modules: the same under data parallelism. pipeline is None when pp == 1.
    """

    plan: Plan
    place: Place
    chunks: tuple[ModelPart, ...]
    stages: tuple[StageModule, ...]
    modules: tuple[nn.Module, ...]
    optimizer: Optimizer
    pipeline: Pipeline | None
    tied: TiedParameters

    def step(self, batch: Batch) -> float:
        """One optimizer step on this data-parallel rank's global_batch / dp sequences; the mean loss of the global batch, on every rank."""
        loss = self.forward_backward(batch)
        self.update()
        return loss

    def forward_backward(self, batch: Batch) -> float:
        """Leave in every parameter the gradient of the global batch's mean loss, and return that loss."""
        count = self.plan.strategy.num_micro_batches(self.plan.job.global_batch)
        split = micro_batches(batch, count, self.plan.strategy.micro_batch, self.place.device)
        for stage in self.stages:
            stage.batches = split
        with vocab_parallel(self.plan.strategy.mesh.tp):
            loss = self.pipeline.run() if self.pipeline else self._accumulate(count)
        for stage in self.stages:
            stage.batches = []
        self._finish_gradients()
        return self._global_loss(loss)

    def update(self) -> None:
        """Apply the gradients and drop them (under DDP zero them: they are views of its buckets, and a dropped one would be allocated again)."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not uses_ddp(self.plan))

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters (parts of them) by their name in the whole model."""
        return {name: parameter for chunk in self.chunks for name, parameter in chunk.module.named_parameters()}

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors of this pipeline rank's stages, gathered from their parts. Collective over the ranks of a stage."""
        return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}

    def _accumulate(self, count: int) -> Tensor:
        (module,) = self.modules
        total = torch.zeros((), device=self.place.device)
        for index in range(count):
            last = index + 1 == count
            if isinstance(module, FSDPModule):
                module.set_is_last_backward(last)
                module.set_requires_all_reduce(last)
            loss = _micro_step(module, torch.tensor([index]), synchronise=last)
            total += loss.detach()
        return total

    def _finish_gradients(self) -> None:
        strategy = self.plan.strategy
        parameters = self.parameters()
        if strategy.zero_stage == 0:
            settle_gradients(parameters.values())
            if strategy.mesh.dp > 1 and not uses_ddp(self.plan):
                average_gradients(parameters.values(), self.place.data_mesh.get_group())
        self.tied.sum_gradients(parameters)

    def _global_loss(self, loss: Tensor) -> float:
        total = loss.double().to(self.place.device)
        if self.plan.strategy.mesh.pp > 1:
            dist.all_reduce(total, group=self.place.axis("pp").get_group())
        if self.plan.strategy.mesh.dp > 1:
            dist.all_reduce(total, group=self.place.data_mesh.get_group())
        return float(total) / self.plan.strategy.mesh.dp


def _micro_step(module: nn.Module, index: Tensor, *, synchronise: bool) -> Tensor:
    if isinstance(module, DistributedDataParallel) and not synchronise:
        with module.no_sync():
            return _forward_backward(module, index)
    return _forward_backward(module, index)


def _forward_backward(module: nn.Module, index: Tensor) -> Tensor:
    loss: Tensor = module(index=index)
    torch.autograd.backward(loss)
    return loss


def parameter_groups(parameters: Sequence[nn.Parameter]) -> list[dict[str, list[nn.Parameter]]]:
    """Optimizer groups in which all parameters are plain, or DTensors of one mesh: multi-tensor kernels cannot mix them."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            key = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
            groups.setdefault(key, []).append(parameter)
    return [{"params": group} for group in groups.values()]
