"""Placements: tensor parallelism (and sequence parallelism) from Plan.layouts, through torch's parallelize_module.

    column     linear split over its output features           embedding split over its features
    row        linear split over its input features
    vocab      embedding split over the vocabulary; a head linear split over the vocabulary, whose logits stay split (a DTensor) for the loss
    replicate  whole on every rank

Inside a block, a column linear's parent (or the linear itself when the block is its parent) is a region that `styles.EnterRegion` enters, and a row
linear leaves. Outside the blocks every tensor is whole, but for the logits. Under sequence parallelism the first block's input is split over the
sequence and the last block's output gathered; see passes.styles.

Two things fail silently in torch and are errors here: a layout that matches nothing, and a module whose bytes did not shrink.
"""

from __future__ import annotations

import re
from collections import defaultdict

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from costmodel.errors import InputError
from passes.chain import ModelPart, block_of
from passes.recompute import is_wrapped
from passes.selfcheck import one_block_of_each_class, watch_blocks
from passes.split import Stub
from passes.styles import EnterRegion, EnterSequenceShard, InsideRegion, LeaveSequenceShard, OnSequenceShard, WholeInput, local_bytes
from planner.plan import Plan

STYLES = ("column", "row", "vocab", "replicate")


def resolve_layouts(model: nn.Module, layouts: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Module path -> style for the whole model; `*` in a pattern stands for an index. The first pattern that matches a path wins.

    Raises InputError on an unknown style and on a pattern that matches no module.
    """
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    found: dict[str, str] = {}
    for pattern, style in layouts:
        if style not in STYLES:
            raise InputError(f"layout of {pattern!r} is {style!r}", where="Plan.layouts", remedy=f"use one of {', '.join(STYLES)}")
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        matches = [path for path in paths if expression.fullmatch(path)]
        if not matches:
            raise InputError(
                f"layout {pattern!r} matches no module of {type(model).__name__}",
                where="Plan.layouts",
                remedy="run the plan with the model it was made for",
            )
        for path in matches:
            found.setdefault(path, style)
    return found


def place_tensors(chunk: ModelPart, plan: Plan, mesh: DeviceMesh, layouts: dict[str, str]) -> str:
    """Shard the chunk's modules over the tensor-parallel `mesh`; returns what was done. Raises InputError before changing anything."""
    held = held_layouts(chunk, layouts)
    sharded = plan.strategy.sequence_parallel
    styles = _styles(chunk, held, sharded=sharded)
    _check(chunk, held, mesh.size(), sharded=sharded)
    shared = _shared_parameters(chunk.module)
    whole = one_block_of_each_class(chunk)
    for path, modules_styles in styles.items():
        for style in modules_styles:
            parallelize_module(chunk.module.get_submodule(path), mesh, style, src_data_rank=None)
    _tie(chunk.module, shared)
    watch_blocks(chunk, whole, mesh, sharded=sharded)
    local, total = local_bytes(chunk.module)
    return f"{len(styles)} modules placed, {total} parameter bytes became {local} per rank"


def held_layouts(chunk: ModelPart, layouts: dict[str, str]) -> dict[str, str]:
    """The layouts of modules that the chunk holds."""
    modules = dict(chunk.module.named_modules(remove_duplicate=False))
    return {path: style for path, style in layouts.items() if path in modules and not isinstance(modules[path], Stub)}


def verify_placements(chunk: ModelPart, mesh: DeviceMesh, layouts: dict[str, str]) -> None:
    """Raise InputError unless every split module holds 1/tp of its weight."""
    for path, style in held_layouts(chunk, layouts).items():
        if style == "replicate":
            continue
        weight = chunk.module.get_submodule(path).weight
        local, whole = local_bytes(chunk.module.get_submodule(path))
        if not isinstance(weight, DTensor) or not weight.placements[0].is_shard() or local >= whole:
            raise InputError(
                f"{path} is {style} but holds {local} of {whole} bytes on a rank of tp = {mesh.size()}",
                where="passes.placements",
                remedy="report this model",
            )


def _styles(chunk: ModelPart, held: dict[str, str], *, sharded: bool) -> dict[str, list[ParallelStyle]]:
    styles: dict[str, list[ParallelStyle]] = defaultdict(list)
    regions = _regions(chunk, held)
    if sharded and chunk.holds_first_block:
        styles[chunk.blocks[0]].append(EnterSequenceShard())
    for region in regions:
        if region not in held:
            styles[region].append(EnterRegion(sharded=sharded))
    for path, style in held.items():
        module = chunk.module.get_submodule(path)
        if block_of(path, chunk.blocks) is None:
            if style != "replicate":
                styles[path].append(_outside_style(path, style, module))
        elif style == "replicate":
            inside = any(path.startswith(region + ".") for region in regions)
            if inside:
                styles[path].append(InsideRegion())
            elif sharded:
                styles[path].append(OnSequenceShard())
        else:
            styles[path] += _block_style(path, style, module, inline=path in regions, sharded=sharded)
    if sharded and chunk.holds_last_block:
        styles[chunk.blocks[-1]].append(LeaveSequenceShard())
    return styles


def _regions(chunk: ModelPart, held: dict[str, str]) -> set[str]:
    """Modules that are entered with the whole hidden state: parents of column linears, or the linears themselves when the block is the parent."""
    regions = set()
    for path, style in held.items():
        block = block_of(path, chunk.blocks)
        if block is not None and style == "column":
            parent = path.rpartition(".")[0]
            regions.add(path if parent == block else parent)
    return regions


def _outside_style(path: str, style: str, module: nn.Module) -> ParallelStyle:
    if isinstance(module, nn.Embedding):
        return RowwiseParallel(input_layouts=Replicate()) if style == "vocab" else ColwiseParallel(output_layouts=Replicate())
    _need_linear(path, style, module)
    if style == "vocab":
        return ColwiseParallel(use_local_output=False)
    return RowwiseParallel(input_layouts=Replicate()) if style == "row" else ColwiseParallel(output_layouts=Replicate())


def _block_style(path: str, style: str, module: nn.Module, *, inline: bool, sharded: bool) -> list[ParallelStyle]:
    _need_linear(path, style, module)
    if style == "row":
        return [RowwiseParallel(output_layouts=Shard(1) if sharded else Replicate())]
    if style != "column":
        raise InputError(f"{path} is inside a block and has layout {style!r}", where="Plan.layouts", remedy="use column, row or replicate")
    if inline:
        return [ColwiseParallel(input_layouts=Shard(1) if sharded else Replicate())]
    return [WholeInput(path), ColwiseParallel()] if sharded else [ColwiseParallel()]


def _need_linear(path: str, style: str, module: nn.Module) -> None:
    if not isinstance(module, nn.Linear):
        raise InputError(
            f"{path} is a {type(module).__name__} with layout {style!r}; torch shards nn.Linear and nn.Embedding only",
            where="Plan.layouts",
            remedy="plan with tp = 1, or replace the module by nn.Linear",
        )


def _check(chunk: ModelPart, held: dict[str, str], degree: int, *, sharded: bool) -> None:
    """Raise InputError on what would be uneven, wrong or already wrapped."""
    for path in chunk.blocks:
        if is_wrapped(chunk.module.get_submodule(path)):
            raise InputError(f"{path} already recomputes", where="passes.placements", remedy="place tensors before recompute")
    for path, style in held.items():
        module = chunk.module.get_submodule(path)
        in_block = block_of(path, chunk.blocks) is not None
        size = {"column": "out_features", "row": "in_features"}.get(style, "") if isinstance(module, nn.Linear) else ""
        if in_block and size and getattr(module, size) % degree:
            raise InputError(
                f"{size} {getattr(module, size)} of {path} is not a multiple of tp {degree}",
                where="Plan.layouts",
                remedy="plan with a tp that divides it",
            )
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise InputError(f"{path} is already sharded", where="passes.placements", remedy="apply a plan to a fresh model")
    _check_covered(chunk, held, sharded=sharded)


def _check_covered(chunk: ModelPart, held: dict[str, str], *, sharded: bool) -> None:
    """A parameter without layout would get a gradient of this rank's part only: inside a region always, in a block under sequence parallelism."""
    regions = _regions(chunk, held)
    for name in chunk.parameter_names():
        owner = name.rpartition(".")[0]
        block = block_of(name, chunk.blocks)
        covered = any(owner == path or owner.startswith(path + ".") for path in held)
        if block is None or covered or not (sharded or any(name.startswith(region + ".") for region in regions)):
            continue
        raise InputError(
            f"parameter {name!r} is used on a part of the data but has no layout, so its gradient would be wrong",
            where="Plan.layouts",
            remedy="give its module a layout, or plan with tp = 1",
        )
    for path, style in held.items():
        block = block_of(path, chunk.blocks)
        inline = [region for region in regions if region in held and region.rpartition(".")[0] == block]
        if style == "replicate" and inline and path.rpartition(".")[0] == block:
            width, module = chunk.module.get_submodule(inline[0]).in_features, chunk.module.get_submodule(path)
            if any(parameter.ndim == 1 and parameter.numel() != width for parameter in module.parameters()):
                raise InputError(
                    f"{path} is not as wide as the hidden state ({width}), so it may run on this rank's heads only",
                    where="passes.placements",
                    remedy="put the attention into a module of its own, or plan with tp = 1",
                )


def _shared_parameters(module: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [group for group in names.values() if len(group) > 1]


def _tie(module: nn.Module, groups: list[list[str]]) -> None:
    """parallelize_module makes a new parameter for each module; make shared ones shared again. A name that no placed module owns takes the placed one."""
    for names in groups:
        parameters = {name: module.get_parameter(name) for name in names}
        placed = {name: parameter for name, parameter in parameters.items() if isinstance(parameter, DTensor)}
        first = next(iter(placed or parameters))
        kept = parameters[first]
        for name, other in parameters.items():
            if name in placed and placed[name].placements != placed[first].placements:
                raise InputError(
                    f"{first} and {name} are one parameter but are placed differently ({placed[first].placements}, {placed[name].placements})",
                    where="Plan.layouts",
                    remedy="give both the layout vocab",
                )
            if other is not kept:
                owner, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(owner), leaf, kept)
