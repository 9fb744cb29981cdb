"""Loss on logits that are split over the vocabulary, so that no rank ever holds them whole.

torch's loss_parallel computes cross entropy on such a DTensor: two small all-reduces (maximum, sum of exponentials) and one for the label's logit
(Megatron-LM core/tensor_parallel/cross_entropy.py does the same). The user's loss function is called as ever, with DTensor logits; if it
does something that DTensor cannot mix with plain tensors, the logits are gathered from then on, and a warning says so.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils import _pytree as pytree

from runtime.batch import Batch, Loss

_log = logging.getLogger(__name__)


class VocabParallelLoss:
    """loss_fn(output, batch) with `output` as it is, DTensor logits included, or gathered once that has failed."""

    def __init__(self, loss_fn: Loss) -> None:
        self.loss_fn = loss_fn
        self.gathers = False

    def __call__(self, output: Any, batch: Batch) -> Tensor:
        """The mean loss, whole on every rank."""
        if not self.gathers:
            try:
                return _whole(self.loss_fn(output, batch))
            except RuntimeError as error:
                self.gathers = True
                _log.warning("the loss cannot work on logits split over tp (%s): gathering them, which costs memory", error)
        return _whole(self.loss_fn(pytree.tree_map_only(DTensor, _whole, output), batch))


def vocab_parallel(degree: int) -> AbstractContextManager[object]:
    """The context in which forward and backward of a split cross entropy must both run; nothing when tp is 1."""
    return nullcontext() if degree == 1 else loss_parallel()


def _whole(value: Tensor) -> Tensor:
    return value.redistribute(placements=(Replicate(),)).to_local() if isinstance(value, DTensor) else value
