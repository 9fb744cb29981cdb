"""Trainer: a plan ready to train. `trainer.step(batch)` is one optimizer step; the loop around it stays the user's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from passes.chain import ModelPart
from planner.plan import Plan
from runtime import checkpoint
from runtime.batch import Batch, micro_batches
from runtime.data_parallel import average_gradients, settle_gradients, uses_ddp
from runtime.loss import vocab_parallel
from runtime.mesh import Place
from runtime.pipeline import Pipeline, TiedParameters
from runtime.stage import StageModule
from runtime.state import adopt, held_tensors, persistent_buffers, tensors_to_fill

KEEP = 2


@dataclass(slots=True, kw_only=True)
class StepCount:
    """What changes while a Trainer trains: the optimizer steps done."""

    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """What `runtime.apply` returns on every rank.

    stages: this rank's stage modules; modules: the same under data parallelism. pipeline is None when pp == 1.
    first_names: (name, first name) of every parameter that has several, in the whole model.
    """

    plan: Plan
    place: Place
    chunks: tuple[ModelPart, ...]
    stages: tuple[StageModule, ...]
    modules: tuple[nn.Module, ...]
    optimizer: Optimizer
    pipeline: Pipeline | None
    tied: TiedParameters
    first_names: tuple[tuple[str, str], ...] = ()
    progress: StepCount = field(default_factory=StepCount)

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
        self.progress.step += 1

    def save(self, directory: str | Path, *, extra: Mapping[str, Any] | None = None, keep: int = KEEP) -> Path:
        """Write parameters, buffers, optimizer states and the step under original names, so that any plan of this model reads them. Collective.

        extra: what else the run wants back (data position, scheduler state), as JSON has it. The last `keep` checkpoints stay. Returns the new one's path.
        The directory must be one that all ranks see. A kill at any moment leaves the previous checkpoint loadable.
        """
        position = checkpoint.Position(step=self.progress.step, extra=extra or {})
        tensors = held_tensors(self.parameters(), self._buffers(), self.optimizer, dict(self.first_names))
        return checkpoint.write(Path(directory), tensors, position, keep=keep)

    def load(self, directory: str | Path) -> Mapping[str, Any]:
        """Continue from the newest checkpoint in `directory`, whatever plan wrote it; returns what was saved as `extra`. Collective.

        Raises InputError when there is none, or it is another model's or optimizer's.
        """
        path = checkpoint.find(Path(directory))
        position, names = checkpoint.read_position(path), dict(self.first_names)
        tensors = tensors_to_fill(self.parameters(), self._buffers(), self.optimizer, names, checkpoint.stored_sizes(path))
        checkpoint.read(path, tensors)
        adopt(self.parameters(), self.optimizer, names, tensors)
        self.progress.step = position.step
        return position.extra

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer for chunk in self.chunks for name, buffer in persistent_buffers(chunk.module).items()}

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
