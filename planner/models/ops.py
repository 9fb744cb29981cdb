"""Operations on a BlockBuilder: linear layers, embeddings and elementwise arithmetic with the backward kernels that eager PyTorch runs.

What each keeps for backward follows torch/csrc and tools/autograd/derivatives.yaml of PyTorch 2.13: a product keeps the factor the other one needs, silu its
input, tanh its result, a cast or a sum nothing, a matmul its input when the weight is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from planner.graph import Loop
from planner.models.builder import Axes, BlockBuilder, Shape, Variable


def rows(value: Variable) -> Loop:
    """The rows of a matmul over the leading dims of `value`: all of them flattened, axis "tokens" when batch and sequence are among them."""
    axis = "tokens" if set(value.axes[:-1]) & {"batch", "sequence", "tokens"} else ""
    return Loop(name="m", size=prod(value.shape[:-1]), axis=axis)


def linear(
    b: BlockBuilder,
    x: Variable,
    module: str,
    width: int,
    axis: str = "",
    *,
    bias: bool = False,
    transposed: bool = False,
    name: str = "weight",
) -> Variable:
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
        b.unsplit(module, "has a low-rank adapter beside it")
    if transposed and layout != "replicate":
        b.unsplit(module, "is a Conv1D")
    offset = b.parameter(f"{prefix}.bias", (width,), (axis,)) if bias else None
    y = matmul(b, x, weight, module, width, axis, bias=offset)
    if not adapted:
        return y
    return _adapter(b, x, y, module, rank)


def matmul(
    b: BlockBuilder, x: Variable, weight: Variable, module: str, width: int, axis: str = "", *, bias: Variable | None = None
) -> Variable:
    """One gemm of `x` with a weight that contracts its last dim."""
    m = rows(x)
    k = Loop(name="k", size=x.shape[-1], axis=x.axes[-1])
    n = Loop(name="n", size=width, axis=axis)
    flops = 2.0 * m.size * n.size * k.size

    def rule(gradient: Variable) -> Sequence[Variable | None]:
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


def _adapter(b: BlockBuilder, x: Variable, y: Variable, module: str, rank: int) -> Variable:
    """y + scale * B(A x), as PEFT's LoRA layer runs it (peft.tuners.lora.layer.Linear.forward) without dropout."""
    width, axis = y.shape[-1], y.axes[-1]
    down = b.parameter(f"{module}.lora_A.default.weight", (rank, x.shape[-1]), ("", x.axes[-1]), trainable=True)
    up = b.parameter(f"{module}.lora_B.default.weight", (width, rank), (axis, ""), trainable=True)
    inner = matmul(b, x, down, f"{module}.lora_A.default", rank)
    outer = matmul(b, inner, up, f"{module}.lora_B.default", width, axis)
    return add(b, y, scale(b, outer, module), module)


def embedding(
    b: BlockBuilder, ids: Variable, module: str, rows_: int, width: int, *, axis: str = "vocab", layout: str = "vocab"
) -> Variable:
    """Rows of a table by id, the table being the module's own parameter."""
    return lookup(b, ids, b.parameter(f"{module}.weight", (rows_, width), (axis, ""), layout=layout), module)


def lookup(b: BlockBuilder, ids: Variable, table: Variable, module: str) -> Variable:
    """Rows of `table` by id. Backward scatters into a gradient as large as the table; the ids are saved."""

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        return None, b.back("embedding", "embedding_dense_backward", [gradient], table, saved=[ids])

    out = ((*ids.shape, table.shape[1]), (*ids.axes, table.axes[1]), "compute")
    return b.kernel(module, "embedding", "embedding", [ids, table], [out], rule)[0]


def add(b: BlockBuilder, x: Variable, y: Variable, module: str) -> Variable:
    """x + y: gradients pass through; a broadcast operand gets the sum over the broadcast dims."""

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        return tuple(_passed(b, gradient, value) for value in (x, y))

    return b.kernel(module, "elementwise", "add", [x, y], [_broadcast(x, y)], rule)[0]


def mul(b: BlockBuilder, x: Variable, y: Variable, module: str) -> Variable:
    """x * y with broadcasting: keeps y when x needs a gradient and x when y does."""

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        results: list[Variable | None] = []
        for value, other in ((x, y), (y, x)):
            if not value.grad:
                results.append(None)
                continue
            wide = Variable(value.tensor_id, gradient.shape, gradient.axes, gradient.dtype, True)
            product = b.back("elementwise", "mul", [gradient], wide, saved=[other])
            results.append(_passed(b, product, value))
        return results

    return b.kernel(module, "elementwise", "mul", [x, y], [_broadcast(x, y)], rule)[0]


def scale(b: BlockBuilder, x: Variable, module: str, name: str = "mul") -> Variable:
    """x * constant: nothing is kept."""
    return unary(b, x, module, name, backward=("mul",))


def shift(b: BlockBuilder, x: Variable, module: str) -> Variable:
    """x + constant: nothing is kept and the gradient passes through."""
    return unary(b, x, module, "add", backward=())


def cast(b: BlockBuilder, x: Variable, module: str, dtype: str) -> Variable:
    """x.to(dtype): a copy unless the dtype is the same already; the gradient is cast back."""
    if dtype == x.dtype:
        return x

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        return (b.back("copy", "_to_copy", [gradient], x),)

    return b.kernel(module, "copy", "_to_copy", [x], [(x.shape, x.axes, dtype)], rule)[0]


def copy(b: BlockBuilder, x: Variable, module: str, shape: Shape, axes: Axes, name: str = "clone", *, clones: bool = False) -> Variable:
    """A copy into another layout (contiguous, reshape of a transposed tensor); the gradient is a view, or a copy too when a matmul needs it whole."""

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        if clones:
            return (b.back("copy", "clone", [gradient], x),)
        return (Variable(gradient.tensor_id, x.shape, x.axes, gradient.dtype, False),)

    return b.kernel(module, "copy", name, [x], [(shape, axes, x.dtype)], rule)[0]


def softmax(b: BlockBuilder, x: Variable, module: str) -> Variable:
    """Keeps its result."""
    return unary(b, x, module, "_softmax", keep="result", backward=("_softmax_backward_data",), op="softmax")


def concat(b: BlockBuilder, parts: Sequence[Variable], module: str, shape: Shape, axes: Axes, name: str = "cat") -> Variable:
    """Concatenation: the gradients of the parts are narrow views of the whole's."""

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        return tuple(Variable(gradient.tensor_id, part.shape, part.axes, gradient.dtype, False) for part in parts)

    return b.kernel(module, "copy", name, parts, [(shape, axes, parts[0].dtype)], rule)[0]


def unary(
    b: BlockBuilder, x: Variable, module: str, name: str, *, backward: Sequence[str], keep: str = "", op: str = "elementwise"
) -> Variable:
    """An elementwise function. `keep`: "input" or "result" is saved. `backward` lists the kernels in order; the last makes the gradient of x."""
    made: list[Variable] = []

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        saved = {"input": [x], "result": made, "": []}[keep]
        for index, kernel in enumerate(backward):
            gradient = b.back(op, kernel, [gradient], x, dtype=x.dtype, saved=saved if index == len(backward) - 1 else ())
        return (gradient,)

    made.append(b.kernel(module, op, name, [x], [(x.shape, x.axes, x.dtype)], rule)[0])
    return made[0]


def _broadcast(x: Variable, y: Variable) -> tuple[Shape, Axes, str]:
    dims = max(len(x.shape), len(y.shape))
    shapes = [(1,) * (dims - len(v.shape)) + v.shape for v in (x, y)]
    axes = [("",) * (dims - len(v.axes)) + v.axes for v in (x, y)]
    shape = tuple(max(p, q) for p, q in zip(*shapes, strict=True))
    merged = tuple((p if m == shape[i] else q) or q for i, (m, p, q) in enumerate(zip(shapes[0], *axes, strict=True)))
    return shape, merged, "fp32" if "fp32" in (x.dtype, y.dtype) else x.dtype


def _passed(b: BlockBuilder, gradient: Variable, value: Variable) -> Variable | None:
    """The gradient of a possibly broadcast operand."""
    if not value.grad:
        return None
    if prod(value.shape) != prod(gradient.shape):
        gradient = b.back("reduce", "sum", [gradient], value, dtype=gradient.dtype)
    if gradient.dtype != value.dtype:
        gradient = b.back("copy", "_to_copy", [gradient], value)
    return Variable(gradient.tensor_id, value.shape, value.axes, gradient.dtype, False)


def activation(b: BlockBuilder, x: Variable, module: str, kind: str) -> Variable:
    """An activation function under its transformers name (transformers.activations.ACT2FN)."""
    if kind == "gelu_new":
        return _gelu_new(b, x, module)
    if kind == "quick_gelu":
        return mul(b, x, unary(b, scale(b, x, module), module, "sigmoid", keep="result", backward=("sigmoid_backward",)), module)
    name = _KERNELS[kind]
    keep = "result" if name in ("relu", "tanh", "sigmoid") else "input"
    return unary(b, x, module, name, keep=keep, backward=("threshold_backward" if name == "relu" else f"{name}_backward",))


def _gelu_new(b: BlockBuilder, x: Variable, module: str) -> Variable:
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
