"""LiveBytes: the bytes of all live tensors of this process, op by op. What a device allocator would count, without a device.

Every storage that an op returns counts from then until it is freed; views share a storage. Storages that are resized in place (fully_shard empties and refills
its gathered parameters so) are looked at after every op. Only real tensors count: DTensor's wrappers and fake tensors are none.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_WRAPPERS = (DTensor, AsyncCollectiveTensor)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Use as a context around what is to be measured; `peak_bytes` is then the largest sum of live bytes after any op.

    base: tensors alive already.
    """

    def __init__(self, base: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live_bytes = 0
        self.peak_bytes = 0
        self._seen: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._resized: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        for tensor in base:
            self._add(tensor)
        self._look()

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and count what it returns."""
        if any(issubclass(kind, _WRAPPERS) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        self._look()
        return result

    def _add(self, tensor: Tensor) -> None:
        if isinstance(tensor, (FakeTensor, *_WRAPPERS)) or tensor.is_meta or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        size_bytes = storage.nbytes()
        self._seen[storage] = size_bytes
        if size_bytes == 0:
            self._resized.add(storage)
            return
        self._live_bytes += size_bytes
        weakref.finalize(storage, self._freed, size_bytes).atexit = False

    def _freed(self, size_bytes: int) -> None:
        self._live_bytes -= size_bytes

    def _look(self) -> None:
        refilled_bytes = sum(storage.nbytes() for storage in self._resized)
        self.peak_bytes = max(self.peak_bytes, self._live_bytes + refilled_bytes)


def live_tensors() -> list[Tensor]:
    """Every tensor that Python can reach in this process, with the local parts of distributed ones."""
    found: list[Tensor] = []
    for item in gc.get_objects():
        kind = type(item)
        if issubclass(kind, DTensor):
            found.append(item._local_tensor)
        elif issubclass(kind, Tensor):
            found.append(item)
    return found
