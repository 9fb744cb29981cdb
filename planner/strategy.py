"""Strategy: one complete set of choices for how a job runs. What `estimate` prices, `autoplan` chooses and the runtime obeys."""

from __future__ import annotations

from dataclasses import dataclass

from costmodel import schedule
from costmodel.errors import InputError, require_whole
from costmodel.mesh import Mesh

SCHEDULES = tuple(rules.name for rules in schedule.SCHEDULES)
RECOMPUTE = ("none", "selective", "full", "first_k")
CP_KINDS = ("ring", "all_to_all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Parallelism and technique switches.

    mesh: see costmodel.mesh. zero_stage: 0 replicates everything over dp; 1 shards optimizer states, 2 also gradients, 3 also parameters, over dp_shard (x cp).
    micro_batch: sequences per data-parallel rank per forward. schedule: "none" exactly when pp == 1.
    vpp: model chunks per pipeline rank. stage_layers: layers (role "layer") of each of the pp*vpp chunks in execution order; () = as even as possible
    with the first and last chunk lighter when they carry embedding and head (planner.stages decides).
    recompute: "none", "selective" (as the engine defines it), "full" (every layer), "first_k" (the first `recompute_layers` layers of each chunk in full).
    """

    mesh: Mesh
    micro_batch: int = 1
    zero_stage: int = 0
    sequence_parallel: bool = False
    schedule: str = "none"
    vpp: int = 1
    stage_layers: tuple[int, ...] = ()
    recompute: str = "none"
    recompute_layers: int = 0
    cp_kind: str = "ring"
    flash_attention: bool = True
    compile: bool = False

    def __post_init__(self) -> None:
        for name, known in (("schedule", SCHEDULES), ("recompute", RECOMPUTE), ("cp_kind", CP_KINDS), ("zero_stage", (0, 1, 2, 3))):
            if getattr(self, name) not in known:
                text = ", ".join(map(str, known))
                raise InputError(f"{name} is {getattr(self, name)!r}", where=f"Strategy.{name}", remedy=f"use one of {text}")
        for name, least in (("micro_batch", 1), ("vpp", 1), ("zero_stage", 0), ("recompute_layers", 0)):
            require_whole(getattr(self, name), f"Strategy.{name}", least=least)
        for name in ("sequence_parallel", "flash_attention", "compile"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} is {getattr(self, name)!r}", where=f"Strategy.{name}", remedy="give True or False")
        if not isinstance(self.stage_layers, tuple):
            raise InputError(
                f"stage_layers is {self.stage_layers!r}", where="Strategy.stage_layers", remedy="give a tuple of whole numbers"
            )
        for count in self.stage_layers:
            require_whole(count, "Strategy.stage_layers", least=None)
        if (self.recompute == "first_k") != bool(self.recompute_layers):
            what = f"recompute {self.recompute} with recompute_layers {self.recompute_layers}"
            raise InputError(what, where="Strategy.recompute_layers", remedy="give at least 1 with first_k and 0 otherwise")

    def num_micro_batches(self, global_batch: int) -> int:
        """Micro-batches each data-parallel rank runs per step. Raises InputError when the batch does not divide."""
        per_pass = self.micro_batch * self.mesh.dp
        if global_batch % per_pass:
            raise InputError(
                f"global batch {global_batch} is not a multiple of micro_batch {self.micro_batch} x dp {self.mesh.dp} = {per_pass}",
                where="Strategy.micro_batch",
                remedy="change the global batch, the micro-batch or the data-parallel degree",
            )
        return global_batch // per_pass
