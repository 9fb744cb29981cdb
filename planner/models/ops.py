"""Operations on a BlockBuilder: linear layers, embeddings and elementwise arithmetic with the backward kernels that eager PyTorch runs.

What each keeps for backward follows torch/csrc and tools/autograd/derivatives.yaml of PyTorch 2.13: a product keeps the factor the other one needs, silu its
input, tanh its result, a cast or a sum nothing, a matmul its input when the weight is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from planner.graph import Loop
from planner.models.builder import Axes, BlockBuilder, Shape, Value


def rows(value: Value) -> Loop:
    """The rows of a matmul over the leading dims of `value`: all of them flattened, axis "tokens" when batch and sequence are among them."""
    axis = "tokens" if set(value.axes[:-1]) & {"batch", "sequence", "tokens"} else ""
    return Loop(name="m", size=prod(value.shape[:-1]), axis=axis)


def linear(
    b: BlockBuilder,
    x: Value,
    module: str,
    width: int,
    axis: str = "",
    *,
    bias: bool = False,
    transposed: bool = False,
    name: str = "weight",
) -> Value:
    """y = x W^T (+ bias): 2mnk flops forward and as many for each of dgrad and wgrad. `axis` is the logical axis of the output features.

    `transposed` stores W as (in, out), the Conv1D of GPT-2. LoRA adapters are added when the builder's targets name the module.
    """
    inner, inner_axis = x.shape[-1], x.axes[-1]
    layout = "vocab" if axis == "vocab" else "column" if axis else "row" if inner_axis else "replicate"
    shape, axes = ((inner, width), (inner_axis, axis)) if transposed else ((width, inner), (axis, inner_axis))
    rank, targets = b.lora
    adapted = bool(rank) and module.rpartition(".")[2] in targets
    prefix = f"{module}.base_layer" if adapted else module
    weight = b.parameter(f"{prefix}.{name}", shape, axes, layout=layout)
    if prefix != module:
        b.layout(module, layout)
    offset = b.parameter(f"{prefix}.bias", (width,), (axis,)) if bias else None
    y = matmul(b, x, weight, module, width, axis, bias=offset)
    if not adapted:
        return y
    return _adapter(b, x, y, module, rank)


def matmul(b: BlockBuilder, x: Value, weight: Value, module: str, width: int, axis: str = "", *, bias: Value | None = None) -> Value:
    """One gemm of `x` with a weight that contracts its last dim."""
    m = rows(x)
    k = Loop(name="k", size=x.shape[-1], axis=x.axes[-1])
    n = Loop(name="n", size=width, axis=axis)
    flops = 2.0 * m.size * n.size * k.size

    def rule(gradient: Value) -> Sequence[Value | None]:
        dx = dw = db = None
        if x.grad:
            loops = (m, Loop(name="n", size=k.size, axis=k.axis), Loop(name="k", size=n.size, axis=n.axis))
            dx = b.back("gemm", "mm", [gradient], x, saved=[weight], loops=loops, flops=flops)
        if weight.grad:
            loops = (
                Loop(name="m", size=n.size, axis=n.axis),
                Loop(name="n", size=k.size, axis=k.axis),
                Loop(name="k", size=m.size, axis=m.axis),
            )
            dw = b.back("gemm", "mm", [gradient], weight, saved=[x], loops=loops, flops=flops)
        if bias is not None and bias.grad:
            db = b.back("reduce", "sum", [gradient], bias)
        return (dx, dw) if bias is None else (dx, dw, db)

    inputs = [x, weight] if bias is None else [x, weight, bias]
    out = ((*x.shape[:-1], width), (*x.axes[:-1], axis), x.dtype)
    return b.kernel(module, "gemm", "mm" if bias is None else "addmm", inputs, [out], rule, loops=(m, n, k), flops=flops)[0]


def _adapter(b: BlockBuilder, x: Value, y: Value, module: str, rank: int) -> Value:
    """y + scale * B(A x), as PEFT's LoRA layer runs it (peft.tuners.lora.layer.Linear.forward) without dropout."""
    width, axis = y.shape[-1], y.axes[-1]
    down = b.parameter(f"{module}.lora_A.default.weight", (rank, x.shape[-1]), ("", x.axes[-1]), trainable=True)
    up = b.parameter(f"{module}.lora_B.default.weight", (width, rank), (axis, ""), trainable=True)
    inner = matmul(b, x, down, f"{module}.lora_A.default", rank)
    outer = matmul(b, inner, up, f"{module}.lora_B.default", width, axis)
    return add(b, y, scale(b, outer, module), module)


def embedding(b: BlockBuilder, ids: Value, module: str, rows_: int, width: int, *, axis: str = "vocab", layout: str = "vocab") -> Value:
    """Rows of a table by id. Backward scatters into a gradient as large as the table; the ids are saved."""
    table = b.parameter(f"{module}.weight", (rows_, width), (axis, ""), layout=layout)

    def rule(gradient: Value) -> Sequence[Value | None]:
        return None, b.back("embedding", "embedding_dense_backward", [gradient], table, saved=[ids])

    out = ((*ids.shape, width), (*ids.axes, ""), "compute")
    return b.kernel(module, "embedding", "embedding", [ids, table], [out], rule)[0]


def add(b: BlockBuilder, x: Value, y: Value, module: str) -> Value:
    """x + y: gradients pass through; a broadcast operand gets the sum over the broadcast dims."""

    def rule(gradient: Value) -> Sequence[Value | None]:
        return tuple(_passed(b, gradient, value) for value in (x, y))

    return b.kernel(module, "elementwise", "add", [x, y], [_broadcast(x, y)], rule)[0]


def mul(b: BlockBuilder, x: Value, y: Value, module: str) -> Value:
    """x * y with broadcasting: keeps y when x needs a gradient and x when y does."""

    def rule(gradient: Value) -> Sequence[Value | None]:
        results: list[Value | None] = []
        for value, other in ((x, y), (y, x)):
            if not value.grad:
                results.append(None)
                continue
            wide = Value(value.tensor_id, gradient.shape, gradient.axes, gradient.dtype, True)
            product = b.back("elementwise", "mul", [gradient], wide, saved=[other])
            results.append(_passed(b, product, value))
        return results

    return b.kernel(module, "elementwise", "mul", [x, y], [_broadcast(x, y)], rule)[0]


def scale(b: BlockBuilder, x: Value, module: str, name: str = "mul") -> Value:
    """x * constant: nothing is kept."""
    return unary(b, x, module, name, backward=("mul",))


def shift(b: BlockBuilder, x: Value, module: str) -> Value:
    """x + constant: nothing is kept and the gradient passes through."""
    return unary(b, x, module, "add", backward=())


def cast(b: BlockBuilder, x: Value, module: str, dtype: str) -> Value:
    """x.to(dtype): a copy unless the dtype is the same already; the gradient is cast back."""
    if dtype == x.dtype:
        return x

    def rule(gradient: Value) -> Sequence[Value | None]:
        return (b.back("copy", "_to_copy", [gradient], x),)

    return b.kernel(module, "copy", "_to_copy", [x], [(x.shape, x.axes, dtype)], rule)[0]


def copy(b: BlockBuilder, x: Value, module: str, shape: Shape, axes: Axes, name: str = "clone") -> Value:
    """A copy into another layout (contiguous, reshape of a transposed tensor); the gradient is a view."""

    def rule(gradient: Value) -> Sequence[Value | None]:
        return (Value(gradient.tensor_id, x.shape, x.axes, gradient.dtype, False),)

    return b.kernel(module, "copy", name, [x], [(shape, axes, x.dtype)], rule)[0]


def concat(b: BlockBuilder, parts: Sequence[Value], module: str, shape: Shape, axes: Axes, name: str = "cat") -> Value:
    """Concatenation: the gradients of the parts are narrow views of the whole's."""

    def rule(gradient: Value) -> Sequence[Value | None]:
        return tuple(Value(gradient.tensor_id, part.shape, part.axes, gradient.dtype, False) for part in parts)

    return b.kernel(module, "copy", name, parts, [(shape, axes, parts[0].dtype)], rule)[0]


def unary(b: BlockBuilder, x: Value, module: str, name: str, *, backward: Sequence[str], keep: str = "", op: str = "elementwise") -> Value:
    """An elementwise function. `keep`: "input" or "result" is saved. `backward` lists the kernels in order; the last makes the gradient of x."""
    made: list[Value] = []

    def rule(gradient: Value) -> Sequence[Value | None]:
        saved = {"input": [x], "result": made, "": []}[keep]
        for index, kernel in enumerate(backward):
            gradient = b.back(op, kernel, [gradient], x, dtype=x.dtype, saved=saved if index == len(backward) - 1 else ())
        return (gradient,)

    made.append(b.kernel(module, op, name, [x], [(x.shape, x.axes, x.dtype)], rule)[0])
    return made[0]


def _broadcast(x: Value, y: Value) -> tuple[Shape, Axes, str]:
    dims = max(len(x.shape), len(y.shape))
    shapes = [(1,) * (dims - len(v.shape)) + v.shape for v in (x, y)]
    axes = [("",) * (dims - len(v.axes)) + v.axes for v in (x, y)]
    shape = tuple(max(p, q) for p, q in zip(*shapes, strict=True))
    merged = tuple((p if m == shape[i] else q) or q for i, (m, p, q) in enumerate(zip(shapes[0], *axes, strict=True)))
    return shape, merged, "fp32" if "fp32" in (x.dtype, y.dtype) else x.dtype


def _passed(b: BlockBuilder, gradient: Value, value: Value) -> Value | None:
    """The gradient of a possibly broadcast operand."""
    if not value.grad:
        return None
    if prod(value.shape) != prod(gradient.shape):
        gradient = b.back("reduce", "sum", [gradient], value, dtype=gradient.dtype)
    if gradient.dtype != value.dtype:
        gradient = b.back("copy", "_to_copy", [gradient], value)
    return Value(gradient.tensor_id, value.shape, value.axes, gradient.dtype, False)


def activation(b: BlockBuilder, x: Value, module: str, kind: str) -> Value:
    """An activation function under its transformers name (transformers.activations.ACT2FN)."""
    if kind == "gelu_new":
        return _gelu_new(b, x, module)
    if kind == "quick_gelu":
        return mul(b, x, unary(b, scale(b, x, module), module, "sigmoid", keep="result", backward=("sigmoid_backward",)), module)
    name = _KERNELS[kind]
    keep = "result" if name in ("relu", "tanh", "sigmoid") else "input"
    return unary(b, x, module, name, keep=keep, backward=("threshold_backward" if name == "relu" else f"{name}_backward",))


def _gelu_new(b: BlockBuilder, x: Value, module: str) -> Value:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), kernel by kernel (transformers.activations.NewGELUActivation)."""
    half = scale(b, x, module)
    cube = scale(b, unary(b, x, module, "pow", keep="input", backward=("pow", "mul", "mul")), module)
    inner = scale(b, add(b, x, cube, module), module)
    curve = shift(b, unary(b, inner, module, "tanh", keep="result", backward=("tanh_backward",)), module)
    return mul(b, half, curve, module)


_KERNELS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
}
ACTIVATIONS = (*_KERNELS, "gelu_new", "quick_gelu")
