"""Mixtures of experts as transformers runs them: a router, rows sorted by expert, two grouped matmuls, rows put back and summed.

Source: transformers 5.24 integrations/moe.py, `grouped_mm_experts_forward` (the default experts implementation), and the routers of each family.
Rows are tokens x top_k whatever the router decides, so sizes do not depend on the data; expert parallelism divides the "experts" axis of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.graph import Loop
from planner.models import ops
from planner.models.builder import BlockBuilder, Variable
from planner.models.routers import route
from planner.models.spec import Experts, ModelSpec


def routed(b: BlockBuilder, x: Variable, module: str, spec: ModelSpec, experts: Experts) -> Variable:
    """Every token through its top_k experts, weighted: (batch, sequence, hidden) in and out."""
    batch, sequence, hidden = x.shape
    flat = b.view(x, (batch * sequence, hidden), ("tokens", ""))
    weights, chosen = route(b, flat, module, experts)
    path = f"{module}.experts"
    rows = weights.shape[0] * experts.top_k
    ids, order = b.kernel(path, "index", "sort", [chosen], [((rows,), ("tokens",), "int64")] * 2)
    source = b.kernel(path, "elementwise", "floor_divide", [order], [((rows,), ("tokens",), "int64")])[0]
    picked = take(b, flat, source, path)
    share = take(b, b.view(weights, (rows,), ("tokens",)), order, path)
    count = b.kernel(path, "reduce", "histc", [ids], [((experts.num_experts,), ("experts",), "int32")])[0]
    ends = b.kernel(path, "elementwise", "cumsum", [count], [((experts.num_experts,), ("experts",), "int32")])[0]
    y = _feed_forward(b, picked, ends, ids, path, spec, experts)
    y = ops.mul(b, y, b.view(share, (rows, 1), ("tokens", "")), path)
    y = take(b, y, b.kernel(path, "index", "index_put_", [order], [((rows,), ("tokens",), "int64")])[0], path, clones=True)
    y = _sum(b, b.view(y, (flat.shape[0], experts.top_k, hidden), ("tokens", "", "")), path)
    return b.view(ops.cast(b, y, path, x.dtype), x.shape, x.axes)


def _feed_forward(b: BlockBuilder, x: Variable, ends: Variable, ids: Variable, path: str, spec: ModelSpec, experts: Experts) -> Variable:
    """Both grouped matmuls and the gated activation between them."""
    width, swapped = experts.ffn, experts.biases
    both = _grouped(b, x, ends, f"{path}.gate_up_proj", 2 * width, "ffn", experts.num_experts, swapped=swapped)
    if experts.biases:
        both = _bias(b, both, ids, f"{path}.gate_up_proj_bias", experts.num_experts)
    part = ((x.shape[0], width), ("tokens", "ffn"))
    y = _clamped_gate(b, both, path, part) if experts.biases else _gate(b, both, path, part, spec.activation)
    y = _grouped(b, y, ends, f"{path}.down_proj", spec.hidden, "", experts.num_experts, swapped=swapped)
    return _bias(b, y, ids, f"{path}.down_proj_bias", experts.num_experts) if experts.biases else y


def _gate(b: BlockBuilder, both: Variable, path: str, part: tuple[tuple[int, int], tuple[str, str]], kind: str) -> Variable:
    gate, up = b.split(both, [part, part], path)
    return ops.mul(b, ops.activation(b, gate, f"{path}.act_fn", kind), up, path)


def _clamped_gate(b: BlockBuilder, both: Variable, path: str, part: tuple[tuple[int, int], tuple[str, str]]) -> Variable:
    """(clamp(up) + 1) * gate * sigmoid(alpha * gate) with gate = clamp(gate), on interleaved columns (GptOssExperts._apply_gate)."""
    gate, up = b.slices(both, [part, part], path)
    gate = ops.unary(b, gate, path, "clamp", keep="input", backward=("le", "where"))
    up = ops.unary(b, up, path, "clamp", keep="input", backward=("ge", "le", "where"))
    glow = ops.mul(b, gate, ops.activation(b, ops.scale(b, gate, path), path, "sigmoid"), path)
    return ops.mul(b, ops.shift(b, up, path), glow, path)


def _grouped(b: BlockBuilder, x: Variable, ends: Variable, name: str, width: int, axis: str, groups: int, *, swapped: bool) -> Variable:
    """One matmul for every expert on its own rows: 2 rows n k flops; weights (experts, out, in), or (experts, in, out) when `swapped`."""
    inner, inner_axis = x.shape[-1], x.axes[-1]
    sizes, axes = ((inner, width), (inner_axis, axis)) if swapped else ((width, inner), (axis, inner_axis))
    weight = b.parameter(name, (groups, *sizes), ("experts", *axes))
    b.layout(name, "column" if axis else "row")
    b.unsplit(name, "is one parameter for all experts")
    m, n, k = (
        Loop(name=loop, size=size, axis=a) for loop, size, a in (("m", x.shape[0], "tokens"), ("n", width, axis), ("k", inner, inner_axis))
    )
    each = Loop(name="groups", size=groups, axis="experts")
    flops = 2.0 * m.size * n.size * k.size

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        dx = dw = None
        if weight.grad:
            loops = (
                Loop(name="m", size=n.size, axis=n.axis),
                Loop(name="n", size=k.size, axis=k.axis),
                Loop(name="k", size=m.size, axis=m.axis),
                each,
            )
            dw = b.back("grouped_gemm", "_grouped_mm", [gradient], weight, saved=[x, ends], loops=loops, flops=flops)
        if x.grad:
            loops = (m, Loop(name="n", size=k.size, axis=k.axis), Loop(name="k", size=n.size, axis=n.axis), each)
            dx = b.back("grouped_gemm", "_grouped_mm", [gradient], x, saved=[weight, ends], loops=loops, flops=flops)
        return dx, dw, None

    path = name.rpartition(".")[0]
    out = ((x.shape[0], width), ("tokens", axis), x.dtype)
    return b.kernel(path, "grouped_gemm", "_grouped_mm", [x, weight, ends], [out], rule, loops=(m, n, k, each), flops=flops)[0]


def _bias(b: BlockBuilder, x: Variable, ids: Variable, name: str, groups: int) -> Variable:
    """Adds every row its expert's bias, gathered by the sorted expert ids."""
    path = name.rpartition(".")[0]
    table = b.parameter(name, (groups, x.shape[-1]), ("experts", x.axes[-1]))
    return ops.add(b, x, take(b, table, ids, path, axes=x.axes), path)


def take(b: BlockBuilder, x: Variable, index: Variable, path: str, *, axes: tuple[str, ...] = (), clones: bool = False) -> Variable:
    """x[index]: backward fills zeros and adds the rows up. `clones`: the gradient arrives broadcast and is made whole first."""

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        if not x.grad:
            return None, None
        if clones:
            gradient = b.back("copy", "clone", [gradient], x)
        zeros = b.back("elementwise", "new_zeros", [], x)
        return b.back("index", "index_put", [zeros, gradient], x, saved=[index]), None

    out = ((*index.shape, *x.shape[1:]), axes or (*index.axes, *x.axes[1:]), x.dtype)
    return b.kernel(path, "index", "index", [x, index], [out], rule)[0]


def _sum(b: BlockBuilder, x: Variable, path: str) -> Variable:
    """Sum over the experts of a token: the gradient is broadcast without a kernel."""

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        return (Variable(gradient.tensor_id, x.shape, x.axes, gradient.dtype, False),)

    return b.kernel(path, "reduce", "sum", [x], [((x.shape[0], x.shape[2]), ("tokens", ""), x.dtype)], rule)[0]
