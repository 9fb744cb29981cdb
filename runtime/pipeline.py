"""Pipeline parallelism on torch.distributed.pipelining: stages of any module (passes.split), GPipe, 1F1B and interleaved 1F1B.

Every stage gets the index of the micro-batch and finds the original inputs itself; only the hidden state crosses stages. The last stage's output is its loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from costmodel.errors import AutoplanError, InputError
from passes.chain import ModelPart
from passes.split import outside_modules
from planner.plan import Plan
from runtime.data_parallel import local
from runtime.mesh import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The schedule of this pipeline rank."""

    schedule: ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B
    num_micro_batches: int
    holds_last: bool

    def run(self) -> Tensor:
        """Forward and backward of all micro-batches; gives the sum of their scaled losses, 0 on ranks without the last stage."""
        try:
            return self._run()
        except RuntimeError as error:
            if isinstance(error.__cause__, AutoplanError):
                raise error.__cause__ from None
            raise

    def _run(self) -> Tensor:
        index = torch.arange(self.num_micro_batches)
        losses: list[Tensor] = []
        if self.holds_last:
            self.schedule.step(index=index, target=index, losses=losses, return_outputs=False)
            return torch.stack([loss.detach() for loss in losses]).sum()
        self.schedule.step(index=index, return_outputs=False)
        return torch.zeros(())


def build_pipeline(modules: Sequence[nn.Module], chunks: Sequence[ModelPart], plan: Plan, place: Place) -> Pipeline:
    """Stages and schedule of this pipeline rank, `modules` being its distributed chunks in execution order."""
    num_micro_batches = plan.strategy.num_micro_batches(plan.job.global_batch)
    group = place.axis("pp").get_group()
    stages = [
        PipelineStage(module, chunk.stage.stage_index, len(plan.stages), place.device, group=group)
        for module, chunk in zip(modules, chunks, strict=True)
    ]
    schedule: ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B
    if plan.strategy.schedule == "interleaved_1f1b":
        schedule = ScheduleInterleaved1F1B(list(stages), num_micro_batches, loss_fn=_loss_is_output, scale_grads=False)
    elif plan.strategy.schedule == "1f1b":
        schedule = Schedule1F1B(stages[0], num_micro_batches, loss_fn=_loss_is_output, scale_grads=False)
    else:
        schedule = ScheduleGPipe(stages[0], num_micro_batches, loss_fn=_loss_is_output, scale_grads=False)
    return Pipeline(schedule=schedule, num_micro_batches=num_micro_batches, holds_last=any(chunk.holds_last_block for chunk in chunks))


def _loss_is_output(output: Tensor, target: Tensor) -> Tensor:
    return output


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedParameters:
    """Parameters of which the first and the last stage hold a copy each: `names` of this rank's copies, and the two ranks' group."""

    names: tuple[str, ...]
    group: dist.ProcessGroup | None

    def sum_gradients(self, parameters: dict[str, nn.Parameter]) -> None:
        """Replace the gradients of both copies by their sum, so that equal weights stay equal."""
        for name in self.names:
            gradient = parameters[name].grad
            if gradient is None:
                raise InputError(f"{name} is shared between stages but got no gradient", where=name, remedy="untie it, or use pp = 1")
            dist.all_reduce(local(gradient), group=self.group)


def tied_groups(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Names of parameters that are one, for every parameter with several names. Ask before the model is split."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def between_stages(tied: tuple[tuple[str, ...], ...], model: nn.Module, blocks: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Those of `tied` that live on both sides of the blocks, or inside them: two names in one module's neighbourhood stay with one stage."""
    sides = outside_modules(model, blocks)

    def apart(names: tuple[str, ...]) -> bool:
        owners = [name.rpartition(".")[0] for name in names]
        return not any(all(owner in side for owner in owners) for side in sides)

    return tuple(names for names in tied if apart(names))


def tie_stages(tied: tuple[tuple[str, ...], ...], chunks: Sequence[ModelPart], plan: Plan, place: Place) -> TiedParameters:
    """Find the tied parameters that stages share, and connect their ranks. Collective: every rank calls it with the same `tied`.

    Raises InputError when a tied parameter lives inside a block, where more than two stages might share it.
    """
    inside = [group for group in tied if any(name.startswith(block + ".") for name in group for block in chunks[0].all_blocks)]
    if inside:
        raise InputError(f"{' and '.join(inside[0])} are one parameter inside blocks", where="runtime.pipeline", remedy="use pp = 1")
    if not tied or plan.strategy.mesh.pp == 1:
        return TiedParameters(names=(), group=None)
    ends = [plan.stages[0].rank_index, plan.stages[-1].rank_index]
    mine = None
    for pair in place.mesh.mesh[ends].reshape(2, -1).T.tolist():
        group = dist.new_group(pair)
        if dist.get_rank() in pair:
            mine = group
    held = {name for chunk in chunks for name in chunk.parameter_names()}
    names = tuple(name for group in tied for name in group[:1] if name in held) or tuple(
        name for group in tied for name in group[-1:] if name in held
    )
    return TiedParameters(names=names, group=mine)
