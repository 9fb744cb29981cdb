"""Rotary positions and attention as eager PyTorch runs them on a bf16 model.

Attention is one flash kernel (torch.nn.functional.scaled_dot_product_attention, or flash-attn where a family needs soft-capping, sinks or a
window): it keeps q, k, v, its output and the fp32 log-sum-exp, and its backward runs five matmuls where forward runs two
(Dao 2023, FlashAttention-2, arXiv 2307.08691, section 4.1).
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.graph import Loop
from planner.models import ops
from planner.models.builder import BlockBuilder, Variable


def heads(b: BlockBuilder, x: Variable, count: int, axis: str, module: str = "", *, clones: bool = False) -> Variable:
    """(batch, sequence, heads * d) seen as (batch, heads, sequence, d)."""
    batch, sequence, width = x.shape
    return b.view(x, (batch, count, sequence, width // count), ("batch", axis, "sequence", ""), module=module, clones=clones)


def rotary_tables(
    b: BlockBuilder, module: str, sequence: int, dim: int, rope: str = "halves", dtype: str = "compute"
) -> tuple[Variable, ...]:
    """cos and sin of every position, made once a forward in fp32, cast to `dtype`, and kept for the layers' backward.

    Tables are as wide as `dim` ("chunks": half of it); "complex" is one table of complex numbers, counted as fp32 pairs.
    """
    frequencies = b.constant(f"{module}.inv_freq", (dim // 2,), ("",), "fp32")
    angle = b.kernel(module, "elementwise", "mul", [frequencies], [((1, sequence, dim // 2), ("", "sequence", ""), "fp32")])[0]
    whole = ((1, sequence, dim), ("", "sequence", ""), "fp32")
    if rope == "complex":
        tables = [ops.scale(b, b.kernel(module, "elementwise", "polar", [angle], [whole])[0], module)]
    else:
        if rope != "chunks":
            angle = b.kernel(module, "copy", "cat", [angle], [whole])[0]
        tables = [ops.scale(b, ops.unary(b, angle, module, name, backward=()), module) for name in ("cos", "sin")]
        tables = [ops.cast(b, table, module, dtype) for table in tables]
    b.save(*tables)
    return tuple(tables)


def rotate(b: BlockBuilder, x: Variable, cos: Variable, sin: Variable, module: str) -> Variable:
    """x cos + rotate_half(x) sin with rotate_half = cat(-x2, x1): five kernels forward, seven backward; keeps cos and sin only.

    fp32 tables (OLMo) promote the sum, which is then cast back.
    """
    wide = cos.dtype != x.dtype
    dtype = cos.dtype

    def down(gradient: Variable) -> Variable:
        return b.back("copy", "_to_copy", [gradient], x) if wide else gradient

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        turned = down(b.back("elementwise", "mul", [gradient], x, dtype=dtype, saved=[sin]))
        minus = b.back("elementwise", "neg", [turned], _part(x, x.shape[-1] // 2))
        left = b.back("copy", "slice_backward", [minus], x)
        right = b.back("copy", "slice_backward", [turned], x)
        halves = b.back("elementwise", "accumulate", [left, right], x)
        straight = down(b.back("elementwise", "mul", [gradient], x, dtype=dtype, saved=[cos]))
        return (b.back("elementwise", "accumulate", [halves, straight], x), None, None)

    plain, half = (x.shape, x.axes, x.dtype), ((*x.shape[:-1], x.shape[-1] // 2), x.axes, x.dtype)
    promoted = (x.shape, x.axes, dtype)
    straight = b.kernel(module, "elementwise", "mul", [x, cos], [promoted])[0]
    minus = b.kernel(module, "elementwise", "neg", [x], [half])[0]
    turned = b.kernel(module, "copy", "cat", [minus, x], [plain])[0]
    turned = b.kernel(module, "elementwise", "mul", [turned, sin], [promoted])[0]
    return ops.cast(
        b, b.kernel(module, "elementwise", "add", [straight, turned], [promoted], rule, sources=(x, cos, sin))[0], module, x.dtype
    )


def rotate_part(b: BlockBuilder, x: Variable, cos: Variable, sin: Variable, module: str) -> Variable:
    """Rotates the first features of a head, as many as the tables are wide, and concatenates the rest (Phi-3, also when there is no rest)."""
    width, dim = cos.shape[-1], x.shape[-1]
    if width == dim:
        turned = b.pad_view(x, module)
        return ops.concat(b, [rotate(b, turned, cos, sin, module)], module, x.shape, x.axes)
    parts = [((*x.shape[:-1], size), x.axes) for size in (width, dim - width)]
    turned, rest = b.slices(x, parts, module)
    return ops.concat(b, [rotate(b, turned, cos, sin, module), rest], module, x.shape, x.axes)


def rotate_pairs(b: BlockBuilder, x: Variable, cos: Variable, sin: Variable, module: str) -> Variable:
    """cat(x1 cos - x2 sin, x2 cos + x1 sin): seven kernels forward; backward seven and the gradients of the two parts joined.

    With tables as wide as a head x1 and x2 are its even and odd features, padded and added backward (DeepSeek V3); with tables of half the width
    they are its halves, concatenated backward (gpt-oss).
    """
    strided = cos.shape[-1] == x.shape[-1]
    part = _part(x, x.shape[-1] // 2)

    def times(gradient: Variable, table: Variable) -> Variable:
        return b.back("elementwise", "mul", [gradient], part, saved=[table])

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        by_sin, by_cos = times(gradient, sin), times(gradient, cos)
        minus = b.back("elementwise", "neg", [gradient], part)
        second = b.back("elementwise", "accumulate", [by_cos, times(minus, sin)], part)
        first = b.back("elementwise", "accumulate", [by_sin, times(gradient, cos)], part)
        if not strided:
            return (b.back("copy", "cat", [first, second], x), None, None)
        padded = [b.back("copy", "slice_backward", [value], x) for value in (second, first)]
        return (b.back("elementwise", "accumulate", padded, x), None, None)

    half = (part.shape, x.axes, x.dtype)
    made = [b.kernel(module, "elementwise", "mul", [x, table], [half])[0] for table in (cos, sin)]
    first = b.kernel(module, "elementwise", "sub", made, [half])[0]
    made = [b.kernel(module, "elementwise", "mul", [x, table], [half])[0] for table in (cos, sin)]
    second = b.kernel(module, "elementwise", "add", made, [half])[0]
    return b.kernel(module, "copy", "cat", [first, second], [(x.shape, x.axes, x.dtype)], rule, sources=(x, cos, sin))[0]


def _part(x: Variable, width: int) -> Variable:
    """A view of some features of `x`, to size gradients by."""
    return Variable(x.tensor_id, (*x.shape[:-1], width), x.axes, x.dtype, True)


def attention(
    b: BlockBuilder,
    q: Variable,
    k: Variable,
    v: Variable,
    module: str,
    *,
    causal: bool,
    window: int = 0,
    extra: Variable | None = None,
    clones: bool = False,
) -> Variable:
    """Scaled dot product attention by a flash kernel on (batch, heads, sequence, d).

    flops = 2 b h (query, key) pairs (d + dv), where a causal mask leaves half of the q x kv pairs and a window of w keys w q - w (w - 1) / 2;
    backward 2.5 times that. `extra` is one more input with a gradient of its own: an additive bias of the scores, or sinks (logits, one a
    head, that join the softmax). The output has the layout of q: where that is contiguous over (batch, heads, sequence, d), it `clones` into
    (batch, sequence, heads, d) for the next matmul. Returns (batch, sequence, heads * dv).
    """
    batch, count, length, dim = q.shape
    keys, wide = k.shape[2], v.shape[3]
    pairs = length * keys / (2.0 if causal else 1.0)
    if 0 < window < keys:
        pairs = window * length - window * (window - 1) / 2.0
    flops = 2.0 * batch * count * pairs * (dim + wide)
    loops = (
        Loop(name="batch", size=batch, axis="batch"),
        Loop(name="heads", size=count, axis=q.axes[1]),
        Loop(name="kv_heads", size=k.shape[1], axis=k.axes[1]),
        Loop(name="q", size=length, axis="sequence"),
        Loop(name="kv", size=keys, axis="sequence"),
        Loop(name="head_dim", size=dim),
        Loop(name="v_dim", size=wide),
    )
    inputs = (q, k, v) if extra is None else (q, k, v, extra)
    made: list[Variable] = []

    def rule(gradient: Variable | None, _: Variable | None) -> Sequence[Variable | None]:
        if gradient is None:
            return (None,) * len(inputs)
        kept = [*inputs, *made]
        wanted = [value for value in inputs if value.grad]
        grads = b.back_many("attention", "flash_backward", [gradient], wanted, saved=kept, loops=loops, flops=2.5 * flops, causal=causal)
        return tuple(dict(zip(wanted, grads, strict=True)).get(value) for value in inputs)

    out = ((batch, length, count * wide), ("batch", "sequence", q.axes[1]), q.dtype)
    statistic = ((batch, count, length), ("batch", q.axes[1], "sequence"), "fp32")
    made.extend(b.kernel(module, "attention", "flash", inputs, [out, statistic], rule, loops=loops, flops=flops, causal=causal))
    return ops.copy(b, made[0], module, made[0].shape, made[0].axes) if clones else made[0]


def rotate_complex(b: BlockBuilder, x: Variable, turns: Variable, module: str) -> Variable:
    """Features in pairs as complex numbers times e^(i angle) (DeepSeek V2): cast up, multiplied and cast down; keeps the complex table."""

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        wide = b.back("copy", "_to_copy", [gradient], x, dtype="fp32")
        conjugate = b.back("elementwise", "_conj", [], turns, saved=[turns])
        turned = b.back("elementwise", "mul", [wide, conjugate], x, dtype="fp32")
        return b.back("copy", "_to_copy", [turned], x), None

    wide = b.kernel(module, "copy", "_to_copy", [x], [(x.shape, x.axes, "fp32")])[0]
    turned = b.kernel(module, "elementwise", "mul", [wide, turns], [(x.shape, x.axes, "fp32")])[0]
    return b.kernel(module, "copy", "_to_copy", [turned], [(x.shape, x.axes, x.dtype)], rule, sources=(x, turns))[0]
