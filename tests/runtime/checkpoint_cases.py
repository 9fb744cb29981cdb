"""What the ranks of the pool run for tests.runtime.test_checkpoint. Imported by the workers, not collected."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import runtime
from runtime.adamw_8bit import AdamW8bit
from runtime.state import persistent_buffers
from tests.runtime.cases import GLOBAL_BATCH, MODELS, SEQUENCE, global_batches, logits_loss, optimizer_factory
from tests.runtime.plans import make_plan


def build(model: str, plan: dict[str, Any], config: dict[str, Any], optimizer: str = "adamw") -> runtime.Trainer:
    """A trainer of `model` under `plan` with fresh weights."""
    make, facts = MODELS[model]
    made = make_plan(global_batch=GLOBAL_BATCH, seq_len=SEQUENCE, **facts, **plan)
    factory = optimizer_factory if optimizer == "adamw" else (lambda groups: AdamW8bit(groups, lr=1e-2, eps=1e-4))
    return runtime.apply(made, make(4, **config), loss_fn=logits_loss, optimizer_factory=factory)


def train(trainer: runtime.Trainer, first: int, last: int) -> list[float]:
    """Losses of steps first .. last - 1 on the batches of those steps."""
    share, losses = GLOBAL_BATCH // trainer.plan.strategy.mesh.dp, []
    for batch in global_batches(last)[first:]:
        start = trainer.place.data_index * share
        losses.append(trainer.step({name: value[start : start + share] for name, value in batch.items()}))
    return losses


def save(*, plan: dict[str, Any], directory: str, model: str = "gpt", optimizer: str = "adamw", **config: Any) -> list[float]:
    """Three steps, a checkpoint after the second, the losses."""
    trainer = build(model, plan, config, optimizer)
    losses = train(trainer, 0, 2)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 5e-3
    trainer.save(directory, extra={"note": "two steps"})
    return losses + train(trainer, 2, 4)


def load(*, plan: dict[str, Any], directory: str, model: str = "gpt", optimizer: str = "adamw", **config: Any) -> dict[str, Any]:
    """Continue from the checkpoint for two steps."""
    trainer = build(model, plan, config, optimizer)
    with torch.no_grad():
        for parameter in trainer.parameters().values():
            parameter.zero_()
    extra = trainer.load(directory)
    step = trainer.progress.step
    return {"step": step, "extra": dict(extra), "losses": train(trainer, step, step + 2), "lr": trainer.optimizer.param_groups[0]["lr"]}


def same_again(*, plan: dict[str, Any], directory: str, optimizer: str) -> bool:
    """Whether a checkpoint read and written again under one plan is the same to the bit."""
    trainer = build("gpt", plan, {}, optimizer)
    train(trainer, 0, 2)
    before = {name: {key: _bits(value) for key, value in trainer.optimizer.state[p].items()} for name, p in trainer.parameters().items()}
    trainer.save(directory)
    again = build("gpt", plan, {}, optimizer)
    again.load(directory)
    after = {name: {key: _bits(value) for key, value in again.optimizer.state[p].items()} for name, p in again.parameters().items()}
    return before == after and dist.get_rank() >= 0


def _bits(value: Any) -> Any:
    return (value.to_local() if hasattr(value, "to_local") else value).tolist() if isinstance(value, torch.Tensor) else value


def buffers(*, directory: str) -> list[float]:
    """A batch norm's running mean after saving, forgetting and loading."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    running = persistent_buffers(model)["1.running_mean"]
    assert running is model[1].running_mean
    return running.tolist()
