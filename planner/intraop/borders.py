"""Borders: what enters and leaves a block, and which of their placements are one choice.

input           "R", or cut along a dim when it is per token (tables and ids that all layers share stay whole)
parameter       "R" or cut along any dim
output          of a layer: the placement of the input with the same shape (layers follow one another); else any but "P"
x.grad          of an output: as that output was handed on; of an input: must leave as the input came
w.grad          must leave as the parameter is held; reduced once for `num_micro_batches` micro-batches
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.graph import Block, Tensor
from planner.intraop.layout import REPLICATE, shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """`tensor_id` leaves the block in the placement of `owner` (the name of another choice, or of this border itself when it is free)."""

    tensor_id: str
    phase: str
    owner: str
    options: tuple[str, ...] = ()


def choices(block: Block, size: int, fixed: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Placements of every tensor that no node makes, except the gradients of the outputs (see `aliases`)."""
    made = {name for node in block.nodes for name in node.outputs}
    entering = aliases(block)
    return {
        tensor.tensor_id: (fixed[tensor.tensor_id],) if tensor.tensor_id in fixed else _options(tensor, size)
        for tensor in block.tensors
        if tensor.tensor_id not in made and tensor.tensor_id not in entering
    }


def borders(block: Block, size: int, fixed: Mapping[str, str]) -> tuple[Border, ...]:
    """What leaves the block, in order: outputs, gradients of inputs, gradients of parameters."""
    made = {name for node in block.nodes for name in node.outputs}
    tensors = {tensor.tensor_id: tensor for tensor in block.tensors}
    found = []
    for name in block.outputs:
        if name in made:
            twin = _twin(block, tensors, name)
            own = (fixed[name],) if name in fixed else _options(tensors[name], size)
            found.append(Border(tensor_id=name, phase="forward", owner=twin or f"{name}@out", options=() if twin else own))
    for tensor in block.tensors:
        gradient = f"{tensor.tensor_id}.grad"
        if gradient in made and (tensor.kind == "parameter" or tensor.tensor_id in block.inputs):
            phase = "step" if tensor.kind == "parameter" else "backward"
            found.append(Border(tensor_id=gradient, phase=phase, owner=tensor.tensor_id))
    return tuple(found)


def aliases(block: Block) -> dict[str, str]:
    """Gradient that enters -> the choice it follows: how its output leaves."""
    made = {name for node in block.nodes for name in node.outputs}
    tensors = {tensor.tensor_id: tensor for tensor in block.tensors}
    return {
        f"{name}.grad": _twin(block, tensors, name) or f"{name}@out"
        for name in block.outputs
        if f"{name}.grad" in tensors and f"{name}.grad" not in made
    }


def _twin(block: Block, tensors: dict[str, Tensor], name: str) -> str:
    if block.role != "layer":
        return ""
    output = tensors[name]
    same = (tensors[given] for given in block.inputs)
    return next((t.tensor_id for t in same if (t.shape, t.axes, t.dtype) == (output.shape, output.axes, output.dtype)), "")


def _options(tensor: Tensor, size: int) -> tuple[str, ...]:
    per_token = bool({"batch", "tokens"} & set(tensor.axes)) and tensor.dtype in ("compute", "fp32")
    if size == 1 or not (per_token or tensor.kind == "parameter"):
        return (REPLICATE,)
    return (REPLICATE, *(shard(dim) for dim, extent in enumerate(tensor.shape) if extent > 1 and extent % size == 0))
