"""Routers: which experts a token visits and with which weight (transformers 5.24, the TopKRouter classes of each family). Small, but the fp32 copies count."""

from __future__ import annotations

from collections.abc import Sequence

from planner.models import ops
from planner.models.builder import BlockBuilder, Variable
from planner.models.spec import Experts


def route(b: BlockBuilder, x: Variable, module: str, experts: Experts) -> tuple[Variable, Variable]:
    """Weights and expert ids, both (tokens, top_k)."""
    if experts.router == "top_k":
        logits = ops.linear(b, x, f"{module}.router", experts.num_experts, bias=True)
        best, chosen = _top_k(b, logits, f"{module}.router", experts.top_k)
        return ops.softmax(b, best, f"{module}.router"), chosen
    path = f"{module}.gate"
    if experts.router == "sigmoid":
        return _sigmoid(b, x, path, experts)
    wide = experts.router == "wide_softmax"
    scores = ops.softmax(
        b, _wide_linear(b, x, path, experts) if wide else ops.cast(b, ops.linear(b, x, path, experts.num_experts), path, "fp32"), path
    )
    if experts.top_groups < experts.groups:
        scores = _masked(b, scores, _group_mask(b, scores, path, experts, "amax"), path)
    best, chosen = _top_k(b, scores, path, experts.top_k)
    if wide:
        return ops.scale(b, best, path), chosen
    if experts.normalized:
        best = _normalized(b, best, path)
    return (best if experts.router == "softmax_fp32" else ops.cast(b, best, path, x.dtype)), chosen


def _sigmoid(b: BlockBuilder, x: Variable, path: str, experts: Experts) -> tuple[Variable, Variable]:
    """DeepSeek V3: sigmoid scores; a bias without gradient and group limits only decide who is chosen."""
    scores = ops.activation(b, _wide_linear(b, x, path, experts), path, "sigmoid")
    biased = b.kernel(path, "elementwise", "add", [scores], [(scores.shape, scores.axes, "fp32")])[0]
    mask = _group_mask(b, biased, path, experts, "topk")
    masked = b.kernel(path, "elementwise", "masked_fill", [biased, mask], [(scores.shape, scores.axes, "fp32")])[0]
    small = ((x.shape[0], experts.top_k), ("tokens", ""))
    _, chosen = b.kernel(path, "index", "topk", [masked], [(*small, "fp32"), (*small, "int64")])

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        zeros = b.back("elementwise", "new_zeros", [], scores)
        return b.back("index", "scatter_add", [zeros, gradient], scores, saved=[chosen]), None

    weights = b.kernel(path, "index", "gather", [scores, chosen], [(*small, "fp32")], rule)[0]
    if experts.normalized:
        weights = _normalized(b, weights, path)
    return ops.scale(b, weights, path), chosen


def _wide_linear(b: BlockBuilder, x: Variable, path: str, experts: Experts) -> Variable:
    """x W^T with both cast to fp32 first."""
    weight = b.parameter(f"{path}.weight", (experts.num_experts, x.shape[-1]), ("", ""), layout="replicate")
    return ops.matmul(b, ops.cast(b, x, path, "fp32"), ops.cast(b, weight, path, "fp32"), path, experts.num_experts)


def _top_k(b: BlockBuilder, x: Variable, path: str, count: int) -> tuple[Variable, Variable]:
    made: list[Variable] = []

    def rule(gradient: Variable, _: Variable | None) -> Sequence[Variable | None]:
        zeros = b.back("elementwise", "new_zeros", [], x)
        return (b.back("index", "scatter", [zeros, gradient], x, saved=made[1:]),)

    small = ((x.shape[0], count), ("tokens", ""))
    made.extend(b.kernel(path, "index", "topk", [x], [(*small, x.dtype), (*small, "int64")], rule))
    return made[0], made[1]


def _group_mask(b: BlockBuilder, scores: Variable, path: str, experts: Experts, best: str) -> Variable:
    """True outside the best groups of experts."""
    tokens = scores.shape[0]
    groups = ((tokens, experts.groups), ("tokens", ""))
    value = b.kernel(path, "reduce", best, [scores], [(*groups, "fp32")])[0]
    index = b.kernel(path, "index", "topk", [value], [((tokens, experts.top_groups), ("tokens", ""), "int64")])[0]
    mask = b.kernel(path, "index", "scatter_", [index], [(*groups, "fp32")])[0]
    spread = b.kernel(path, "copy", "clone", [mask], [(scores.shape, scores.axes, "fp32")])[0]
    true = b.kernel(path, "copy", "_to_copy", [spread], [(scores.shape, scores.axes, "bool")])[0]
    return b.kernel(path, "elementwise", "bitwise_not", [true], [(scores.shape, scores.axes, "bool")])[0]


def _masked(b: BlockBuilder, x: Variable, mask: Variable, path: str) -> Variable:
    """x where the mask is false, 0 elsewhere: keeps the mask."""

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        return b.back("elementwise", "masked_fill", [gradient], x, saved=[mask]), None

    return b.kernel(path, "elementwise", "masked_fill", [x, mask], [(x.shape, x.axes, x.dtype)], rule)[0]


def _normalized(b: BlockBuilder, x: Variable, path: str) -> Variable:
    """x / sum(x) in place: keeps a copy of x and the sum."""
    row = ((x.shape[0], 1), ("tokens", ""), x.dtype)
    plain = (x.shape, x.axes, x.dtype)
    total = b.kernel(path, "reduce", "sum", [x], [row])[0]
    kept = b.kernel(path, "copy", "clone", [x], [plain])[0]

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        straight = b.back("elementwise", "div", [gradient], x, saved=[total])
        ratio = b.back("elementwise", "div", [], x, saved=[kept, total])
        product = b.back("elementwise", "mul", [gradient, b.back("elementwise", "neg", [ratio], x)], x)
        across = b.back("reduce", "sum", [b.back("elementwise", "div", [product], x, saved=[total])], total)
        return (b.back("elementwise", "accumulate", [straight, across], x),)

    return b.kernel(path, "elementwise", "div_", [x, total], [plain], rule, sources=(x,))[0]
