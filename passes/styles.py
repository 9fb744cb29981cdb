"""DTensor styles for what torch's own Colwise, Rowwise and SequenceParallel styles leave open.

Inside a block, tensor parallelism has *regions*: a module whose linears are column-parallel (attention, mlp) is entered with the whole sequence and left by a
row-parallel linear. `EnterRegion` hands the region one replicated DTensor, so that the input gradients of its column linears are summed before
one collective: an all-reduce, or with sequence parallelism a reduce-scatter (all-gather in forward). Outside the regions, with sequence
parallelism, every tensor is this rank's part of the sequence (dim 1), and parameters see only that part: `OnSequenceShard` makes their gradients
partial sums that DTensor reduces.
(Korthikanti et al. 2022, arXiv:2205.05198: sequence parallelism; torch.distributed.tensor.parallel: the styles.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from costmodel.errors import InputError

SEQUENCE_DIM = 1


class EnterRegion(ParallelStyle):
    """The module's hidden-state input becomes one replicated DTensor. `sharded`: it arrives as this rank's part of the sequence."""

    def __init__(self, *, sharded: bool) -> None:
        self.placement = Shard(SEQUENCE_DIM) if sharded else Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return change_hidden(args, kwargs, self._whole, device_mesh)

        module.register_forward_pre_hook(enter, with_kwargs=True)
        return module

    def _whole(self, hidden: Tensor, mesh: DeviceMesh) -> Tensor:
        if isinstance(hidden, DTensor):
            return hidden
        return DTensor.from_local(hidden, mesh, (self.placement,), run_check=False).redistribute(placements=(Replicate(),))


class EnterSequenceShard(ParallelStyle):
    """The block's hidden-state input, whole on every rank, becomes this rank's part of the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return change_hidden(args, kwargs, _sequence_shard, device_mesh)

        module.register_forward_pre_hook(enter, with_kwargs=True)
        return module


class LeaveSequenceShard(ParallelStyle):
    """The block's output (first tensor), this rank's part of the sequence, becomes whole on every rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if isinstance(output, tuple):
                return (gather_sequence(output[0], device_mesh), *output[1:])
            return gather_sequence(output, device_mesh)

        module.register_forward_hook(leave)
        return module


class OnSequenceShard(ParallelStyle):
    """A token-wise module on this rank's part of the sequence: replicated parameters whose gradients are summed over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replicate_parameters(module, device_mesh)

        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (_as(args[0], device_mesh, SEQUENCE_DIM), *args[1:])

        def leave(_: nn.Module, args: tuple[Any, ...], output: DTensor) -> Tensor:
            return output.to_local()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module


class InsideRegion(ParallelStyle):
    """A replicated module inside a region: on the region's whole input it stays whole; on a plain tensor (this rank's heads) gradients are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replicate_parameters(module, device_mesh)

        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (args[0] if isinstance(args[0], DTensor) else _as(args[0], device_mesh, 0), *args[1:])

        def leave(_: nn.Module, args: tuple[Any, ...], output: DTensor) -> Tensor:
            return output if output.placements[0].is_replicate() else output.to_local()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module


class WholeInput(ParallelStyle):
    """Guard before a column-parallel linear under sequence parallelism: it must read the region's gathered input."""

    def __init__(self, path: str) -> None:
        self.path = path

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def check(_: nn.Module, args: tuple[Any, ...]) -> None:
            if not isinstance(args[0], DTensor):
                raise InputError(
                    f"column-parallel {self.path} reads a tensor of which this rank may hold only a part of the sequence",
                    where="passes.placements",
                    remedy="plan with sequence_parallel off for this model",
                )

        module.register_forward_pre_hook(check)
        return module


def replicate_parameters(module: nn.Module, mesh: DeviceMesh) -> None:
    """Turn the module's parameters into replicated DTensors, in place (equal on all ranks: runtime.apply checks that)."""
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            whole = DTensor.from_local(parameter.detach(), mesh, (Replicate(),), run_check=False)
            child.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def change_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor, DeviceMesh], Tensor], mesh: DeviceMesh
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Change the hidden state: the first positional argument, else the first floating-point keyword of (batch, sequence, features)."""
    if args:
        return (change(args[0], mesh), *args[1:]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3:
            return args, {**kwargs, name: change(value, mesh)}
    raise InputError("a tensor-parallel module was called without a hidden state", where="passes.placements", remedy="use tp = 1")


def _as(value: Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    if isinstance(value, DTensor):
        return value.redistribute(placements=(Shard(dim),))
    return DTensor.from_local(value, mesh, (Shard(dim),), run_check=False)


def _sequence_shard(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    if hidden.ndim < 3 or hidden.shape[SEQUENCE_DIM] % mesh.size():
        raise InputError(
            f"hidden state {tuple(hidden.shape)} has no sequence dim 1 that {mesh.size()} ranks divide",
            where="passes.placements",
            remedy="plan with sequence_parallel off, or change the sequence length",
        )
    whole = DTensor.from_local(hidden, mesh, (Replicate(),), run_check=False)
    return whole.redistribute(placements=(Shard(SEQUENCE_DIM),)).to_local()


def gather_sequence(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    """The whole sequence, as a tensor of its own: fully_shard's backward hook would be lost with a view that is changed in place."""
    part = DTensor.from_local(hidden, mesh, (Shard(SEQUENCE_DIM),), run_check=False)
    return part.redistribute(placements=(Replicate(),)).to_local().clone()


def local_bytes(module: nn.Module) -> tuple[int, int]:
    """Bytes of the module's parameters on this rank, and of the whole parameters."""
    local = whole = 0
    for parameter in module.parameters():
        part: torch.Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local += part.numel() * part.element_size()
        whole += parameter.numel() * parameter.element_size()
    return local, whole
