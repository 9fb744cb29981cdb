"""What eager PyTorch does for one module call, written down: every ATen operator of forward and backward on fake tensors.

A `Recorder` is a dispatch mode above a FakeTensorMode: it sees the operators that the autograd engine really issues, in order, with storages,
strides and module paths, while no element is ever computed or allocated. What autograd keeps is read from saved_tensors_hooks, so `saved` is
eager's own answer and not a reconstruction. Backward operators are linked to forward ones by autograd's sequence numbers.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

_NO_KERNEL = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "device"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Strided:
    """One tensor as an operator saw it: strides and offset in bytes. Equal ones are the same elements in the same order."""

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One operator call. `args` has a Strided in every tensor's place. `seq` is autograd's sequence number of the (forward) operator."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Strided, ...]
    phase: str
    module: str
    seq: int
    view: bool
    kernel: bool
    pointwise: bool

    @property
    def inputs(self) -> tuple[Strided, ...]:
        """All tensor arguments in order."""
        return tuple(values_in((self.args, tuple(self.kwargs.values()))))


def values_in(tree: Any) -> Iterator[Strided]:
    """Every Strided in nested tuples."""
    if isinstance(tree, Strided):
        yield tree
    elif isinstance(tree, tuple):
        for item in tree:
            yield from values_in(item)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """One recorded call: operators, what autograd kept, and the values that name its borders."""

    records: list[Record]
    saved: list[int]
    parameters: dict[str, Strided]
    trainable: frozenset[str]
    buffers: dict[str, Strided]
    inputs: dict[str, Strided]
    outputs: list[Strided]
    grad_outputs: list[tuple[Strided, Strided]]
    grads: dict[str, Strided]


def issue(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on fake tensors. FakeTensor knows grouped matmuls in bf16 only; their shapes are the same in every dtype."""
    if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
        made = func(args[0].to(torch.bfloat16), args[1].to(torch.bfloat16), *args[2:], **kwargs)
        return torch.empty_strided(made.shape, made.stride(), dtype=args[0].dtype)
    return func(*args, **kwargs)


class _Kept:
    """A tensor that autograd saved; it lives as long as the backward node that needs it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects Records. Names modules by `paths` (id of module -> path); `pause` hides operators that are ours."""

    def __init__(self, paths: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: list[Record] = []
        self.phase = "forward"
        self.paused = False
        self._paths = paths
        self._stack: list[str] = []
        self._storages: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []
        self._kept: list[tuple[int, weakref.ref[_Kept]]] = []
        self._modules: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = issue(func, args, kwargs or {})
        if not self.paused and func is not torch.ops.prim.device.default:
            self._record(func, args, kwargs or {}, out)
        return out

    def value(self, tensor: Tensor) -> Strided:
        """The Strided of `tensor`; keeps its storage alive so that identities stay unique."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = len(self._storages)
            self._alive.append(storage)
        width = tensor.element_size()
        return Strided(
            storage=self._storages[key], shape=tuple(tensor.shape), strides=tuple(stride * width for stride in tensor.stride()),
            offset=int(tensor.storage_offset()) * width, dtype=str(tensor.dtype)[6:],
        )  # fmt: skip

    def mark(
        self, op: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], index: int, path: str, pairs: tuple[Strided, ...] = ()
    ) -> None:
        """Record a border: block number `index` at `path` ran here. Backward, `pairs` are the forward values of `inputs` and then of `outputs`."""
        record = Record(
            op=op, args=(tuple(map(self.value, inputs)), index, pairs), kwargs={}, outputs=tuple(map(self.value, outputs)), phase=self.phase,
            module=path, seq=-1, view=False, kernel=False, pointwise=False,
        )  # fmt: skip
        self.records.append(record)

    def _convert(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            return self.value(item)
        if isinstance(item, list | tuple):
            return tuple(map(self._convert, item))
        return item if isinstance(item, int | float | bool | str | None) else str(item)

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        outputs = tuple(values_in(self._convert(out if isinstance(out, list | tuple) else (out,))))
        if not outputs:
            return
        if self.phase == "backward":
            node = torch._C._current_autograd_node()
            seq = node._sequence_nr() if node is not None else -1
            module = self._modules.get(seq, "")
        else:
            seq = torch._C._autograd._get_sequence_nr() - 1
            module = self._stack[-1] if self._stack else ""
            self._modules.setdefault(seq, module)
        name = func._schema.name.split("::")[1]
        converted = tuple(map(self._convert, args))
        named = {key: self._convert(item) for key, item in kwargs.items()}
        sources = {value.storage for value in values_in((converted, tuple(named.values())))}
        view = not func._schema.is_mutable and all(value.storage in sources for value in outputs)
        record = Record(
            op=name, args=converted, kwargs=named, outputs=outputs, phase=self.phase, module=module, seq=seq, view=view,
            kernel=not view and name not in _NO_KERNEL, pointwise=torch.Tag.pointwise in func.tags,
        )  # fmt: skip
        self.records.append(record)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if id(module) in self._paths:
            self._stack.append(self._paths[id(module)])

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if id(module) in self._paths:
            self._stack.pop()

    def _pack(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        if self.phase == "forward" and not self.paused:
            self._kept.append((self.value(tensor).storage, weakref.ref(kept)))
        return kept

    def saved(self) -> list[int]:
        """Storages that autograd holds now. What belongs to results that were dropped (values of a top-k that only routes) is gone already."""
        return list(dict.fromkeys(storage for storage, kept in self._kept if kept() is not None))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Hooks and mode on."""
        handles = (register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave))
        try:
            with self, torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()


def differentiate(
    recorder: Recorder, outputs: Sequence[Tensor], targets: dict[str, Tensor]
) -> tuple[list[tuple[Strided, Strided]], dict[str, Strided]]:
    """Backward of `outputs` to `targets`, recorded: (each output with its incoming gradient, each gradient that exists)."""
    recorder.paused = True
    incoming = [torch.empty_like(out) for out in outputs]
    values = [(recorder.value(out), recorder.value(grad)) for out, grad in zip(outputs, incoming, strict=True)]
    recorder.paused, recorder.phase = False, "backward"
    if not outputs or not targets:
        return values, {}
    found = torch.autograd.grad(outputs, list(targets.values()), incoming, allow_unused=True)
    return values, {name: recorder.value(grad) for name, grad in zip(targets, found, strict=True) if grad is not None}


def finish_trace(
    recorder: Recorder, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Mapping[str, Tensor], outputs: Sequence[Tensor],
    saved: list[int], gradients: tuple[list[tuple[Strided, Strided]], dict[str, Strided]],
) -> Trace:  # fmt: skip
    """The Trace of a recorder that has seen forward and backward."""
    return Trace(
        records=recorder.records,
        saved=saved,
        parameters={name: recorder.value(parameter) for name, parameter in parameters.items()},
        trainable=frozenset(name for name, parameter in parameters.items() if parameter.requires_grad),
        buffers={name: recorder.value(buffer) for name, buffer in buffers.items()},
        inputs={name: recorder.value(tensor) for name, tensor in inputs.items()},
        outputs=[recorder.value(out) for out in outputs],
        grad_outputs=gradients[0],
        grads=gradients[1],
    )


def trace_call(module: nn.Module, inputs: dict[str, Tensor], call: Callable[[dict[str, Tensor]], Sequence[Tensor]]) -> Trace:
    """Record `call(inputs)` (returns the output tensors) and its backward to the parameters of `module` and the inputs that need a gradient."""
    recorder = Recorder({id(child): path for path, child in module.named_modules() if path})
    parameters = dict(module.named_parameters())
    with recorder.recording():
        outputs: list[Tensor] = []
        for out in call(inputs):
            if not any(out is known for known in (*inputs.values(), *outputs)):
                outputs.append(out)
        targets: dict[str, Tensor] = {name: p for name, p in parameters.items() if p.requires_grad}
        targets |= {f"input:{name}": tensor for name, tensor in inputs.items() if tensor.requires_grad}
        saved = recorder.saved()
        gradients = differentiate(recorder, [out for out in outputs if out.requires_grad], targets)
    return finish_trace(recorder, parameters, dict(module.named_buffers()), inputs, outputs, saved, gradients)
