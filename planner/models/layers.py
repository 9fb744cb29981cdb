"""Norms, rotary embedding, attention and losses as eager PyTorch runs them on a bf16 model. Sources: transformers 5.24 modeling files, PyTorch 2.13 kernels."""

from __future__ import annotations

from collections.abc import Sequence

from planner.graph import Loop
from planner.models import ops
from planner.models.builder import BlockBuilder, Value


def layer_norm(b: BlockBuilder, x: Value, module: str, *, affine: bool = True) -> Value:
    """torch.nn.LayerNorm: one kernel; keeps its input, mean and 1/std (fp32, one a row)."""
    width = x.shape[-1]
    weights = [b.parameter(f"{module}.{name}", (width,), ("",), layout="replicate") for name in ("weight", "bias")] if affine else []
    statistic = ((*x.shape[:-1], 1), (*x.axes[:-1], ""), "fp32")
    made: list[Value] = []

    def rule(gradient: Value | None, *_: Value | None) -> Sequence[Value | None]:
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


def rms_norm(b: BlockBuilder, x: Value, module: str, *, style: str = "llama") -> Value:
    """x / rms(x) * weight, in fp32 inside.

    Styles, by what is multiplied in which dtype: "llama" casts down and then scales by the weight; "wide" scales in fp32 and then casts down
    (OLMo 2, gpt-oss); "gemma" scales by 1 + weight in fp32; "t5" multiplies the bf16 input by the fp32 factor.
    """
    width = x.shape[-1]
    weight = b.parameter(f"{module}.weight", (width,), ("",), layout="replicate")
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


def mean(b: BlockBuilder, x: Value, module: str) -> Value:
    """Mean over the last dim, kept as size 1: backward is one division that writes the broadcast gradient."""

    def rule(gradient: Value) -> Sequence[Value | None]:
        return (b.back("elementwise", "div", [gradient], x),)

    return b.kernel(module, "reduce", "mean", [x], [((*x.shape[:-1], 1), (*x.axes[:-1], ""), x.dtype)], rule)[0]


def heads(b: BlockBuilder, x: Value, count: int, axis: str, module: str = "", *, clones: bool = False) -> Value:
    """(batch, sequence, heads * d) seen as (batch, heads, sequence, d)."""
    batch, sequence, width = x.shape
    return b.view(x, (batch, count, sequence, width // count), ("batch", axis, "sequence", ""), module=module, clones=clones)


def rotary_tables(b: BlockBuilder, module: str, sequence: int, dim: int) -> tuple[Value, Value]:
    """cos and sin of every position, made once a forward in fp32, cast down, and kept for the layers' backward."""
    frequencies = b.constant(f"{module}.inv_freq", (dim // 2,), ("",), "fp32")
    half = b.kernel(module, "elementwise", "mul", [frequencies], [((1, sequence, dim // 2), ("", "sequence", ""), "fp32")])[0]
    angle = b.kernel(module, "copy", "cat", [half], [((1, sequence, dim), ("", "sequence", ""), "fp32")])[0]
    tables = []
    for name in ("cos", "sin"):
        table = ops.scale(b, ops.unary(b, angle, module, name, backward=()), module)
        tables.append(ops.cast(b, table, module, "compute"))
    b.save(*tables)
    return tables[0], tables[1]


def rotate(b: BlockBuilder, x: Value, cos: Value, sin: Value, module: str) -> Value:
    """x cos + rotate_half(x) sin with rotate_half = cat(-x2, x1): five kernels forward, seven backward; keeps cos and sin only."""

    def rule(gradient: Value) -> Sequence[Value | None]:
        turned = b.back("elementwise", "mul", [gradient], x, saved=[sin])
        half = Value(x.tensor_id, (*x.shape[:-1], x.shape[-1] // 2), x.axes, x.dtype, True)
        minus = b.back("elementwise", "neg", [turned], half)
        left = b.back("copy", "slice_backward", [minus], x)
        right = b.back("copy", "slice_backward", [turned], x)
        halves = b.back("elementwise", "accumulate", [left, right], x)
        straight = b.back("elementwise", "mul", [gradient], x, saved=[cos])
        return (b.back("elementwise", "accumulate", [halves, straight], x), None, None)

    plain = (x.shape, x.axes, x.dtype)
    half = ((*x.shape[:-1], x.shape[-1] // 2), x.axes, x.dtype)
    straight = b.kernel(module, "elementwise", "mul", [x, cos], [plain])[0]
    minus = b.kernel(module, "elementwise", "neg", [x], [half])[0]
    turned = b.kernel(module, "copy", "cat", [minus, x], [plain])[0]
    turned = b.kernel(module, "elementwise", "mul", [turned, sin], [plain])[0]
    return b.kernel(module, "elementwise", "add", [straight, turned], [plain], rule, sources=(x, cos, sin))[0]


def attention(b: BlockBuilder, q: Value, k: Value, v: Value, module: str, *, causal: bool, window: int = 0) -> Value:
    """Scaled dot product attention by a flash kernel on (batch, heads, sequence, d): keeps q, k, v, its output and the fp32 log-sum-exp.

    flops = 2 b h (query, key) pairs (d + dv), where a causal mask leaves half of the q x kv pairs and a window of w keys w q - w (w - 1) / 2;
    backward 2.5 times that (five matmuls instead of two; Dao 2023, FlashAttention-2, section 4.1). Returns (batch, sequence, heads * dv).
    """
    batch, count, length, dim = q.shape
    keys, wide = k.shape[2], v.shape[3]
    pairs = length * keys / (2.0 if causal else 1.0)
    if window and window < keys:
        pairs = window * length - window * (window - 1) / 2.0
    flops = 2.0 * batch * count * pairs * (dim + wide)
    loops = (
        Loop(name="batch", size=batch, axis="batch"),
        Loop(name="heads", size=count, axis="heads"),
        Loop(name="kv_heads", size=k.shape[1], axis="kv_heads"),
        Loop(name="q", size=length, axis="sequence"),
        Loop(name="kv", size=keys, axis="sequence"),
        Loop(name="head_dim", size=dim),
        Loop(name="v_dim", size=wide),
    )
    made: list[Value] = []

    def rule(gradient: Value | None, _: Value | None) -> Sequence[Value | None]:
        if gradient is None:
            return (None, None, None)
        return b.back_many(
            "attention", "flash_backward", [gradient], (q, k, v), saved=[q, k, v, *made], loops=loops, flops=2.5 * flops, causal=causal
        )

    out = ((batch, length, count * wide), ("batch", "sequence", "heads"), q.dtype)
    statistic = ((batch, count, length), ("batch", "heads", "sequence"), "fp32")
    made.extend(b.kernel(module, "attention", "flash", [q, k, v], [out, statistic], rule, loops=loops, flops=flops, causal=causal))
    return made[0]


def token_loss(b: BlockBuilder, logits: Value, labels: Value, *, shifts: bool) -> Value:
    """Mean cross-entropy of fp32 logits as transformers.loss.loss_utils computes it: keeps the fp32 log-softmax and the (shifted, copied) labels."""
    target = ops.copy(b, labels, "", labels.shape, labels.axes) if shifts else labels
    logarithm = log_softmax(b, ops.cast(b, logits, "", "fp32"))
    return nll(b, logarithm, target)


def log_softmax(b: BlockBuilder, x: Value) -> Value:
    """Keeps its result."""
    return ops.unary(b, x, "", "_log_softmax", keep="result", backward=("_log_softmax_backward_data",), op="softmax")


def nll(b: BlockBuilder, logarithm: Value, target: Value) -> Value:
    """Negative log-likelihood: backward writes a gradient as large as the logits."""

    def rule(_: Value | None) -> Sequence[Value | None]:
        return (b.back("cross_entropy", "nll_loss_backward", [], logarithm, saved=[logarithm, target]), None)

    return b.kernel("", "cross_entropy", "nll_loss_forward", [logarithm, target], [((), (), logarithm.dtype)], rule)[0]
