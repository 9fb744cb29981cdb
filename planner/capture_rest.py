"""The model without its blocks: embedding before the first, head and loss after the last, and what runs between.

An encoder-decoder has a seam in between: the encoder's last norm and the decoder's embedding.

The model is traced with every block replaced by an opaque operator of the same outputs, so the records before, between and after the block marks
are the segments, forward and backward alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from planner.capture_survey import BlockCall
from planner.capture_trace import Record, Recorder, Strided, Trace, differentiate, finish_trace


class _Opaque(torch.autograd.Function):
    """Stands for one block: fresh outputs forward, fresh gradients backward, a mark in the record each time. `anchor` makes autograd visit it."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, call: BlockCall, index: int, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        recorder.paused = True
        wanted = _fresh(call)
        outputs = tuple(torch.empty_strided(out.shape, out.stride(), dtype=out.dtype) for out in wanted)
        recorder.paused = False
        recorder.mark("block", inputs, outputs, index, call.path)
        ctx.mark_non_differentiable(*(made for made, out in zip(outputs, wanted, strict=True) if not out.requires_grad))
        ctx.set_materialize_grads(False)
        ctx.state = (
            recorder,
            call,
            index,
            [(item.shape, item.dtype) for item in inputs],
            *(tuple(map(recorder.value, v)) for v in (inputs, outputs)),
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        recorder, call, index, shapes, inputs, outputs = ctx.state
        recorder.paused = True
        needed = ctx.needs_input_grad
        made = [torch.empty(shape, dtype=dtype) if need else None for (shape, dtype), need in zip(shapes, needed[4:], strict=True)]
        recorder.paused = False
        pairs = (
            *(v for v, g in zip(outputs, grads, strict=True) if g is not None),
            *(v for v, g in zip(inputs, made, strict=True) if g is not None),
        )
        recorder.mark("block_backward", [g for g in grads if g is not None], [g for g in made if g is not None], index, call.path, pairs)
        return (None, None, None, None, *made)


def _fresh(call: BlockCall) -> list[Tensor]:
    """Output tensors that are not inputs passed on, each once."""
    found: list[Tensor] = []
    for item in call.outputs:
        if isinstance(item, Tensor) and not any(item is known for known in (*found, *call.leaves)):
            found.append(item)
    return found


@contextmanager
def _without_blocks(calls: list[BlockCall], recorder: Recorder, anchor: Tensor) -> Iterator[None]:
    queue = iter(enumerate(calls))

    def stub(*args: Any, **kwargs: Any) -> Any:
        index, call = next(queue)
        given = torch.utils._pytree.tree_leaves((args, kwargs))
        tensors = [item for item in given if isinstance(item, Tensor)]
        distinct = [item for position, item in enumerate(tensors) if not any(item is other for other in tensors[:position])]
        wanted = _fresh(call)
        alive = anchor if any(out.requires_grad for out in wanted) else anchor.detach()
        made = _Opaque.apply(recorder, call, index, alive, *distinct) if wanted else ()  # type: ignore[no-untyped-call]
        leaves = []
        for item in call.outputs:
            place = next((p for p, out in enumerate(wanted) if item is out), None)
            source = next((p for p, leaf in enumerate(call.leaves) if isinstance(item, Tensor) and item is leaf), None)
            leaves.append(made[place] if place is not None else given[source] if source is not None else item)
        return tree_unflatten(leaves, call.output_spec)

    modules = {id(call.module): call.module for call in calls}
    try:
        for module in modules.values():
            vars(module)["forward"] = stub
        yield
    finally:
        for module in modules.values():
            vars(module).pop("forward", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """The trace of everything outside the blocks. `segment_of` numbers every record: 0 before the first block, i after block i - 1."""

    trace: Trace
    segment_of: tuple[int, ...]
    marks: tuple[Record, ...]


def trace_rest(module: nn.Module, calls: list[BlockCall], inputs: dict[str, Tensor], run: Callable[[], Tensor]) -> Rest:
    """Trace `run` (forward of the model and its loss) with blocks opaque, and its backward."""
    recorder = Recorder({id(child): path for path, child in module.named_modules() if path})
    inside = {id(p) for call in calls for p in call.module.parameters()}
    outside = {name: p for name, p in module.named_parameters(remove_duplicate=False) if id(p) not in inside}
    in_blocks = {id(b) for call in calls for b in call.module.buffers()}
    anchor = torch.empty((), requires_grad=True)
    with _without_blocks(calls, recorder, anchor), recorder.recording():
        loss = run()
        saved = recorder.saved()
        targets = {name: p for name, p in outside.items() if p.requires_grad} | {"": anchor}
        gradients = differentiate(recorder, [loss] if loss.requires_grad else [], targets)
    buffers = {name: buffer for name, buffer in module.named_buffers() if id(buffer) not in in_blocks}
    trace = finish_trace(recorder, outside, buffers, inputs, [loss], saved, gradients)
    return Rest(trace=trace, segment_of=_segments(trace.records, len(calls)), marks=tuple(r for r in trace.records if r.op == "block"))


def _segments(records: list[Record], num_blocks: int) -> tuple[int, ...]:
    segments: list[int] = []
    current = 0
    for record in records:
        if record.phase == "backward" and (not segments or records[len(segments) - 1].phase == "forward"):
            current = num_blocks
        if record.op == "block":
            current = record.args[1] + 1
        elif record.op == "block_backward":
            current = record.args[1]
        segments.append(current)
    return tuple(segments)


def inputs_of(mark: Record) -> tuple[Strided, ...]:
    """Input values of a block mark, in the order of BlockCall.tensors."""
    found: tuple[Strided, ...] = mark.args[0]
    return found
