"""Executes plans with torch.distributed: `apply(plan, model, loss_fn=...)` gives a Trainer whose `step(batch)` trains."""

from runtime.build import apply
from runtime.trainer import Trainer

__all__ = ["Trainer", "apply"]
