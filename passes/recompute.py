"""Recompute: run a block's forward again in its backward instead of keeping its activations (Chen et al. 2016, arXiv:1604.06174).

    none       nothing is wrapped
    full       every block keeps its input only
    first_k    the first Stage.recompute_layers blocks of each chunk do
    selective  every block keeps the outputs of its matmuls and attention, and recomputes the rest

Mechanism: torch.utils.checkpoint, non-reentrant, around the block's own forward, so that module and parameter names do not change. It must come after
tensor placements: parallelize_module matches names and would skip a wrapped module with no more than a warning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from costmodel.errors import InputError
from passes.chain import ModelPart
from planner.plan import Plan

_ATEN = torch.ops.aten
SAVED_BY_SELECTIVE = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        _ATEN.convolution.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
    }
)


def wrapped_blocks(chunk: ModelPart, plan: Plan) -> tuple[str, ...]:
    """Paths of the blocks that recompute. Raises InputError when the stage asks for more blocks than it has."""
    mode = plan.strategy.recompute
    if mode == "none":
        return ()
    if mode != "first_k":
        return chunk.blocks
    count = chunk.stage.recompute_layers
    if not 0 <= count <= len(chunk.blocks):
        raise InputError(
            f"recompute_layers is {count} but the stage has {len(chunk.blocks)} blocks",
            where=f"Plan.stages[{chunk.stage.stage_index}].recompute_layers",
            remedy="make the plan again",
        )
    return chunk.blocks[:count]


def wrap_blocks(chunk: ModelPart, plan: Plan) -> str:
    """Wrap the chunk's blocks as the plan says; returns what was done."""
    context_fn = _selective_contexts if plan.strategy.recompute == "selective" else None
    paths = wrapped_blocks(chunk, plan)
    for path in paths:
        block = chunk.module.get_submodule(path)
        block.forward = _checkpointed(block.forward, context_fn)
    return f"{len(paths)} of {len(chunk.blocks)} blocks recompute ({plan.strategy.recompute})"


def is_wrapped(block: nn.Module) -> bool:
    """Whether the block's forward recomputes."""
    return getattr(block.forward, "func", None) is _run_checkpointed


def verify_recompute(chunk: ModelPart, plan: Plan) -> None:
    """Raise InputError unless exactly the blocks that should recompute do."""
    wanted = set(wrapped_blocks(chunk, plan))
    actual = {path for path in chunk.blocks if is_wrapped(chunk.module.get_submodule(path))}
    if actual != wanted:
        raise InputError(
            f"{len(actual)} blocks recompute, the plan says {len(wanted)}", where="passes.recompute", remedy="report this model"
        )


def _checkpointed(forward: Callable[..., Any], context_fn: Callable[[], Any] | None) -> Callable[..., Any]:
    options = {"context_fn": context_fn} if context_fn else {}
    return functools.partial(_run_checkpointed, forward, options)


def _run_checkpointed(forward: Callable[..., Any], options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED_BY_SELECTIVE else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
