"""Optimizers as data: bytes of state per element, and bytes one step moves per element.

adamw: m and v in the dtype of the weights the optimizer updates (fp32 master or fp32 parameters: 8 B). sgd: plain, as torch.optim.SGD
by default: no state (momentum would add 4 B).
adamw_8bit: m and v as uint8 with one fp32 absmax per 256 elements (bitsandbytes, torchao): 2 x (1 + 4/256) B.

Step traffic (fused kernels: each operand is read once and each result written once): weight, gradient and states read, weight and states written, the low
precision copy written where there is a master. A foreach (multi-tensor, not fused) AdamW runs about ten kernels over the states instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """state_bytes: bytes of state per element with fp32 weights."""

    name: str
    state_bytes: float
    source: str


OPTIMIZERS = (
    Optimizer(name="adamw", state_bytes=8.0, source="Loshchilov and Hutter 2019; torch.optim.AdamW state"),
    Optimizer(name="sgd", state_bytes=0.0, source="torch.optim.SGD defaults (momentum would add 4 bytes)"),
    Optimizer(name="adamw_8bit", state_bytes=2.0 * (1.0 + 4.0 / 256.0), source="Dettmers et al. 2022, block-wise 8-bit, block 256"),
)


def optimizer(name: str) -> Optimizer:
    """The optimizer called `name`. Raises InputError with the known names."""
    for row in OPTIMIZERS:
        if row.name == name:
            return row
    known = ", ".join(row.name for row in OPTIMIZERS)
    raise InputError(f"unknown optimizer {name!r}", where="Job.optimizer", remedy=f"use one of {known}")


def step_bytes_per_element(row: Optimizer, *, weight_bytes: float, gradient_bytes: float, master: bool) -> float:
    """Bytes one fused step moves per element: weights (the fp32 master where there is one) and states twice, gradients once, the copy once."""
    updated = 4.0 if master else weight_bytes
    copied = weight_bytes if master else 0.0
    return 2.0 * updated + gradient_bytes + 2.0 * row.state_bytes + copied
