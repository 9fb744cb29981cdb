"""Optimizers by the plan's name. Learning rate and the like are the user's business: pass `optimizer_factory` to runtime.apply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, AdamW, Optimizer

from costmodel.errors import InputError
from runtime.adamw_8bit import AdamW8bit
from runtime.data_parallel import local

ParameterGroups = list[dict[str, Any]]
OptimizerFactory = Callable[[ParameterGroups], Optimizer]

LEARNING_RATE = 1e-3


def build_optimizer(name: str, groups: ParameterGroups) -> Optimizer:
    """The optimizer that `Job.optimizer` names, at LEARNING_RATE and torch's other defaults. Raises InputError when it does not run here."""
    factories: dict[str, OptimizerFactory] = {
        "adamw": lambda groups: AdamW(groups, lr=LEARNING_RATE, fused=True),
        "adamw_8bit": lambda groups: AdamW8bit(groups, lr=LEARNING_RATE),
        "sgd": lambda groups: SGD(groups, lr=LEARNING_RATE),
    }
    if name not in factories:
        raise InputError(f"optimizer {name!r} does not run here", where="Plan.job.optimizer", remedy=f"use one of {', '.join(factories)}")
    return factories[name](groups)


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of optimizer state on this rank."""
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(local(tensor).nbytes for tensor in tensors)
