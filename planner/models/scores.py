"""Attention without a fused kernel, as `eager_attention_forward` of transformers 5.24 runs it: the scores are made, kept and differentiated.

The default of Gemma 2 (capped scores) and gpt-oss (sinks), and of any model with attn_implementation "eager". Every query meets every key; the mask only adds
minus infinity, so causal models pay for both halves.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.graph import Loop
from planner.models import ops
from planner.models.builder import BlockBuilder, Variable

_SQUARE = ("batch", "heads", "sequence", "")


def causal_mask(b: BlockBuilder, batch: int, sequence: int) -> Variable:
    """The additive mask that the model makes once a forward: 0 or the lowest number, (batch, 1, query, key)."""
    seen = b.kernel("model", "elementwise", "le", [], [((1, 1, sequence, sequence), ("", "", "sequence", ""), "bool")])[0]
    return b.kernel("model", "elementwise", "where", [seen], [((batch, 1, sequence, sequence), ("batch", "", "sequence", ""), "compute")])[
        0
    ]


def eager_attention(
    b: BlockBuilder,
    q: Variable,
    k: Variable,
    v: Variable,
    mask: Variable,
    module: str,
    *,
    capped: bool = False,
    sinks: Variable | None = None,
) -> Variable:
    """softmax(q k^T + mask) v on (batch, heads, sequence, d), keys and values repeated for their queries. Returns (batch, sequence, heads * dv).

    Without sinks the softmax is fp32 and its input is made by a cast; with sinks it stays in the compute dtype. `capped`: c tanh(scores / c) first.
    """
    batch, heads, length, dim = q.shape
    k, v = (_repeated(b, value, heads, module) for value in (k, v))
    if sinks is None:
        q = ops.copy(b, q, module, q.shape, q.axes)
    axes = Loop(name="batch", size=batch, axis="batch"), Loop(name="heads", size=heads, axis="heads")
    scores = _bmm(b, q, k, module, axes, (length, k.shape[2], dim), swapped=True)
    scores = ops.scale(b, scores, module)
    if capped:
        scores = ops.scale(b, ops.activation(b, ops.scale(b, scores, module, "div"), module, "tanh"), module)
    scores = ops.add(b, scores, mask, module)
    if sinks is None:
        shares = ops.cast(b, ops.softmax(b, ops.cast(b, scores, module, "fp32"), module), module, q.dtype)
    else:
        shares = _with_sinks(b, scores, sinks, module)
    out = _bmm(b, shares, v, module, axes, (length, v.shape[3], k.shape[2]), swapped=False)
    return ops.copy(b, out, module, (batch, length, heads * v.shape[3]), ("batch", "sequence", "heads"), clones=True)


def _repeated(b: BlockBuilder, x: Variable, heads: int, module: str) -> Variable:
    """One copy of every key-value head for each of its queries; backward sums them."""
    shape = (x.shape[0], heads, *x.shape[2:])

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        if shape == x.shape:
            return (Variable(gradient.tensor_id, x.shape, x.axes, gradient.dtype, False),)
        return (b.back("reduce", "sum", [gradient], x),)

    return b.kernel(module, "copy", "clone", [x], [(shape, ("batch", "heads", "sequence", ""), x.dtype)], rule)[0]


def _bmm(
    b: BlockBuilder, x: Variable, y: Variable, module: str, outer: tuple[Loop, ...], sizes: tuple[int, int, int], *, swapped: bool
) -> Variable:
    """x y (x y^T when `swapped`) for every batch and head: 2 b h m n k flops forward and for each gradient; keeps both."""
    m, n, k = sizes
    flops = 2.0 * m * n * k
    for loop in outer:
        flops *= loop.size

    def loops(rows: int, columns: int, inner: int) -> tuple[Loop, ...]:
        return (*outer, Loop(name="m", size=rows), Loop(name="n", size=columns), Loop(name="k", size=inner))

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        dx = b.back("gemm", "bmm", [gradient], x, saved=[y], loops=loops(m, k, n), flops=flops)
        dy = b.back("gemm", "bmm", [gradient], y, saved=[x], loops=loops(n, k, m) if swapped else loops(k, n, m), flops=flops)
        return dx, dy

    out = ((*x.shape[:2], m, n), _SQUARE, x.dtype)
    return b.kernel(
        module, "gemm", "bmm", [x, y], [out], rule, loops=loops(m, n, k), flops=flops, role="core_attention" if swapped else ""
    )[0]


def _with_sinks(b: BlockBuilder, scores: Variable, sinks: Variable, module: str) -> Variable:
    """Softmax over the keys and one learned logit a head; the sink's share is dropped. The row maximum is taken off before, with a gradient of its own."""
    batch, heads, length, keys = scores.shape
    wide = ((batch, heads, length, keys + 1), _SQUARE, scores.dtype)
    column = b.expand(sinks, (batch, heads, length, 1), _SQUARE, module)
    joined = ops.concat(b, [scores, column], module, *wide[:2])
    row = ((batch, heads, length, 1), _SQUARE)
    best, place = b.kernel(module, "reduce", "max", [joined], [(*row, scores.dtype), (*row, "int64")])

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        off = b.back("reduce", "sum", [b.back("elementwise", "neg", [gradient], joined)], best)
        zeros = b.back("elementwise", "new_zeros", [], joined)
        back = b.back("index", "scatter", [zeros, off], joined, saved=[place])
        return (b.back("elementwise", "accumulate", [gradient, back], joined),)

    level = b.kernel(module, "elementwise", "sub", [joined, best], [wide], rule, sources=(joined,))[0]
    (shares,) = b.slices(ops.softmax(b, level, module), [(scores.shape, _SQUARE)], module)
    return shares
