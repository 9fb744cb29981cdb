"""Which blocks a model runs, in what order, and which of them are the same: one fake forward of the whole model.

Two block calls are one kind when their classes, parameters and inputs agree and they issue the same operators with the same shapes and arguments
(float arguments aside): a layer that behaves differently is found by what it does, not by what its attributes say.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from planner.capture_trace import issue


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockCall:
    """One call of a block: its inputs and outputs as they were, and the signature that makes it a kind."""

    path: str
    module: nn.Module
    leaves: list[Any]
    spec: TreeSpec
    outputs: list[Any]
    output_spec: TreeSpec
    signature: int

    def tensors(self) -> dict[str, Tensor]:
        """Distinct input tensors under the names that the block's forward gives them."""
        accepted = list(inspect.signature(type(self.module).forward).parameters)[1:]
        args, kwargs = tree_unflatten([_Slot(index=i) for i in range(len(self.leaves))], self.spec)
        names: dict[int, str] = {}
        for position, item in enumerate(args):
            for slot in _slots(item):
                names[slot.index] = accepted[position] if position < len(accepted) else f"input.{position}"
        for key, item in kwargs.items():
            for slot in _slots(item):
                names[slot.index] = key
        named: dict[str, Tensor] = {}
        for index, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor) and not any(leaf is known for known in named.values()):
                name = names[index]
                while name in named:
                    name += "'"
                named[name] = leaf
        return named

    def run(self, tensors: dict[str, Tensor], module: nn.Module) -> list[Tensor]:
        """Call the block with `tensors` in the places of its inputs; the output tensors."""
        mine = self.tensors()
        swapped = [next((tensors[name] for name, known in mine.items() if leaf is known), leaf) for leaf in self.leaves]
        args, kwargs = tree_unflatten(swapped, self.spec)
        return [item for item in tree_flatten(module(*args, **kwargs))[0] if isinstance(item, Tensor)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """Stands for leaf number `index` when a tree is taken apart for its names."""

    index: int


def _slots(tree: Any) -> list[_Slot]:
    return [item for item in tree_flatten(tree)[0] if isinstance(item, _Slot)]


class _Fingerprint(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hashes the operators issued while a block is on top of `stack`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hashes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = issue(func, args, kwargs or {})
        if self.hashes and func is not torch.ops.prim.device.default:
            made = tuple(_describe(item) for item in (out if isinstance(out, list | tuple) else (out,)))
            given = tuple(_describe(item) for item in args) + tuple(_describe(item) for item in (kwargs or {}).values())
            self.hashes[-1] = hash((self.hashes[-1], func, made, given))
        return out


def _describe(item: Any) -> Any:
    if isinstance(item, Tensor):
        return tuple(item.shape), item.dtype
    if isinstance(item, list | tuple):
        return tuple(map(_describe, item))
    return item if isinstance(item, int | str | None) else type(item).__name__


def survey(run: Callable[[], Any], blocks: dict[str, nn.Module]) -> list[BlockCall]:
    """Run the model once and return the calls of `blocks` in order. A block called inside another block belongs to the outer one."""
    calls: list[BlockCall] = []
    mode = _Fingerprint()
    open_calls: list[tuple[str, Any]] = []

    def enter(module: nn.Module, args: Any, kwargs: Any, path: str) -> None:
        mode.hashes.append(0)
        open_calls.append((path, tree_flatten((args, kwargs))))

    def leave(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        path, (leaves, spec) = open_calls.pop()
        trace = mode.hashes.pop()
        if open_calls:
            return
        outputs, output_spec = tree_flatten(out)
        signature = hash((type(module), _parameters(module), tuple(map(_entry, leaves)), str(spec), trace, tuple(map(_entry, outputs))))
        calls.append(
            BlockCall(
                path=path, module=module, leaves=leaves, spec=spec, outputs=outputs, output_spec=output_spec, signature=signature
            )
        )  # fmt: skip

    handles = []
    for path, block in blocks.items():
        pre = lambda module, args, kwargs, path=path: enter(module, args, kwargs, path)  # noqa: E731
        handles.append(block.register_forward_pre_hook(pre, with_kwargs=True))
        handles.append(block.register_forward_hook(leave, with_kwargs=True))
    try:
        with mode:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _parameters(module: nn.Module) -> tuple[Any, ...]:
    return tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters())


def _entry(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad, leaf.stride()
    return leaf if isinstance(leaf, int | float | str | None) else type(leaf).__name__
