"""Split: one pipeline stage out of any module with one chain of blocks, keeping the user's own forward.

Every stage runs the model's forward on the micro-batch's original inputs, with what it does not own stubbed:

    modules with parameters before the blocks  -> `Zeros`: zeros of the right shape and no memory, so that masks and positions come out as ever
    blocks of earlier stages                   -> `Received`: give what arrived from the stage before
    blocks of later stages                     -> `Leave`: end the forward with the hidden state they were given
    modules with parameters after the blocks   -> never reached on a stage that leaves; `Leave` guards them

"Before" and "after" follow the order of registration; a model that runs them in another order is caught when it does. Parameter names stay those of
the whole model. The parameters of stubbed modules are let go.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from costmodel.errors import InputError
from passes.chain import ModelPart, block_of, is_block_path
from planner.plan import Plan, Stage


class EndOfStageError(Exception):
    """Carries the hidden state out of the forward of a stage that is not the last. Internal to passes.split and runtime.pipeline."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("end of stage")
        self.hidden = hidden


class Inbox:
    """What a stage received for the micro-batch it is running, and the output structure of a block (learned once)."""

    def __init__(self) -> None:
        self.hidden: Tensor | None = None
        self.entered = False
        self.structure: tuple[list[Any], pytree.TreeSpec] | None = None

    def put(self, hidden: Tensor) -> None:
        """Store the hidden state of the next forward."""
        self.hidden, self.entered = hidden, False


class Stub(nn.Module):
    """Stands in for a module that another stage owns. Attributes not found here are those of the original (on the meta device)."""

    def __init__(self, path: str, original: nn.Module, inbox: Inbox) -> None:
        super().__init__()
        self.path, self.inbox, self.original = path, inbox, (_on_meta(original),)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["original"][0], name)


class Zeros(Stub):
    """Zeros of the original's output shape, stride 0: they cost no memory and only give shape, dtype and device."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Zeros shaped as the original's output."""
        if self.inbox.entered:
            raise InputError(
                f"{self.path} is registered before the blocks but runs after them, on a stage that does not hold it",
                where="passes.split",
                remedy="register it after the blocks, or use pp = 1",
            )
        device = next(leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        outputs = _run_on_meta(self.original[0], args, kwargs)
        return pytree.tree_map_only(Tensor, lambda leaf: torch.zeros((), dtype=leaf.dtype, device=device).expand(leaf.shape), outputs)


class Received(Stub):
    """An earlier stage's block: gives the received hidden state in the structure that the block's output has."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The received hidden state; further outputs of the block, if any, are None."""
        self.inbox.entered = True
        if self.inbox.structure is None:
            leaves, spec = pytree.tree_flatten(_run_on_meta(*_halved(self.original[0], args, kwargs)))
            self.inbox.structure = [None for _ in leaves], spec
        leaves, spec = self.inbox.structure
        return pytree.tree_unflatten([self.inbox.hidden, *leaves[1:]], spec)


class Leave(Stub):
    """A later stage's block: ends the forward with the hidden state it was given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises EndOfStageError."""
        if not is_block_path(self.path):
            raise InputError(
                f"{self.path} is registered after the blocks but runs before them, on a stage that does not hold it",
                where="passes.split",
                remedy="register it before the blocks, or use pp = 1",
            )
        raise EndOfStageError(args[0] if args else kwargs["hidden_states"])


def split_model(model: nn.Module, plan: Plan, stages: Iterable[Stage], blocks: tuple[str, ...]) -> list[tuple[ModelPart, Inbox]]:
    """The chunks of `stages` (those of one pipeline rank). Consumes `model`: it becomes the last chunk, and what no chunk owns is freed.

    Raises InputError when the model is not one chain of blocks, or owns parameters beside the chain that no stage can claim.
    """
    _check_chain(model, blocks)
    stages = list(stages)
    names = tuple(name for name, _ in model.named_parameters(remove_duplicate=False))
    sides = outside_modules(model, blocks)
    modules = [structural_copy(model) for _ in stages[1:]] + [model]
    result = []
    for stage, module in zip(stages, modules, strict=True):
        own = tuple(path for path in stage.layer_paths if is_block_path(path))
        chunk, inbox = ModelPart(module=module, stage=stage, blocks=own, all_blocks=blocks), Inbox()
        _check_consecutive(chunk)
        _stub(chunk, sides, inbox)
        _verify(chunk, sides, names)
        result.append((chunk, inbox))
    return result


def structural_copy(module: nn.Module) -> nn.Module:
    """A copy of the module tree that shares every parameter and buffer."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, memo)


def outside_modules(model: nn.Module, blocks: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Paths of modules that own parameters outside the blocks: (registered before the chain, registered after it)."""
    before: list[str] = []
    after: list[str] = []
    seen = False
    for path, module in model.named_modules(remove_duplicate=False):
        seen = seen or path == blocks[0]
        if block_of(path, blocks) is None and module._parameters and any(item is not None for item in module._parameters.values()):
            (after if seen else before).append(path)
    return tuple(before), tuple(after)


def _check_consecutive(chunk: ModelPart) -> None:
    start = chunk.all_blocks.index(chunk.blocks[0]) if chunk.blocks else 0
    if not chunk.blocks or chunk.blocks != chunk.all_blocks[start : start + len(chunk.blocks)]:
        raise InputError(
            f"stage {chunk.stage.stage_index} holds {len(chunk.blocks)} blocks that are not a run of the model's blocks",
            where="Plan.stages",
            remedy="give every stage at least one block, in order",
        )


def _verify(chunk: ModelPart, sides: tuple[tuple[str, ...], tuple[str, ...]], names: tuple[str, ...]) -> None:
    before, after = sides
    outside = {*(before if chunk.holds_first_block else ()), *(after if chunk.holds_last_block else ())}
    expected = {name for name in names if block_of(name, chunk.blocks) or name.rpartition(".")[0] in outside}
    held = set(chunk.parameter_names())
    if held != expected:
        raise InputError(
            f"stage {chunk.stage.stage_index} holds other parameters than it owns: {sorted(held ^ expected)[:3]}",
            where="passes.split",
            remedy="use pp = 1 for this model",
        )


def _stub(chunk: ModelPart, sides: tuple[tuple[str, ...], tuple[str, ...]], inbox: Inbox) -> None:
    model, blocks = chunk.module, chunk.all_blocks
    before, after = sides
    first, last = blocks.index(chunk.blocks[0]), blocks.index(chunk.blocks[-1])
    replaced: list[tuple[str, type[Stub]]] = [(path, Received) for path in blocks[:first]] + [(path, Leave) for path in blocks[last + 1 :]]
    if first:
        replaced += [(path, Zeros) for path in before]
    if last + 1 < len(blocks):
        replaced += [(path, Leave) for path in after]
    for path, kind in replaced:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, kind(path, model.get_submodule(path), inbox))


def _check_chain(model: nn.Module, blocks: tuple[str, ...]) -> None:
    parents = {path.rpartition(".")[0] for path in blocks}
    if len(parents) != 1:
        raise InputError(
            f"the blocks are in {len(parents)} lists ({', '.join(sorted(parents)) or 'none'})",
            where="Plan.stages",
            remedy="pipeline stages need one chain of blocks: use pp = 1",
        )
    ancestors = {""}
    for part in blocks[0].split(".")[:-1]:
        ancestors.add(f"{max(ancestors, key=len)}.{part}".lstrip("."))
    for path in sorted(ancestors):
        direct = [name for name, parameter in model.get_submodule(path)._parameters.items() if parameter is not None]
        if direct:
            raise InputError(
                f"parameter {f'{path}.{direct[0]}'.lstrip('.')!r} sits beside the chain of blocks, so no stage can claim it",
                where="passes.split",
                remedy="move it into a module of its own, or use pp = 1",
            )


def _on_meta(module: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {id(item): nn.Parameter(item.to("meta"), item.requires_grad) for item in module.parameters()}
    memo |= {id(item): item.to("meta") for item in module.buffers()}
    return copy.deepcopy(module, memo)


def _run_on_meta(module: nn.Module, args: Any, kwargs: Any) -> Any:
    args, kwargs = pytree.tree_map_only(Tensor, lambda leaf: leaf.to("meta"), (args, kwargs))
    with torch.no_grad():
        return module(*args, **kwargs)


def _halved(module: nn.Module, args: Any, kwargs: Any) -> tuple[nn.Module, Any, Any]:
    """Meta module and arguments in bf16, for a run of which only the structure matters: some operators (grouped matmuls) know no other dtype there."""
    args, kwargs = pytree.tree_map_only(Tensor, lambda leaf: leaf.bfloat16() if leaf.is_floating_point() else leaf, (args, kwargs))
    return copy.deepcopy(module).bfloat16(), args, kwargs
