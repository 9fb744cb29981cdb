"""The passes in the order in which they run. Each is checked before it changes anything and verified after, and logs what it did.

    split       the stages of this pipeline rank (pp > 1)
    placements  tensor and sequence parallelism (tp > 1)
    recompute   activation checkpointing

The runtime then shards or replicates the result over data-parallel ranks (fully_shard, DistributedDataParallel) and builds pipeline stages. The order is a
matter of correctness: placements after recompute would silently not be applied, and fully_shard must see the final parameters.
"""

from __future__ import annotations

import logging

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from costmodel.errors import InputError
from passes import placements, recompute
from passes.chain import ModelPart, block_paths
from passes.placements import resolve_layouts
from passes.split import Inbox, split_model
from planner.plan import Plan

SEQUENCE = ("split", "placements", "recompute")

_log = logging.getLogger(__name__)


def rewrite(plan: Plan, model: nn.Module, *, rank_index: int = 0, tensor_mesh: DeviceMesh | None = None) -> list[tuple[ModelPart, Inbox]]:
    """The chunks of `model` that pipeline rank `rank_index` runs, rewritten as `plan` says. Consumes `model`.

    tensor_mesh: the tp axis of the device mesh, needed when tp > 1.
    Raises InputError when the model is not the plan's, or a pass cannot do what the plan says; nothing is ignored.
    """
    blocks = block_paths(model, plan)
    layouts = resolve_layouts(model, plan.layouts)
    chunks = _split(plan, model, rank_index, blocks)
    for chunk, _ in chunks:
        names = chunk.parameter_names()
        if plan.strategy.mesh.tp > 1:
            _place(plan, chunk, tensor_mesh, layouts)
            _same_names("placements", names, chunk)
        if plan.strategy.recompute != "none":
            _log.info("recompute: stage %d: %s", chunk.stage.stage_index, recompute.wrap_blocks(chunk, plan))
            _same_names("recompute", names, chunk)
        recompute.verify_recompute(chunk, plan)
    return chunks


def _split(plan: Plan, model: nn.Module, rank_index: int, blocks: tuple[str, ...]) -> list[tuple[ModelPart, Inbox]]:
    if plan.strategy.mesh.pp == 1:
        return [(ModelPart(module=model, stage=plan.stages[0], blocks=blocks, all_blocks=blocks), Inbox())]
    chunks = split_model(model, plan, [stage for stage in plan.stages if stage.rank_index == rank_index], blocks)
    for chunk, _ in chunks:
        _log.info("split: stage %d of %d holds %d of %d blocks", chunk.stage.stage_index, len(plan.stages), len(chunk.blocks), len(blocks))
    return chunks


def _place(plan: Plan, chunk: ModelPart, tensor_mesh: DeviceMesh | None, layouts: dict[str, str]) -> None:
    if tensor_mesh is None or not any(style != "replicate" for style in layouts.values()):
        raise InputError(
            f"tp is {plan.strategy.mesh.tp} but no module has a layout that splits it",
            where="Plan.layouts",
            remedy="make the plan again for this model, or use tp = 1",
        )
    detail = placements.place_tensors(chunk, plan, tensor_mesh, layouts)
    placements.verify_placements(chunk, tensor_mesh, layouts)
    _log.info("placements: stage %d: %s", chunk.stage.stage_index, detail)


def _same_names(name: str, before: tuple[str, ...], chunk: ModelPart) -> None:
    if chunk.parameter_names() != before:
        raise InputError(f"pass {name} changed parameter names", where=f"passes.{name}", remedy="report this model")
