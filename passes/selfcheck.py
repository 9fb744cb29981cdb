"""A tensor-parallel block must compute what the whole block does: compared once, at the first forward, for one block of every class.

Layouts say that a linear may be split; they do not say that splitting it *contiguously* is what its reader expects. A fused linear whose output is cut into
query, key and value (or gate and up) would train on, silently wrong. So a whole copy of the block is kept until its first forward; both run
without gradient and dropout on one random hidden state (the first real one may be the garbage of a pipeline's shape inference), and must agree.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from costmodel.errors import InputError
from passes.chain import ModelPart
from passes.styles import SEQUENCE_DIM, change_hidden, gather_sequence

# Rounding of what a block adds to its input, relative to its largest value, and of the sum, relative to the largest input.
TOLERANCE = {torch.float32: (1e-3, 1e-5), torch.float64: (1e-3, 1e-12), torch.bfloat16: (0.05, 0.02), torch.float16: (0.01, 0.003)}
_REMEDY = "a linear that holds several projections cannot be split contiguously: separate them, or plan with tp = 1"


def watch_blocks(part: ModelPart, whole: dict[str, nn.Module], mesh: DeviceMesh, *, sharded: bool) -> None:
    """Compare each block of `whole` (path -> copy made before placement) with the placed one when it first runs."""
    for path, copied in whole.items():
        _watch(part.module.get_submodule(path), copied, path, mesh, sharded)


def one_block_of_each_class(part: ModelPart) -> dict[str, nn.Module]:
    """Copies of the first block of every class in the part."""
    found: dict[type[nn.Module], str] = {}
    for path in part.blocks:
        found.setdefault(type(part.module.get_submodule(path)), path)
    return {path: copy.deepcopy(part.module.get_submodule(path)).eval() for path in found.values()}


def _watch(block: nn.Module, whole: nn.Module, path: str, mesh: DeviceMesh, sharded: bool) -> None:
    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()
        with torch.no_grad():
            _compare(block, whole, path, args, kwargs, mesh, sharded)

    handle = block.register_forward_pre_hook(check, with_kwargs=True)


def _compare(
    block: nn.Module, whole: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh, sharded: bool
) -> None:
    hidden: list[Tensor] = []

    def drawn(value: Tensor, mesh: DeviceMesh) -> Tensor:
        shape = list(value.shape)
        shape[SEQUENCE_DIM] *= mesh.size() if sharded else 1
        hidden.append(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(value))
        return hidden[0]

    def own(value: Tensor, mesh: DeviceMesh) -> Tensor:
        return hidden[0].chunk(mesh.size(), SEQUENCE_DIM)[mesh.get_local_rank()] if sharded else hidden[0]

    whole_args, whole_kwargs = change_hidden(args, kwargs, drawn, mesh)
    args, kwargs = change_hidden(args, kwargs, own, mesh)
    for name, parameter in block.named_parameters():  # they may have been loaded since the copy was made
        whole.get_parameter(name).copy_(parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)
    if not torch.is_autocast_enabled(hidden[0].device.type):
        whole.to(hidden[0].dtype)
    training = block.training
    block.eval()
    truth = _first(whole(*whole_args, **whole_kwargs))
    try:
        actual = _first(block.forward(*args, **kwargs))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        raise InputError(f"{path} does not run split over tp = {mesh.size()}: {error}", where="passes.selfcheck", remedy=_REMEDY) from error
    block.train(training)
    actual = gather_sequence(actual, mesh) if sharded else actual
    device = actual.device.type
    relative, rounding = TOLERANCE[torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else actual.dtype]
    added, largest = (truth - hidden[0]).abs().max(), hidden[0].abs().max()
    off = (actual - truth).abs().max()
    if not off <= relative * added + rounding * largest:
        raise InputError(
            f"{path} split over tp = {mesh.size()} is off by {float(off):.3g} where the whole block adds at most {float(added):.3g}",
            where="passes.selfcheck",
            remedy=_REMEDY,
        )


def _first(output: Any) -> Tensor:
    return next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
