"""ATen operators in the vocabulary of planner.graph: class, loops and flops of one record.

flops: matmul 2 m n k per batch; convolution 2 m n k with m output positions, n output channels, k input channels per group x kernel; attention
2 b h q kv (d + dv), halved when causal, and 2.5 times that backward (five matmuls instead of two; Dao 2023, FlashAttention-2, section 4.1).
"""

from __future__ import annotations

from math import prod

from planner.capture_axes import ATTENTION, ATTENTION_BACKWARD, Axes, Matmul
from planner.capture_roles import Roles
from planner.capture_trace import Record
from planner.graph import Loop

_CLASSES = {
    "gemm": ("mm", "addmm", "bmm", "baddbmm"),
    "grouped_gemm": ("_grouped_mm", "grouped_mm_fallback"),
    "conv": ("convolution", "convolution_backward"),
    "attention": (*ATTENTION, *ATTENTION_BACKWARD),
    "norm": ("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "_fused_rms_norm", "cudnn_batch_norm"),
    "softmax": ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"),
    "embedding": ("embedding", "embedding_dense_backward"),
    "cross_entropy": ("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"),
    "copy": ("_to_copy", "clone", "copy_", "copy", "cat", "stack", "slice_backward", "select_backward", "constant_pad_nd", "repeat", "roll", "flip",
             "diagonal_backward", "unfold_backward"),
    "index": ("index", "_unsafe_index", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_put", "index_put_", "_index_put_impl_",
              "_unsafe_index_put", "index_add", "index_add_", "index_select", "topk", "sort", "argsort", "cumsum", "histc", "bincount", "one_hot",
              "searchsorted", "masked_scatter", "masked_scatter_"),
    "reduce": ("sum", "mean", "amax", "amin", "max", "min", "argmax", "var", "std", "var_mean", "any", "all", "prod", "linalg_vector_norm", "norm",
               "logsumexp"),
}  # fmt: skip
_CLASS_OF = {name: kind for kind, names in _CLASSES.items() for name in names}
_NAMES = dict.fromkeys(ATTENTION, "flash") | dict.fromkeys(ATTENTION_BACKWARD, "flash_backward")
_CAUSAL = dict(zip((*ATTENTION, *ATTENTION_BACKWARD), (4, 6, 7, 11), strict=True))


def op_class(record: Record) -> str:
    """The op of planner.graph.OPS that `record` is; what has no other name is elementwise."""
    name = record.op
    if name not in _CLASS_OF and name.endswith("_backward"):
        name = name.removesuffix("_backward")
    return _CLASS_OF.get(name, "elementwise")


def op_name(record: Record) -> str:
    """The operator's name in node ids: ATen's, and "flash" for the attention kernel of whatever device."""
    return _NAMES.get(record.op, record.op)


def loops(index: int, record: Record, axes: Axes, roles: Roles, batch_frac: tuple[int, int]) -> tuple[Loop, ...]:
    """Loops of a matmul-like record; () for the rest. `batch_frac`: what batch sizes are multiplied with and divided by."""
    if index in axes.matmuls:
        return _matmul_loops(axes.matmuls[index], op_class(record), roles, batch_frac)
    if op_class(record) == "attention":
        return _attention_loops(record, axes, roles, batch_frac)
    if op_class(record) == "conv":
        return _convolution_loops(record, axes, roles, batch_frac)
    return ()


def flops(record: Record, sizes: tuple[Loop, ...]) -> float:
    """Flops of the record whose loops are `sizes`."""
    size = {loop.name: float(loop.size) for loop in sizes}
    if not size:
        return 0.0
    if op_class(record) == "attention":
        forward = 2.0 * size["batch"] * size["heads"] * size["q"] * size["kv"] * (size["head_dim"] + size["v_dim"])
        return forward * (0.5 if is_causal(record) else 1.0) * (2.5 if record.phase == "backward" else 1.0)
    gemm = 2.0 * size.get("batch", 1.0) * size.get("heads", 1.0) * size["m"] * size["n"] * size["k"]
    if record.op == "convolution_backward":
        return gemm * sum(map(bool, record.args[-1][:2]))
    return gemm


def is_causal(record: Record) -> bool:
    """Whether an attention record uses the causal mask of the kernel."""
    position = _CAUSAL[record.op]
    return bool(record.kwargs.get("is_causal", record.args[position] if len(record.args) > position else False))


def scaled(size: int, scales: bool, batch_frac: tuple[int, int]) -> int:
    """`size` at the wanted batch."""
    return size * batch_frac[0] // batch_frac[1] if scales else size


def _loop(name: str, size: int, dim: list[int], roles: Roles, batch_frac: tuple[int, int]) -> Loop:
    return Loop(name=name, size=scaled(size, roles.scales(dim), batch_frac), axis=roles.axis(dim))


def _matmul_loops(matmul: Matmul, kind: str, roles: Roles, batch_frac: tuple[int, int]) -> tuple[Loop, ...]:
    batch, m, n, k = matmul.sizes
    found = [
        _loop("m", m, matmul.m, roles, batch_frac),
        _loop("n", n, matmul.n, roles, batch_frac),
        _loop("k", k, matmul.k, roles, batch_frac),
    ]
    if kind == "grouped_gemm":
        found.append(_loop("groups", prod(map(roles.size, matmul.groups)), matmul.groups, roles, batch_frac))
    elif batch > 1:
        for part in reversed(roles.parts(matmul.batch)):
            name = "heads" if roles.axis(part) in ("heads", "kv_heads") else "batch"
            found.insert(0, _loop(name, prod(map(roles.size, part)), part, roles, batch_frac))
    return tuple(found)


def _attention_loops(record: Record, axes: Axes, roles: Roles, batch_frac: tuple[int, int]) -> tuple[Loop, ...]:
    start = 0 if record.op in ATTENTION else 1
    q, k, v = record.args[start : start + 3]
    dq, dk = axes.dims(q), axes.dims(k)
    return (
        _loop("batch", q.shape[0], dq[0], roles, batch_frac),
        _loop("heads", q.shape[1], dq[1], roles, batch_frac),
        _loop("kv_heads", k.shape[1], dk[1], roles, batch_frac),
        _loop("q", q.shape[2], dq[2], roles, batch_frac),
        _loop("kv", k.shape[2], dk[2], roles, batch_frac),
        Loop(name="head_dim", size=q.shape[3]),
        Loop(name="v_dim", size=v.shape[3]),
    )


def _convolution_loops(record: Record, axes: Axes, roles: Roles, batch_frac: tuple[int, int]) -> tuple[Loop, ...]:
    out = record.outputs[0] if record.op == "convolution" else record.args[0]
    weight = record.args[1] if record.op == "convolution" else record.args[2]
    dims = axes.dims(out)
    positions = [leaf for position, dim in enumerate(dims) if position != 1 for leaf in dim]
    return (
        _loop("m", prod(out.shape) // out.shape[1], positions, roles, batch_frac),
        _loop("n", weight.shape[0], axes.dims(weight)[0], roles, batch_frac),
        Loop(name="k", size=prod(weight.shape[1:])),
    )
