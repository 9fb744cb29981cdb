"""Norms as eager PyTorch runs them on a bf16 model (transformers 5.24 modeling files, PyTorch 2.13 kernels)."""

from __future__ import annotations

from collections.abc import Sequence

from planner.models import ops
from planner.models.builder import BlockBuilder, Variable


def layer_norm(b: BlockBuilder, x: Variable, module: str, *, affine: bool = True) -> Variable:
    """torch.nn.LayerNorm: one kernel; keeps its input, mean and 1/std (fp32, one a row)."""
    width = x.shape[-1]
    weights = [b.parameter(f"{module}.{name}", (width,), ("",), layout="replicate") for name in ("weight", "bias")] if affine else []
    statistic = ((*x.shape[:-1], 1), (*x.axes[:-1], ""), "fp32")
    made: list[Variable] = []

    def rule(gradient: Variable | None, *_: Variable | None) -> Sequence[Variable | None]:
        if gradient is None:
            return (None,) * (1 + len(weights))
        wanted = [value for value in (x, *weights) if value.grad]
        grads = dict(
            zip(
                wanted,
                b.back_many("norm", "native_layer_norm_backward", [gradient, *weights[:1]], wanted, saved=[x, *made[1:]]),
                strict=True,
            )
        )
        return tuple(grads.get(value) for value in (x, *weights))

    made.extend(b.kernel(module, "norm", "native_layer_norm", [x, *weights], [(x.shape, x.axes, x.dtype), statistic, statistic], rule))
    return made[0]


def rms_norm(b: BlockBuilder, x: Variable, module: str, *, style: str = "llama") -> Variable:
    """x / rms(x) * weight, in fp32 inside.

    Styles, by what is multiplied in which dtype: "llama" casts down and then scales by the weight; "wide" scales in fp32 and then casts down
    (OLMo 2, gpt-oss); "gemma" scales by 1 + weight in fp32; "t5" multiplies the bf16 input by the fp32 factor.
    """
    width = x.shape[-1]
    weight = b.parameter(f"{module}.weight", (width,), x.axes[-1:], layout="replicate")
    wide = ops.cast(b, x, module, "fp32")
    square = ops.unary(b, wide, module, "pow", keep="input", backward=("pow", "mul", "mul"))
    factor = ops.unary(b, ops.shift(b, mean(b, square, module), module), module, "rsqrt", keep="result", backward=("pow", "mul", "mul"))
    normal = ops.mul(b, x if style == "t5" else wide, factor, module)
    if style == "gemma":
        gain = ops.shift(b, ops.cast(b, weight, module, "fp32"), module)
        return ops.cast(b, ops.mul(b, normal, gain, module), module, x.dtype)
    if style == "wide":
        return ops.cast(b, ops.mul(b, weight, normal, module), module, x.dtype)
    return ops.mul(b, weight, ops.cast(b, normal, module, x.dtype), module)


def mean(b: BlockBuilder, x: Variable, module: str) -> Variable:
    """Mean over the last dim, kept as size 1: backward is one division that writes the broadcast gradient."""

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        return (b.back("elementwise", "div", [gradient], x),)

    return b.kernel(module, "reduce", "mean", [x], [((*x.shape[:-1], 1), (*x.axes[:-1], ""), x.dtype)], rule)[0]
