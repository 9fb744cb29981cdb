"""A user's module made safe to trace: fake parameters in place of real ones, inputs, loss, blocks, and errors that name the user's line."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from costmodel.errors import InputError

_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_HERE = os.path.dirname(os.path.abspath(__file__))
_DATA_DEPENDENT = ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode")


@contextlib.contextmanager
def fake_parameters(module: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None) -> Iterator[None]:
    """Every parameter, buffer and tensor attribute of `module` is a fake CPU tensor inside, and the original again outside. Nothing is copied.

    `dtype` replaces the module's main float dtype (the one most parameter elements have); other dtypes, and buffers that are not part of the state
    (rotary frequencies), stay as they are, as when a checkpoint is loaded in that dtype.
    """
    sizes: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    main = sizes.most_common(1)[0][0] if sizes else torch.float32
    fakes: dict[tuple[object, ...], Tensor] = {}
    originals: list[tuple[dict[str, Any], str, Tensor]] = []

    def fake(tensor: Tensor, keep: bool) -> Tensor:
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.dtype)
        if key not in fakes:
            kind = dtype if dtype is not None and tensor.dtype == main and not keep else tensor.dtype
            with mode:
                made = torch.empty(tensor.shape, dtype=kind, device="cpu")
            fakes[key] = nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        return fakes[key]

    try:
        for child in module.modules():
            plain = {name: item for name, item in vars(child).items() if isinstance(item, Tensor)}
            own: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
            for place, items in (*((place, dict(place)) for place in own), (vars(child), plain)):
                for name, tensor in items.items():
                    if tensor is not None:
                        originals.append((place, name, tensor))
                        place[name] = fake(tensor, place is child._buffers and name in child._non_persistent_buffers_set)
        yield
    finally:
        for place, name, tensor in originals:
            place[name] = tensor


@contextlib.contextmanager
def readable_masks() -> Iterator[None]:
    """transformers decides about attention masks by looking at values; on fake tensors answer as for unpadded, unpacked batches (restored on exit)."""
    masks = sys.modules.get("transformers.masking_utils")
    replaced: dict[str, Any] = {}

    def bidirectional(padding_mask: Any, kv_length: int, local_attention_size: int | None = None) -> bool:
        return local_attention_size is None or kv_length < local_attention_size

    def causal(padding_mask: Any, q: int, kv: int, q_offset: Any, kv_offset: Any, local_attention_size: int | None = None) -> bool:
        return q == kv and (local_attention_size is None or kv < local_attention_size)

    answers = {
        "find_packed_sequence_indices": lambda position_ids: None,
        "_ignore_causal_mask_sdpa": causal,
        "_ignore_bidirectional_mask_sdpa": bidirectional,
    }
    try:
        for name, answer in answers.items():
            if masks is not None and hasattr(masks, name):
                replaced[name] = getattr(masks, name)
                setattr(masks, name, answer)
        yield
    finally:
        for name, original in replaced.items():
            setattr(masks, name, original)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How to run the model once: `args`, `kwargs` (fake tensors), `loss` (output -> scalar); `named`: every tensor that goes in, the loss's included."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor]
    batch: int
    traced_batch: int
    named: dict[str, Tensor]


def prepare_call(
    module: nn.Module, mode: FakeTensorMode, *, batch: int, sequence: int, example_inputs: Any, loss_fn: Any, dtype: torch.dtype | None
) -> Call:
    """Inputs and loss. Models are traced with a batch of at least 2, because a dim of size 1 cannot be told from a broadcast one."""
    accepted = inspect.signature(module.forward).parameters
    traced = max(batch, 2)
    if example_inputs is None:
        kwargs, args = _default_inputs(module, mode, accepted, traced, sequence), ()
    else:
        args, kwargs, batch = _given_inputs(example_inputs, batch, mode, dtype)
        traced = max(batch, 2)
        args, kwargs = _rebatch((args, kwargs), batch, traced, mode)
    given = dict(kwargs)
    if "labels" not in accepted or loss_fn is not None:
        kwargs.pop("labels", None)
    if "use_cache" in accepted or hasattr(getattr(module, "config", None), "use_cache"):
        kwargs.setdefault("use_cache", False)
    every = [item for item in (*args, *given.values()) if isinstance(item, Tensor)]
    batch_data = given if given else (args[0] if len(args) == 1 else args)

    def loss(output: Any) -> Tensor:
        return _loss(output, loss_fn, batch_data, every)

    names = [*(f"input.{index}" for index in range(len(args))), *given]
    named = {name: item for name, item in zip(names, (*args, *given.values()), strict=True) if isinstance(item, Tensor)}
    return Call(args=args, kwargs=kwargs, loss=loss, batch=batch, traced_batch=traced, named=named)


def _default_inputs(module: nn.Module, mode: FakeTensorMode, accepted: Mapping[str, Any], batch: int, sequence: int) -> dict[str, Any]:
    config = getattr(module, "config", None)
    main = getattr(module, "main_input_name", "input_ids")
    with mode:
        if main == "pixel_values" and config is not None:
            side = config.image_size if isinstance(config.image_size, list | tuple) else (config.image_size,) * 2
            pixels = torch.empty(batch, config.num_channels, *side, dtype=next(module.parameters()).dtype)
            return {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.long)}
        ids = torch.zeros(batch, sequence, dtype=torch.long)
        open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
        if "input_ids" in accepted or open_ended:
            labels = torch.zeros(batch, sequence, dtype=torch.long)
            return {"input_ids": ids, "labels": labels}
    first = next(iter(accepted), None)
    if first is None:
        raise InputError("forward() takes no input", where=type(module).__name__, remedy="give example_inputs")
    return {first: ids, "labels": ids}


def _given_inputs(example: Any, batch: int, mode: FakeTensorMode, dtype: torch.dtype | None) -> tuple[tuple[Any, ...], dict[str, Any], int]:
    def fake(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        kind = dtype if dtype is not None and item.dtype in (torch.float32, torch.bfloat16, torch.float16) else item.dtype
        with mode:
            return torch.empty(item.shape, dtype=kind, device="cpu", requires_grad=item.requires_grad)

    items = dict(example) if isinstance(example, Mapping) else {}
    args = () if isinstance(example, Mapping) else tuple(example) if isinstance(example, list | tuple) else (example,)
    leading = Counter(item.shape[0] for item in (*args, *items.values()) if isinstance(item, Tensor) and item.ndim)
    return tuple(map(fake, args)), {name: fake(item) for name, item in items.items()}, leading.most_common(1)[0][0] if leading else batch


def _rebatch(inputs: tuple[tuple[Any, ...], dict[str, Any]], batch: int, traced: int, mode: FakeTensorMode) -> Any:
    """Inputs whose leading dim is the batch, with the traced batch instead."""

    def grow(item: Any) -> Any:
        if batch == traced or not isinstance(item, Tensor) or not item.ndim or item.shape[0] != batch:
            return item
        with mode:
            return torch.empty(traced, *item.shape[1:], dtype=item.dtype, requires_grad=item.requires_grad)

    args, kwargs = inputs
    return tuple(map(grow, args)), {name: grow(item) for name, item in kwargs.items()}


def _loss(output: Any, loss_fn: Any, batch: Any, inputs: Sequence[Tensor]) -> Tensor:
    """loss_fn(output, batch); else the model's own loss; else token cross entropy of logits; else the mean square of the first float output."""
    if loss_fn is not None:
        found: Tensor = loss_fn(output, batch)
        return found
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    if isinstance(output, Tensor) and output.ndim == 0:
        return output
    first = output if isinstance(output, Tensor) else next(item for item in _leaves(output) if item.is_floating_point())
    target = next((item for item in inputs if not item.is_floating_point() and item.shape == first.shape[:-1]), None)
    if target is not None and first.ndim == 3:
        return F.cross_entropy(first.flatten(0, 1).float(), target.flatten())
    return first.float().square().mean()


def _leaves(tree: Any) -> list[Tensor]:
    return [item for item in torch.utils._pytree.tree_leaves(tree) if isinstance(item, Tensor)]


def find_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Paths and modules of the repeated blocks: children of the outermost ModuleLists and Sequentials where a composite class occurs twice."""
    found = _containers(module, least=2)
    return found or _containers(module, least=1)


def _containers(module: nn.Module, least: int) -> dict[str, nn.Module]:
    blocks: dict[str, nn.Module] = {}
    inside: list[str] = []
    for path, container in module.named_modules():
        if any(path.startswith(f"{outer}.") for outer in inside):
            continue
        if not isinstance(container, nn.ModuleList if least == 1 else (nn.ModuleList, nn.Sequential)):
            continue
        children = {name: child for name, child in container.named_children() if _is_composite(child)}
        classes = Counter(type(child) for child in children.values())
        chosen = {name: child for name, child in children.items() if classes[type(child)] >= least}
        if chosen:
            prefix = f"{path}." if path else ""
            blocks |= {f"{prefix}{name}": child for name, child in chosen.items()}
            inside.extend(f"{prefix}{name}" for name in chosen)
    return blocks


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def refusal(error: Exception, module: nn.Module) -> InputError:
    """The InputError for an exception raised while tracing: where is the deepest line that is neither torch's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith((_TORCH, _HERE, "<"))]
    where, line = type(module).__name__, ""
    if outside:
        where, line = (
            f"{outside[-1].filename}:{outside[-1].lineno}",
            linecache.getline(outside[-1].filename, outside[-1].lineno or 0).strip(),
        )
    chain: BaseException | None = error
    names = []
    while chain is not None:
        names.append(type(chain).__name__)
        chain = chain.__cause__ or chain.__context__
    if any(name.startswith(_DATA_DEPENDENT) for name in names):
        return InputError(
            f"the line `{line}` depends on the values of a tensor, which capture does not have", where=where,
            remedy="write it without reading values (torch.where, torch.cond, fixed-size masks instead of nonzero), or describe the model by a "
            "ModelSpec",
        )  # fmt: skip
    text = (str(error).strip().splitlines() or [""])[0]
    return InputError(
        f"the forward pass fails at `{line}` with {type(error).__name__}: {text}", where=where,
        remedy="give example_inputs that this model accepts (shapes and dtypes are used, not values)",
    )  # fmt: skip
