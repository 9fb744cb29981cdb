"""StageModule: a chunk with its inputs and its loss, the one module that the engine, data parallelism and pipeline schedules call."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from costmodel.errors import InputError
from passes.chain import ModelPart
from passes.split import EndOfStageError, Inbox
from runtime.batch import Batch, Loss, accepted_names, model_inputs


class StageModule(nn.Module):
    """forward(*received, index): run micro-batch `index` of `batches`; gives the hidden state for the next stage, or, on the last, the scaled loss.

    received: the hidden state of the stage before, absent on the first. The loss is multiplied by `loss_scale` (1 / micro-batches), so that gradients
    of all micro-batches add up to those of their mean.
    """

    def __init__(
        self, chunk: ModelPart, inbox: Inbox, loss_fn: Loss, *, loss_scale: float, autocast: torch.dtype | None, cast: torch.dtype | None
    ) -> None:
        super().__init__()
        self.model = chunk.module
        self.stage_index = chunk.stage.stage_index
        self.inbox, self.loss_fn, self.loss_scale = inbox, loss_fn, loss_scale
        self.autocast, self.cast = autocast, cast
        self.accepted = accepted_names(chunk.module)
        self.batches: list[Batch] = []

    def forward(self, *received: Tensor, index: Tensor) -> Tensor:
        """See the class."""
        batch = self.batches[int(index)]
        args, kwargs = model_inputs(batch, self.accepted)
        if self.cast is not None:
            args = tuple(_cast(value, self.cast) for value in args)
            kwargs = {name: _cast(value, self.cast) for name, value in kwargs.items()}
        if received:
            self.inbox.put(received[0])
        with self._precision(batch):
            try:
                output = self.model(*args, **kwargs)
            except EndOfStageError as end:
                return end.hidden
            return _scalar(self.loss_fn(output, batch)) * self.loss_scale

    def _precision(self, batch: Batch) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        device = batch.device if isinstance(batch, Tensor) else next(iter(batch.values())).device
        return torch.autocast(device.type, self.autocast)


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _scalar(loss: object) -> Tensor:
    if not isinstance(loss, Tensor):
        what = f"a {type(loss).__name__}"
    elif loss.numel() == 1 and (loss.requires_grad or not torch.is_grad_enabled()):
        return loss.reshape(())
    else:
        what = f"a tensor of shape {tuple(loss.shape)}" + ("" if loss.requires_grad else " without gradient")
    raise InputError(
        f"loss_fn gave {what}", where="loss_fn", remedy="return the mean loss of the micro-batch as a scalar tensor with a gradient"
    )
