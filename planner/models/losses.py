"""Losses as transformers.loss.loss_utils computes them."""

from __future__ import annotations

from collections.abc import Sequence

from planner.models import ops
from planner.models.builder import BlockBuilder, Variable


def causal_loss(b: BlockBuilder, logits: Variable, labels: Variable) -> Variable:
    """Mean cross-entropy of fp32 logits (ForCausalLMLoss): keeps the fp32 log-softmax and the labels, shifted into a copy."""
    target = ops.copy(b, labels, "", labels.shape, labels.axes)
    return nll(b, log_softmax(b, ops.cast(b, logits, "", "fp32")), target)


def plain_loss(b: BlockBuilder, logits: Variable, labels: Variable) -> Variable:
    """torch.nn.CrossEntropyLoss on the logits as they are (BERT, T5, image classification): keeps the log-softmax in the compute dtype and the labels."""
    return nll(b, log_softmax(b, logits), labels)


def log_softmax(b: BlockBuilder, x: Variable) -> Variable:
    """Keeps its result."""
    return ops.unary(b, x, "", "_log_softmax", keep="result", backward=("_log_softmax_backward_data",), op="softmax")


def nll(b: BlockBuilder, logarithm: Variable, target: Variable) -> Variable:
    """Negative log-likelihood: backward writes a gradient as large as the logits."""

    def rule(_: Variable | None) -> Sequence[Variable | None]:
        return (b.back("cross_entropy", "nll_loss_backward", [], logarithm, saved=[logarithm, target]), None)

    return b.kernel("", "cross_entropy", "nll_loss_forward", [logarithm, target], [((), (), logarithm.dtype)], rule)[0]
