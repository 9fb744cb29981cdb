"""What a training run is, by names that no plan changes: the tensors that a checkpoint holds.

    parameters/NAME        a parameter of the whole model; shared ones once, under their first name
    buffers/NAME           a persistent buffer
    states/NAME/KEY        an optimizer state of that parameter: a tensor of its shape, or a number
    settings/NAME          the numbers of its parameter group (lr, betas, eps, weight_decay, ...), by sorted key

A rank contributes its parts as DTensors, so whatever mesh, stage cut or ZeRO stage writes them, another can read them. An optimizer whose states depend on
how a tensor is cut (8-bit blocks) hands them over whole: see `PortableStates`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from costmodel.errors import InputError

Sizes = Mapping[str, tuple[torch.Size, torch.dtype]]
REMEDY = "resume with the model and the optimizer that wrote the checkpoint"


@runtime_checkable
class PortableStates(Protocol):
    """An optimizer that turns a parameter's states into tensors of the parameter's layout, and back."""

    def portable(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The states as tensors of the parameter's shape and placements, or numbers."""

    def take(self, parameter: nn.Parameter, states: dict[str, Tensor]) -> None:
        """Adopt what `portable` gave."""


def held_tensors(
    parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor], optimizer: Optimizer, names: Mapping[str, str]
) -> dict[str, Tensor]:
    """This rank's tensors by checkpoint name. names: the first name of a shared parameter, by every other."""
    found: dict[str, Tensor] = {f"buffers/{name}": tensor for name, tensor in buffers.items()}
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in parameters.items():
        key = names.get(name, name)
        found[f"parameters/{key}"] = parameter.detach()
        if id(parameter) in groups:
            found[f"settings/{key}"] = torch.tensor(_numbers(groups[id(parameter)]), dtype=torch.float64)
            found |= {f"states/{key}/{state}": value for state, value in _states(optimizer, parameter).items()}
    return found


def tensors_to_fill(
    parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor], optimizer: Optimizer, names: Mapping[str, str], stored: Sizes
) -> dict[str, Tensor]:
    """Tensors of this rank's layout for everything that a checkpoint with `stored` holds of it; parameters and buffers are the live ones.

    Raises InputError when the checkpoint lacks a tensor or has it in another shape.
    """
    wanted: dict[str, Tensor] = {f"buffers/{name}": tensor for name, tensor in buffers.items()}
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in parameters.items():
        key = names.get(name, name)
        wanted[f"parameters/{key}"] = parameter.detach()
        if id(parameter) not in groups:
            continue
        wanted[f"settings/{key}"] = torch.tensor(_numbers(groups[id(parameter)]), dtype=torch.float64)
        for state in (entry for entry in stored if entry.rpartition("/")[0] == f"states/{key}"):
            size, dtype = stored[state]
            whole = size == parameter.shape
            wanted[state] = torch.zeros_like(parameter, dtype=dtype).detach() if whole else torch.zeros(size, dtype=dtype)
    for entry, tensor in wanted.items():
        if entry not in stored or stored[entry][0] != tensor.shape:
            what = f"{entry} is {tuple(stored[entry][0])}" if entry in stored else f"{entry} is missing"
            raise InputError(f"{what}, this run has {tuple(tensor.shape)}", where="checkpoint", remedy=REMEDY)
    return wanted


def adopt(parameters: Mapping[str, nn.Parameter], optimizer: Optimizer, names: Mapping[str, str], filled: Mapping[str, Tensor]) -> None:
    """Give the optimizer the states and settings of `filled` (of which parameters and buffers are live already)."""
    for group in optimizer.param_groups:
        known = {id(parameter): name for name, parameter in parameters.items()}
        for parameter in group["params"]:
            name = known[id(parameter)]
            key = names.get(name, name)
            prefix = f"states/{key}/"
            states = {entry.removeprefix(prefix): value for entry, value in filled.items() if entry.startswith(prefix)}
            if isinstance(optimizer, PortableStates):
                optimizer.take(parameter, states)
            elif states:
                optimizer.state[parameter] = states
        _set_numbers(group, filled[f"settings/{key}"].tolist())


def _states(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    if isinstance(optimizer, PortableStates):
        return optimizer.portable(parameter)
    states: dict[str, Tensor] = {}
    for name, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor):
            states[name] = value.detach()
        elif value is not None:
            raise InputError(f"optimizer state {name!r} is a {type(value).__name__}", where="optimizer", remedy="keep states in tensors")
    return states


def _number_keys(group: Mapping[str, Any]) -> list[str]:
    def numbers(value: object) -> bool:
        parts = value if isinstance(value, tuple | list) else (value,)
        return bool(parts) and all(
            (isinstance(part, int | float) and not isinstance(part, bool)) or (isinstance(part, Tensor) and part.ndim == 0)
            for part in parts
        )

    return [key for key in sorted(group) if key != "params" and numbers(group[key])]


def _numbers(group: Mapping[str, Any]) -> list[float]:
    return [float(part) for key in _number_keys(group) for part in (group[key] if isinstance(group[key], tuple | list) else (group[key],))]


def _set_numbers(group: dict[str, Any], values: list[float]) -> None:
    rest = iter(values)
    for key in _number_keys(group):
        old = group[key]
        if isinstance(old, Tensor):
            old.fill_(next(rest))
        elif isinstance(old, tuple | list):
            group[key] = type(old)(type(part)(next(rest)) for part in old)
        else:
            group[key] = type(old)(next(rest))


def sizes_of(metadata: Mapping[str, Any]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every tensor of a torch.distributed.checkpoint metadata."""
    return {name: (entry.size, entry.properties.dtype) for name, entry in metadata.items() if hasattr(entry, "size")}


def first_names(tied: tuple[tuple[str, ...], ...]) -> dict[str, str]:
    """The first name of every shared parameter, by each of its others."""
    return {name: group[0] for group in tied for name in group[1:]}


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to the model's state, by name."""
    found = {}
    for path, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                found[f"{path}.{name}".lstrip(".")] = buffer.to_local() if isinstance(buffer, DTensor) else buffer
    return found
