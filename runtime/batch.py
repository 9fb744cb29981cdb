"""Batches: a tensor, or a mapping of tensors, whose dim 0 is the sequences of this data-parallel rank.

A mapping's entries go to the model's forward by name, as far as it takes them; "labels" stays with the loss. A tensor goes to the model as its only
argument. The loss sees the whole micro-batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from costmodel.errors import InputError

Batch = Tensor | Mapping[str, Tensor]
Loss = Callable[[Any, Any], Tensor]
LABELS = "labels"


def micro_batches(batch: Batch, count: int, size: int, device: torch.device) -> list[Batch]:
    """`count` micro-batches of `size` sequences on `device`. Raises InputError when the batch is not count x size sequences."""
    if isinstance(batch, Tensor):
        return list(_split(batch, count, size, "batch").to(device).unbind(0))
    parts = {name: _split(value, count, size, f"batch[{name!r}]").to(device) for name, value in batch.items()}
    return [{name: part[index] for name, part in parts.items()} for index in range(count)]


def model_inputs(batch: Batch, accepted: frozenset[str] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the model; `accepted` from `accepted_names`."""
    if isinstance(batch, Tensor):
        return (batch,), {}
    return (), {name: value for name, value in batch.items() if name != LABELS and (accepted is None or name in accepted)}


def accepted_names(model: nn.Module) -> frozenset[str] | None:
    """Names that the model's forward takes; None when it takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def _split(value: Tensor, count: int, size: int, where: str) -> Tensor:
    if not isinstance(value, Tensor) or value.ndim == 0 or value.shape[0] != count * size:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InputError(
            f"{shape} where dim 0 must be {count} micro-batches x {size} sequences = {count * size}",
            where=where,
            remedy="give each data-parallel rank global_batch / dp sequences",
        )
    return value.reshape(count, size, *value.shape[1:])
