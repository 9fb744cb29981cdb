"""What every ATen operator says about dimensions, forward and backward alike: one rule an operator; elementwise and shape-preserving ones need none."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from planner.capture_axes import ATTENTION, ATTENTION_BACKWARD, GEMMS, Axes
from planner.capture_trace import Record, Strided, Trace


def understand(trace: Trace) -> Axes:
    """Visit a whole trace; the gradient of everything has the dims of what it is the gradient of."""
    axes = Axes(frozenset(value.storage for value in trace.parameters.values()))
    axes.expect_cuts(trace.records)
    for value in (*trace.parameters.values(), *trace.inputs.values(), *trace.buffers.values()):
        axes.dims(value)
    for index, record in enumerate(trace.records):
        if record.op == "block_backward":
            axes.define_pairs(record)
        elif record.phase == "forward":
            apply_rule(axes, index, record)
    for value, grad in trace.grad_outputs:
        axes.define(grad, axes.dims(value))
    for index, record in enumerate(trace.records):
        if record.phase == "backward" and record.op != "block_backward":
            apply_rule(axes, index, record)
    for name, grad in trace.grads.items():
        owner = trace.inputs.get(name.removeprefix("input:")) if name.startswith("input:") else trace.parameters[name]
        if owner is not None and owner.shape == grad.shape:
            axes.define(grad, axes.dims(owner))
    return axes


def apply_rule(axes: Axes, index: int, record: Record) -> None:
    """Apply the rule of record number `index`."""
    if record.view:
        axes.cut(record)
    elif record.op in GEMMS:
        axes.matmul(index, record)
    elif record.op in ATTENTION:
        axes.attention(record)
    elif record.op in ATTENTION_BACKWARD:
        for grad in record.outputs:
            like = next((value for value in record.args[1:5] if isinstance(value, Strided) and value.shape == grad.shape), None)
            axes.define(grad, axes.dims(like) if like else [axes.atoms.new_dim(size) for size in grad.shape])
    elif record.op in _RULES:
        _RULES[record.op](axes, record)
    elif record.pointwise:
        axes.broadcast(record)
    else:
        axes.alike(record)


def _reduced(ndim: int, dims: Any) -> tuple[int, ...]:
    if dims is None or dims == ():
        return tuple(range(ndim))
    return tuple(dim % ndim for dim in (dims if isinstance(dims, tuple) else (dims,))) if ndim else ()


def _reduce(axes: Axes, record: Record) -> None:
    source = record.args[0]
    dims = axes.dims(source)
    which = record.args[1] if len(record.args) > 1 and not isinstance(record.args[1], Strided) else None
    gone = _reduced(len(dims), record.kwargs.get("dim", which))
    if record.phase == "forward":
        axes.whole.extend(dims[position] for position in gone)
    kept = [dim for position, dim in enumerate(dims) if position not in gone]
    widened = [[] if position in gone else dim for position, dim in enumerate(dims)]
    for out in record.outputs:
        axes.define(out, widened if len(out.shape) == len(dims) else kept)


def _softmax(axes: Axes, record: Record) -> None:
    source, dim = record.args[0], record.args[1]
    dims = axes.dims(source)
    axes.define(record.outputs[0], dims)
    axes.whole.append(dims[dim])
    rows = [leaf for position, found in enumerate(dims) if position != dim % len(dims) for leaf in found]
    if record.op == "_log_softmax":
        axes.classes.append((rows, dims[dim]))


def _norm(axes: Axes, record: Record) -> None:
    source, count = record.args[0], len(record.args[1])
    dims = axes.dims(source)
    axes.whole.extend(dims[-count:])
    for value in record.args[2:4]:
        if isinstance(value, Strided):
            axes.define(value, dims[-count:])
    for out in record.outputs:
        axes.define(out, dims if out.shape == source.shape else [*dims[:-count], *([[]] * count)])


def _norm_backward(axes: Axes, record: Record) -> None:
    dims = axes.dims(record.args[0])
    axes.define(record.args[1], dims)
    for out in record.outputs:
        axes.define(out, dims if len(out.shape) == len(dims) else dims[-len(out.shape) :])


def _embedding(axes: Axes, record: Record) -> None:
    weight, ids = record.args[:2]
    axes.define(record.outputs[0], [*axes.dims(ids), *axes.dims(weight)[1:]])
    axes.tables.append((weight, ids))


def _embedding_backward(axes: Axes, record: Record) -> None:
    grad, ids = record.args[:2]
    for one, two in zip(axes.dims(grad), axes.dims(ids), strict=False):
        axes.atoms.unify(one, two)
    out = record.outputs[0]
    axes.define(out, [axes.atoms.new_dim(out.shape[0]), axes.dims(grad)[-1]])


def _cat(axes: Axes, record: Record) -> None:
    parts = [value for value in record.args[0] if prod(value.shape)]
    out = record.outputs[0]
    where = (record.args[1] if len(record.args) > 1 else 0) % len(out.shape)
    dims = axes.dims(parts[0])
    for part in parts[1:]:
        for position, dim in enumerate(axes.dims(part)):
            if position != where or part.shape[where] == parts[0].shape[where]:
                axes.atoms.unify(dim, dims[position])
    if len(parts) > 1:
        equal = all(part.shape[where] == parts[0].shape[where] for part in parts)
        largest = max(parts, key=lambda part: part.shape[where])
        source = axes.dims(largest)[where]
        lead = [axes.atoms.fresh(len(parts))]
        dims[where] = [*lead, *dims[where]] if equal else [axes.atoms.fresh(out.shape[where], source[0] if source else None)]
    axes.define(out, dims)


def _stack(axes: Axes, record: Record) -> None:
    parts, out = record.args[0], record.outputs[0]
    where = (record.args[1] if len(record.args) > 1 else 0) % len(out.shape)
    for part in parts[1:]:
        axes.same(part, parts[0])
    dims = axes.dims(parts[0])
    dims.insert(where, axes.atoms.new_dim(len(parts)))
    axes.define(out, dims)


def _slice_backward(axes: Axes, record: Record) -> None:
    """The gradient is a view of the output: dims by the view's strides."""
    grad, out = record.args[0], record.outputs[0]
    if not axes.knows(out):
        axes.define(out, axes.resized(out, [grad]))
    dim = record.args[2]
    where = dim % len(out.shape)
    start = record.args[3] % out.shape[where] if isinstance(record.args[3], int) else 0
    strides = out.strides
    if record.op == "select_backward":
        strides = tuple(stride for position, stride in enumerate(strides) if position != where)
    view = replace(out, shape=grad.shape, strides=strides, offset=out.offset + start * out.strides[where])
    if record.op == "slice_backward":
        axes.cut_gradient(out, where, view)
    axes.same(view, grad)


def _index(axes: Axes, record: Record) -> None:
    source, indices = record.args[0], record.args[1]
    places = [position for position, item in enumerate(indices) if isinstance(item, Strided)]
    dims = axes.dims(source)
    out = record.outputs[0]
    chosen = axes.dims(max((indices[place] for place in places), key=lambda value: prod(value.shape)))
    if source.storage in axes.parameters:
        axes.gathered.append(dims[places[0]])
    result = [*dims[: places[0]], *chosen, *dims[places[-1] + 1 :]]
    axes.define(out, result if len(result) == len(out.shape) else axes.resized(out, []))


def _gather(axes: Axes, record: Record) -> None:
    source, where, index = record.args[:3]
    for position, (one, two) in enumerate(zip(axes.dims(source), axes.dims(index), strict=True)):
        if position != where % len(source.shape) and source.shape[position] == index.shape[position]:
            axes.atoms.unify(one, two)
    axes.define(record.outputs[0], axes.dims(index))


def _top(axes: Axes, record: Record) -> None:
    source = record.args[0]
    numbers = [item for item in record.args[1:] if isinstance(item, int) and not isinstance(item, bool)]
    where = (numbers[1] if record.op == "topk" and len(numbers) > 1 else -1) % len(source.shape)
    dims = axes.dims(source)
    axes.whole.append(dims[where])
    for out in record.outputs:
        axes.define(
            out, [*dims[:where], axes.dims(record.outputs[0])[where] if out.shape != source.shape else dims[where], *dims[where + 1 :]]
        )


def _loss(axes: Axes, record: Record) -> None:
    logits, target = (record.args[0], record.args[1]) if record.op == "nll_loss_forward" else (record.args[1], record.args[2])
    dims = axes.dims(logits)
    if target.shape:
        axes.atoms.unify(dims[0], axes.dims(target)[0])
    if record.op == "nll_loss_backward":
        axes.define(record.outputs[0], dims)


def _convolution(axes: Axes, record: Record) -> None:
    source, weight, out = record.args[0], record.args[1], record.outputs[0]
    dims, kernel = axes.dims(source), axes.dims(weight)
    if record.args[8] == 1:
        axes.atoms.unify(dims[1], kernel[1])
    spatial = []
    for position in range(2, len(out.shape)):
        same = out.shape[position] == source.shape[position]
        spatial.append(dims[position] if same else axes.atoms.new_dim(out.shape[position]))
    axes.define(out, [dims[0], kernel[0], *spatial])
    axes.whole.extend((dims[1], kernel[0]))


def _convolution_backward(axes: Axes, record: Record) -> None:
    likes = (record.args[1], record.args[2])
    for out in record.outputs:
        like = next((value for value in likes if value.shape == out.shape), None)
        axes.define(out, axes.dims(like) if like else [axes.dims(record.args[2])[0]])


def _block(axes: Axes, record: Record) -> None:
    """A block seen from outside: outputs of an input's shape have its dims; others share the leading dim."""
    for out in record.outputs:
        like = next((value for value in record.inputs if value.shape == out.shape), None)
        if like is not None:
            axes.define(out, axes.dims(like))
            continue
        dims = [axes.atoms.new_dim(size) for size in out.shape]
        source = next((value for value in record.inputs if len(value.shape) > 1), None)
        if source is not None and dims and source.shape[0] == out.shape[0]:
            dims[0] = axes.dims(source)[0]
        axes.define(out, dims)


_RULES = {
    **dict.fromkeys(("sum", "mean", "amax", "amin", "max", "min", "var", "std", "var_mean", "linalg_vector_norm", "norm", "any", "all", "prod",
                     "argmax", "logsumexp"), _reduce),
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _norm),
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), _norm_backward),
    **dict.fromkeys(("slice_backward", "select_backward"), _slice_backward),
    **dict.fromkeys(("index", "_unsafe_index"), _index),
    **dict.fromkeys(("topk", "sort"), _top),
    **dict.fromkeys(("nll_loss_forward", "nll_loss_backward"), _loss),
    "embedding": _embedding, "embedding_dense_backward": _embedding_backward, "cat": _cat, "stack": _stack, "gather": _gather,
    "convolution": _convolution, "convolution_backward": _convolution_backward, "block": _block,
}  # fmt: skip
