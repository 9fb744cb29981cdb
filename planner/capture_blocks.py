"""From a trace to a Block: kernels as Nodes, storages as Tensors with logical axes, what autograd keeps, tensor-parallel styles of modules.

Naming, shared with planner.models: a forward kernel is `module/op.i` and so is its output (with `.j` when there are several); its backward kernels are
`module/op.i:op.j`; the gradient of parameter p is `p.grad`, of block input x `x.grad`; what arrives from behind for output y is the input `y.grad`.
An operator that writes in place makes a new version of its tensor, so that every tensor has one maker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from planner.capture_axes import Axes
from planner.capture_ops import flops, is_causal, loops, op_class, op_name, scaled
from planner.capture_roles import Roles
from planner.capture_trace import Record, Strided, Trace
from planner.graph import TENSOR_PARALLEL_AXES, TOKEN_AXES, Block, Node, Tensor

_DTYPES = {
    "float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8",
    "complex64": "fp64", "complex32": "fp32", "uint16": "int16", "uint32": "int32", "uint64": "int64",
}  # fmt: skip
_MATMULS = ("gemm", "grouped_gemm", "conv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How traced sizes become the graph's: the traced batch, the wanted batch, and the dtype that is "compute"."""

    traced_batch: int
    batch: int
    compute: str


class BlockWriter:
    """Writes one block from a trace (or from the part of a trace given as record indices)."""

    def __init__(self, trace: Trace, axes: Axes, roles: Roles, scale: Scale) -> None:
        self._trace, self._axes, self._roles, self._scale = trace, axes, roles, scale
        self._frac = (scale.batch, scale.traced_batch)
        self.tensors: dict[str, Tensor] = {}
        self.nodes: list[Node] = []
        self._current: dict[int, str] = {}
        self._roots = _roots(trace)
        self._counts: Counter[str] = Counter()
        self._forward: dict[int, str] = {}
        self._leaf_grads: dict[int, str] = {}

    def tensor(self, value: Strided, name: str, kind: str, *, trainable: bool = False, statistic: bool = False) -> str:
        """Declare the storage of `value` under `name`, shaped as it was first made. A norm's `statistic` is fp32, as accelerators keep it."""
        root = self._roots.get(value.storage, value)
        parts = [
            [] if stride == 0 else part
            for stride, dim in zip(root.strides, self._axes.dims(root), strict=True)
            for part in (self._roles.parts(dim) if stride else [dim])
        ]
        shape = tuple(scaled(prod(map(self._roles.size, part)), self._roles.scales(part), self._frac) for part in parts)
        axes = tuple(map(self._roles.axis, parts))
        if kind == "parameter":
            axes = tuple("" if axis in TOKEN_AXES else axis for axis in axes)
        dtype = "compute" if value.dtype == self._scale.compute else _DTYPES.get(value.dtype, value.dtype)
        dtype = "fp32" if statistic and dtype == "compute" else dtype
        self.tensors[name] = Tensor(tensor_id=name, shape=shape, axes=axes, dtype=dtype, kind=kind, trainable=trainable)
        self._current[value.storage] = name
        return name

    def name(self, storage: int) -> str | None:
        """The current tensor of a storage, None when it is none of this block's."""
        return self._current.get(storage)

    def expect_gradients(self, grads: Iterable[tuple[str, Strided]]) -> None:
        """Names for gradients of parameters and inputs that this block will make."""
        for name, value in grads:
            self._leaf_grads.setdefault(value.storage, f"{name}.grad")

    def add(self, index: int) -> None:
        """Append record number `index` as a node when it is a kernel."""
        record = self._trace.records[index]
        if not record.kernel:
            return
        inputs = tuple(dict.fromkeys(self._current[v.storage] for v in record.inputs if v.storage in self._current))
        forward_id = self._forward.get(record.seq, "") if record.phase == "backward" else ""
        node_id = self._node_id(record, forward_id)
        if record.phase == "forward":
            self._forward.setdefault(record.seq, node_id)
        made = tuple(self._make(record, value, node_id, position) for position, value in enumerate(record.outputs))
        sizes = loops(index, record, self._axes, self._roles, self._frac)
        weights = {f"{name}.grad" for name in self._trace.parameters}
        role = (
            "" if record.phase == "forward" else "wgrad" if weights.intersection(made) else "dgrad" if op_class(record) in _MATMULS else ""
        )
        node = Node(
            node_id=node_id, op=op_class(record), phase=record.phase, inputs=inputs, outputs=tuple(dict.fromkeys(made)), loops=sizes,
            flops=flops(record, sizes), causal=op_class(record) == "attention" and is_causal(record), forward_id=forward_id,
            module=record.module, role=role,
        )  # fmt: skip
        self.nodes.append(node)

    def _node_id(self, record: Record, forward_id: str) -> str:
        name = op_name(record)
        if record.phase == "backward":
            key = f"{forward_id}:{name}" if forward_id else f"{record.module}:{name}"
        else:
            key = f"{record.module}/{name}" if record.module else name
        self._counts[key] += 1
        return f"{key}.{self._counts[key] - 1}"

    def _make(self, record: Record, value: Strided, node_id: str, position: int) -> str:
        name = node_id if len(record.outputs) == 1 else f"{node_id}.{position}"
        wanted = self._leaf_grads.get(value.storage)
        if record.phase == "backward" and wanted is not None and wanted not in self.tensors:
            name = wanted
        statistic = record.phase == "forward" and position > 0 and op_class(record) == "norm"
        return self.tensor(value, name, "activation", statistic=statistic)

    def block(self, kind_id: str, role: str, *, inputs: Iterable[str], outputs: Iterable[str], saved: Iterable[str]) -> Block:
        """Close the block."""
        return Block(
            kind_id=kind_id, role=role, nodes=tuple(self.nodes), tensors=tuple(self.tensors.values()), inputs=tuple(inputs),
            outputs=tuple(dict.fromkeys(outputs)), saved=tuple(dict.fromkeys(saved)), layouts=self._layouts(),
        )  # fmt: skip

    def _layouts(self) -> tuple[tuple[str, str], ...]:
        styles: dict[str, dict[str, str]] = {}
        for name, value in self._trace.parameters.items():
            if name not in self.tensors:
                continue
            module, _, leaf = name.rpartition(".")
            found = self._style(value)
            if found or not styles.get(module):
                styles.setdefault(module, {})[leaf] = found
        result: dict[str, str] = {}
        styles.pop("", None)
        for module, leaves in styles.items():
            known = {leaf: style for leaf, style in leaves.items() if style}
            if len(set(known.values())) > 1:
                result |= {f"{module}.{leaf}" if module else leaf: style for leaf, style in known.items()}
            else:
                divided = any(self._is_divided(f"{module}.{leaf}" if module else leaf) for leaf in leaves)
                result[module] = next(iter(known.values()), "column" if divided else "replicate")
        return tuple(sorted(result.items()))

    def _style(self, value: Strided) -> str:
        """column, row, vocab or replicate for the weight of a matmul or a table; "" for what follows its module (biases, norms)."""
        for index, matmul in self._axes.matmuls.items():
            if matmul.weight == value.storage and self._trace.records[index].phase == "forward":
                columns, rows = self._roles.axis(matmul.n), self._roles.axis(matmul.k)
                if "vocab" in (columns, rows):
                    return "vocab"
                return "column" if columns in TENSOR_PARALLEL_AXES else "row" if rows in TENSOR_PARALLEL_AXES else "replicate"
        if any(weight.storage == value.storage for weight, _ in self._axes.tables):
            axes = [self._roles.axis(dim) for dim in self._axes.dims(value)]
            return "vocab" if axes[0] == "vocab" else "column" if axes[1] else "replicate"
        return ""

    def _is_divided(self, name: str) -> bool:
        return not TENSOR_PARALLEL_AXES.isdisjoint(self.tensors[name].axes)


def _roots(trace: Trace) -> dict[int, Strided]:
    """The value that first filled each storage."""
    roots: dict[int, Strided] = {}
    named = (*trace.parameters.values(), *trace.buffers.values(), *trace.inputs.values(), *(grad for _, grad in trace.grad_outputs))
    for value in (*named, *(value for record in trace.records if not record.view for value in record.outputs)):
        roots.setdefault(value.storage, value)
    return roots


def layer_block(
    trace: Trace, axes: Axes, roles: Roles, scale: Scale, *, kind_id: str, role: str, unsaved: frozenset[str], kept: frozenset[int]
) -> Block:
    """The block of a whole trace. `unsaved`: inputs that another block counts; `kept`: positions of outputs that this one counts for several readers."""
    writer = BlockWriter(trace, axes, roles, scale)
    for name, value in trace.parameters.items():
        writer.tensor(value, name, "parameter", trainable=name in trace.trainable)
    used = {value.storage for record in trace.records for value in record.inputs}
    for name, value in trace.buffers.items():
        if value.storage in used:
            writer.tensor(value, name, "buffer")
    inputs = [writer.tensor(value, name, "input") for name, value in trace.inputs.items()]
    writer.expect_gradients((name.removeprefix("input:"), value) for name, value in trace.grads.items())
    positions = [position for position, record in enumerate(trace.records) if record.phase == "forward"]
    for position in positions:
        writer.add(position)
    outputs = [found for value in trace.outputs if (found := writer.name(value.storage))]
    saved = [found for storage in trace.saved if (found := writer.name(storage)) and writer.tensors[found].kind in ("activation", "input")]
    for value, grad in trace.grad_outputs:
        writer.tensor(grad, f"{writer.name(value.storage)}.grad", "input")
    for position in range(len(trace.records)):
        if trace.records[position].phase == "backward":
            writer.add(position)
    others = {name for position, name in enumerate(outputs) if position not in kept}
    saved += [name for position, name in enumerate(outputs) if position in kept]
    return writer.block(
        kind_id, role, inputs=inputs, outputs=outputs, saved=[name for name in saved if name not in unsaved and name not in others]
    )
