"""Where the blocks of a model are: the paths that a plan's stages name, and the part of the model that one pipeline stage holds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from costmodel.errors import InputError
from planner.plan import Plan, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """One pipeline stage's part of the model.

    module: the model with its own forward and its original parameter names; what the stage does not own is stubbed (see passes.split).
    blocks: paths of the owned blocks in execution order. all_blocks: those of the whole model.
    """

    module: nn.Module
    stage: Stage
    blocks: tuple[str, ...]
    all_blocks: tuple[str, ...]

    @property
    def holds_first_block(self) -> bool:
        """Whether the chunk starts the chain of blocks."""
        return bool(self.blocks) and self.blocks[0] == self.all_blocks[0]

    @property
    def holds_last_block(self) -> bool:
        """Whether the chunk ends the chain of blocks."""
        return bool(self.blocks) and self.blocks[-1] == self.all_blocks[-1]

    def parameter_names(self) -> tuple[str, ...]:
        """Names of the chunk's parameters, shared ones under each of their names."""
        return tuple(name for name, _ in self.module.named_parameters(remove_duplicate=False))


def is_block_path(path: str) -> bool:
    """Whether `path` names an element of a list of blocks: its last part is an index."""
    return path.rpartition(".")[2].isdigit() and "." in path


def block_paths(model: nn.Module, plan: Plan) -> tuple[str, ...]:
    """Paths of all blocks in execution order, as the plan's stages name them.

    Raises InputError when the plan names a block that the model does not have, or the model has blocks beside the named ones in the same list.
    """
    paths = tuple(path for stage in plan.stages for path in stage.layer_paths if is_block_path(path))
    modules = dict(model.named_modules(remove_duplicate=False))
    missing = [path for path in paths if path not in modules]
    if missing:
        raise InputError(
            f"the plan names {len(missing)} blocks that {type(model).__name__} does not have, first {missing[0]!r}",
            where="Plan.stages",
            remedy="run the plan with the model it was made for",
        )
    if len(set(paths)) != len(paths):
        raise InputError("a block is in two stages", where="Plan.stages", remedy="make the plan again")
    for parent in {path.rpartition(".")[0] for path in paths}:
        held = {f"{parent}.{name}" for name, _ in modules[parent].named_children()}
        extra = sorted(held - set(paths))
        if extra:
            raise InputError(
                f"the model has block {extra[0]!r}, which no stage of the plan holds",
                where="Plan.stages",
                remedy="run the plan with the model it was made for",
            )
    return paths


def block_of(path: str, blocks: tuple[str, ...]) -> str | None:
    """The block that contains module or parameter `path`, or None when it is outside all blocks."""
    for block in blocks:
        if path == block or path.startswith(block + "."):
            return block
    return None
