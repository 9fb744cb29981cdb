"""Exporters: a plan as the files of the launcher that will run it, with an honest list of what that launcher cannot carry.

    exported = export(plan, "megatron")
    write_exported(exported, "out/megatron")

docs/export.md has the mapping of every plan field and the losses per launcher. The text is a function of the plan alone.
"""

from __future__ import annotations

from costmodel.errors import InputError
from planner.export.megatron import export_megatron
from planner.export.result import Exported, Loss, write_exported
from planner.export.torchrun import export_torchrun
from planner.export.torchtitan import export_torchtitan
from planner.plan import Plan

TARGETS = ("torchrun", "torchtitan", "megatron")

__all__ = ["TARGETS", "Exported", "Loss", "export", "write_exported"]


def export(plan: Plan, target: str) -> Exported:
    """`plan` as files for `target` (one of TARGETS). Raises InputError when the launcher cannot run it at all; what it can run differently is a Loss."""
    exporters = {"torchrun": export_torchrun, "torchtitan": export_torchtitan, "megatron": export_megatron}
    if target not in exporters:
        raise InputError(f"unknown export target {target!r}", where="export", remedy=f"use one of {', '.join(TARGETS)}")
    return exporters[target](plan)
