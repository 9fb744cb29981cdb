"""What a run trains: `package.module:build_model`, with an optional loss_fn, batches and optimizer_factory in the same module.

build_model() -> nn.Module
loss_fn(output, batch) -> mean loss of a micro-batch          default: causal language modelling of the batch's tokens
batches(*, batch, sequence, seed) -> iterator of batches      default: random tokens of the model's vocabulary
optimizer_factory(groups) -> Optimizer                        default: the plan's optimizer
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costmodel.errors import InputError
from planner.job import Job
from runtime.batch import Batch, Loss
from runtime.optimizer import OptimizerFactory

Batches = Callable[[nn.Module, Job, int], Iterator[Batch]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model to train and its data. batches(model, job, seed) yields global batches, the same on every rank."""

    build_model: Callable[[], nn.Module]
    loss_fn: Loss
    batches: Batches
    optimizer_factory: OptimizerFactory | None


def load_target(name: str) -> Target:
    """The target called `package.module:function`, found from the working directory too. Raises InputError when it cannot be imported."""
    module_name, _, function = name.partition(":")
    if not module_name or not function:
        raise InputError(f"{name!r} is not package.module:function", where="target", remedy="for example examples.gpt:build_model")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(f"cannot import {module_name!r}: {error}", where="target", remedy="run from the folder that holds it") from error
    except Exception as error:
        remedy = "make the module importable by itself"
        raise InputError(f"importing {module_name!r} fails with {type(error).__name__}: {error}", where="target", remedy=remedy) from error
    if not callable(getattr(module, function, None)):
        raise InputError(f"{module_name} has no function {function!r}", where="target", remedy="name the function that builds the model")
    named: dict[str, Any] = vars(module)
    return Target(
        build_model=named[function],
        loss_fn=named.get("loss_fn", causal_loss),
        batches=_from_module(named["batches"]) if "batches" in named else random_tokens,
        optimizer_factory=named.get("optimizer_factory"),
    )


def causal_loss(output: Any, batch: Batch) -> Tensor:
    """Mean cross entropy of predicting token t + 1 at t, in fp32; output: logits (batch, sequence, vocab) or an object that has them.

    The tokens are the batch itself, or its "labels" (as Hugging Face has them: not shifted), or else its "input_ids".
    """
    tokens = batch if isinstance(batch, Tensor) else batch["labels" if "labels" in batch else "input_ids"]
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def random_tokens(model: nn.Module, job: Job, seed: int) -> Iterator[Batch]:
    """Endless (global_batch, seq_len) token ids, uniform over the vocabulary. Raises InputError for a model without an embedding."""
    sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    size = getattr(getattr(model, "config", None), "vocab_size", None) or max(sizes, default=0)
    if not size:
        raise InputError("the model has no embedding to draw tokens for", where="target", remedy="define batches beside build_model")
    return _token_stream(size, job, seed)


def _token_stream(vocab_size: int, job: Job, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(vocab_size, (job.global_batch, job.seq_len), generator=generator)


def _from_module(function: Callable[..., Iterator[Batch]]) -> Batches:
    def batches(model: nn.Module, job: Job, seed: int) -> Iterator[Batch]:
        return function(batch=job.global_batch, sequence=job.seq_len, seed=seed)

    return batches
