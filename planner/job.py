"""Job: what must be trained, and which numerics are allowed. It says nothing about parallelism (see planner.strategy)."""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.errors import InputError, require_whole

PRECISIONS = ("bf16", "fp16", "fp32", "fp8")
MOST = 10**9  # sequences per step or tokens per sequence: far beyond any run, small enough to search
OPTIMIZERS = ("adamw", "sgd", "adamw_8bit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One optimizer step of training.

    global_batch: sequences per step. seq_len: tokens per sequence (images: patches are the model's own affair, seq_len is ignored).
    precision: compute dtype; fp8 means fp8 matmuls on bf16 activations. dropout: probability assumed at every dropout of the model (0 = none).
    """

    global_batch: int
    seq_len: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("global_batch", "seq_len"):
            value = getattr(self, name)
            require_whole(value, f"Job.{name}", least=1)
            if value > MOST:
                raise InputError(f"{name} is {value}", where=f"Job.{name}", remedy=f"give at most {MOST:,}")
        for name, known in (("precision", PRECISIONS), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in known:
                raise InputError(f"{name} is {getattr(self, name)!r}", where=f"Job.{name}", remedy=f"use one of {', '.join(known)}")
        if not isinstance(self.dropout, int | float) or isinstance(self.dropout, bool) or not 0.0 <= self.dropout < 1.0:
            raise InputError(f"dropout is {self.dropout!r}", where="Job.dropout", remedy="give a probability in [0, 1)")

    @property
    def tokens_per_step(self) -> int:
        """global_batch * seq_len."""
        return self.global_batch * self.seq_len
