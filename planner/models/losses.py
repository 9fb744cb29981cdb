"""Losses as transformers.loss.loss_utils computes them."""

from __future__ import annotations

from collections.abc import Sequence

from planner.models import ops
from planner.models.builder import BlockBuilder, Value


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
