"""Door 1: any nn.Module to a Graph. No weight is allocated, no element computed.

    survey (one fake forward, blocks grouped by what they do) -> one trace per block kind + one of everything outside the blocks -> Graph

Traces are eager PyTorch's own operator stream on fake tensors (planner.capture_trace), so flops, kernels and what autograd keeps are what a training step runs.
A model of L equal layers costs one trace of a layer, and one fake forward of all of them to know that they are equal.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from costmodel.errors import AutoplanError, InputError
from planner.capture_atoms import Leaves
from planner.capture_axes import Axes
from planner.capture_blocks import Scale, layer_block
from planner.capture_kernels import Kernels
from planner.capture_ledger import open_ledger
from planner.capture_model import Call, fake_parameters, find_blocks, prepare_call, readable_masks, refusal
from planner.capture_rest import Rest, inputs_of, trace_rest
from planner.capture_roles import Roles
from planner.capture_rules import understand
from planner.capture_segments import write_segments
from planner.capture_split import unsplit_modules
from planner.capture_survey import BlockCall, survey
from planner.capture_trace import Strided, Trace, trace_call
from planner.graph import Block, Graph, Layer

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "": None}


def capture(
    module: nn.Module,
    *,
    batch: int = 1,
    sequence: int,
    name: str | None = None,
    example_inputs: Any = None,
    loss_fn: Any = None,
    dtype: str = "bf16",
    fused_kernels: bool = True,
) -> Graph:
    """The Graph of one training step of `module` on `batch` sequences of `sequence` tokens.

    module: built on "meta" or real, in train or eval mode as given; it is the same afterwards. example_inputs: a mapping of keyword arguments or a tuple of
    positional ones (tensors of any device; shapes and dtypes are used), needed where input_ids or pixel_values do not suffice; its leading dim is the batch.
    loss_fn(output, batch) -> scalar, `batch` being the mapping of inputs with "labels"; by default the model's own loss, else token cross entropy of logits.
    dtype: what the parameters of the main float dtype become ("" leaves them), named "compute" in the graph. fused_kernels: the kernels of an accelerator
    (one-kernel RMSNorm, bool dropout masks) rather than the CPU's.

    Raises InputError for sizes below 1, an unknown dtype, a forward that fails or depends on tensor values (with the user's file and line), or a loss
    that no trainable parameter reaches.
    """
    for field, value in (("batch", batch), ("sequence", sequence)):
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{field} is {value!r}", where=f"capture.{field}", remedy="give a positive whole number")
    if dtype not in _DTYPES:
        raise InputError(f"dtype is {dtype!r}", where="capture.dtype", remedy="use bf16, fp16, fp32, or '' for the module's own")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with readable_masks(), fake_parameters(module, mode, _DTYPES[dtype]):
        try:
            call = prepare_call(
                module, mode, batch=batch, sequence=sequence, example_inputs=example_inputs, loss_fn=loss_fn, dtype=_DTYPES[dtype]
            )
            with mode, Kernels(fused_kernels):
                calls = survey(lambda: module(*call.args, **call.kwargs), find_blocks(module))
                rest = trace_rest(module, calls, call.named, lambda: call.loss(module(*call.args, **call.kwargs)))
                firsts = {item.signature: item for item in reversed(calls)}
                traces = {item.signature: _trace_block(item) for item in calls if firsts[item.signature] is item}
        except AutoplanError:
            raise
        except Exception as error:
            raise refusal(error, module) from error
        return _graph(module, call, calls, rest, traces, sequence, name or _name(module))


def _name(module: nn.Module) -> str:
    return str(getattr(getattr(module, "config", None), "name_or_path", "") or type(module).__name__)


def _graph(module: nn.Module, call: Call, calls: list[BlockCall], rest: Rest, traces: dict[int, Trace], sequence: int, name: str) -> Graph:
    notes = _check([rest.trace, *traces.values()], module)
    compute = str(next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32))[6:]
    scale = Scale(traced_batch=call.traced_batch, batch=call.batch, compute=compute)
    axes = understand(rest.trace)
    batch, tokens = _seeds(rest.trace, axes, call.traced_batch)
    roles = Roles(axes, rest.trace.records, batch=batch, sequence=tokens, residual=[], tokens=_ids(rest.trace), divide=False)
    ledger = open_ledger(calls, rest, traces)
    kinds: dict[int, Block] = {}
    heads = (0, 0)
    for signature, trace in traces.items():
        first = next(item for item in calls if item.signature == signature)
        mark = rest.marks[calls.index(first)]
        block_axes = understand(trace)
        block_roles = _block_roles(trace, block_axes, list(inputs_of(mark)), axes, roles)
        tokens += [
            axes.dims(outer)[position]
            for outer, inner in zip(inputs_of(mark), trace.inputs.values(), strict=True)
            for position, dim in enumerate(block_axes.dims(inner))
            if block_roles.axis(dim) == "sequence"
        ]
        kind_id = _kind_id(first, kinds)
        heads = max(heads, (block_roles.num_heads, block_roles.num_kv_heads))
        block = layer_block(
            trace, block_axes, block_roles, scale, kind_id=kind_id, role="layer",
            unsaved=ledger.unsaved[signature], kept=ledger.kept[signature],
        )  # fmt: skip
        kinds[signature] = replace(block, unsplit=unsplit_modules(first.module, block.layouts, trace, block_axes, block_roles, layer=True))
    roles = Roles(axes, rest.trace.records, batch=batch, sequence=tokens, residual=[], tokens=_ids(rest.trace), divide=not calls)
    segments = {
        index: replace(block, unsplit=unsplit_modules(module, block.layouts, rest.trace, axes, roles, layer=False))
        for index, block in write_segments(rest, len(calls), axes, roles, scale, ledger).items()
    }
    heads = heads if calls else (roles.num_heads, roles.num_kv_heads)
    return _assemble(module, calls, kinds, segments, notes, call.batch, sequence, name, heads)


def _trace_block(call: BlockCall) -> Trace:
    leaves = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in call.tensors().items()}
    return trace_call(call.module, leaves, lambda tensors: call.run(tensors, call.module))


def _seeds(trace: Trace, axes: Axes, traced_batch: int) -> tuple[list[Leaves], list[Leaves]]:
    """Batch and sequence dims of the model's inputs: the leading dim of batch size, and the second of ids (batch, sequence) or embeddings (b, s, features)."""
    batch, sequence = [], []
    for value in trace.inputs.values():
        dims = axes.dims(value)
        if value.shape and value.shape[0] == traced_batch:
            batch.append(dims[0])
            if len(dims) == (2 if "int" in value.dtype else 3):
                sequence.append(dims[1])
    return batch, sequence


def _ids(trace: Trace) -> list[Strided]:
    return [value for value in trace.inputs.values() if "int" in value.dtype]


def _block_roles(trace: Trace, axes: Axes, outer: list[Strided], outer_axes: Axes, outer_roles: Roles) -> Roles:
    """Roles inside a block, told by the outside which dims of its inputs are batch and sequence."""
    batch, sequence = [], []
    for value, seen in zip(trace.inputs.values(), outer, strict=True):
        for dim, wide in zip(axes.dims(value), outer_axes.dims(seen), strict=True):
            axis = outer_roles.axis(wide)
            if axis in ("batch", "tokens"):
                batch.append(dim)
            elif axis == "sequence":
                sequence.append(dim)
    borders = [value for value in (*trace.inputs.values(), *trace.outputs) if "float" in value.dtype and len(value.shape) > 1]
    residual = [axes.dims(value)[-1] for value in borders]
    return Roles(axes, trace.records, batch=batch, sequence=sequence, residual=residual, tokens=[], divide=True)


def _kind_id(call: BlockCall, known: dict[int, Block]) -> str:
    base = type(call.module).__name__
    count = sum(block.kind_id.split("#")[0] == base for block in known.values())
    return f"{base}#{count}" if count else base


def _check(traces: list[Trace], module: nn.Module) -> tuple[str, ...]:
    """Raise when nothing is trained by a loss that should train something; note parameters that are used and get no gradient."""
    silent: list[str] = []
    for trace in traces:
        used = {value.storage for record in trace.records for value in record.inputs if record.phase == "forward"}
        wanted = {name for name in trace.trainable if trace.parameters[name].storage in used}
        reached = {trace.parameters[name].storage for name in trace.grads if name in trace.parameters}
        missing = sorted(name for name in wanted if trace.parameters[name].storage not in reached)
        if missing and not reached:
            raise InputError(
                f"no gradient reaches any of {len(missing)} trainable parameters (such as {missing[0]})", where=type(module).__name__,
                remedy="give a loss_fn that depends on them, and do not detach the output",
            )  # fmt: skip
        silent += missing
    return (f"{len(silent)} trainable parameters get no gradient: {', '.join(silent[:3])}",) if silent else ()


def _assemble(
    module: nn.Module, calls: list[BlockCall], kinds: dict[int, Block], segments: dict[int, Block], notes: tuple[str, ...],
    batch: int, sequence: int, name: str, heads: tuple[int, int],
) -> Graph:  # fmt: skip
    layers: list[Layer] = []
    for index in range(len(calls) + 1):
        if index in segments:
            layers.append(Layer(path=segments[index].kind_id, kind_id=segments[index].kind_id))
        if index < len(calls):
            layers.append(Layer(path=calls[index].path, kind_id=kinds[calls[index].signature].kind_id))
    known = {block.kind_id: block for block in (*segments.values(), *kinds.values())}
    blocks = tuple(known[kind_id] for kind_id in dict.fromkeys(layer.kind_id for layer in layers))
    parameters = dict(module.named_parameters())
    experts = _experts(blocks)
    repeats = Counter(layer.kind_id for layer in layers)
    total = sum(p.numel() for p in parameters.values())
    inactive = sum(t.num_elements * repeats[b.kind_id] for b in blocks for t in b.parameters if experts[0] and t.axes[:1] == ("experts",))
    vocab = [
        size for block in segments.values() for t in block.parameters for size, axis in zip(t.shape, t.axes, strict=True) if axis == "vocab"
    ]
    return Graph(
        name=name, batch=batch, sequence=sequence, kinds=blocks, layers=tuple(layers), tied=_tied(module, blocks), num_parameters=total,
        num_trainable_parameters=sum(p.numel() for p in parameters.values() if p.requires_grad),
        num_active_parameters=total - inactive + (inactive * experts[1] // experts[0] if experts[0] else 0),
        num_experts=experts[0], top_k=experts[1], num_heads=heads[0], num_kv_heads=heads[1],
        vocab_size=max(vocab, default=0), notes=notes,
    )  # fmt: skip


def _experts(blocks: tuple[Block, ...]) -> tuple[int, int]:
    """(number of experts, experts per token): expert weights are read by matmuls of tokens x top_k rows in all experts together."""
    for block in blocks:
        weights = {t.tensor_id: t.shape[0] for t in block.parameters if len(t.shape) == 3 and t.axes[0] == "experts"}
        hidden = next((t for t in block.tensors if t.kind == "input" and "batch" in t.axes), None)
        for node in block.nodes:
            read = [weights[name] for name in node.inputs if name in weights]
            if read and hidden is not None and node.op in ("gemm", "grouped_gemm"):
                sizes = {loop.name: loop.size for loop in node.loops}
                rows = sizes["m"] if node.op == "grouped_gemm" else sizes["m"] * sizes.get("batch", 1)
                return read[0], max(1, rows // (hidden.shape[0] * hidden.shape[1]))
    return 0, 0


def _tied(module: nn.Module, blocks: tuple[Block, ...]) -> tuple[tuple[str, str], ...]:
    """Pairs of names of one parameter, first the name under which the first block that uses it has it."""
    used = [tensor.tensor_id for block in blocks if block.role != "layer" for tensor in block.parameters]
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    pairs = []
    for found in names.values():
        first = min(found, key=lambda name: used.index(name) if name in used else len(used))
        pairs += [(first, name) for name in found if name != first]
    return tuple(pairs)
