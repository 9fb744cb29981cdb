"""Recompute: which tensors of a block stay alive until its backward, and which forward kernels run again before it.

    none        keep what autograd (after fusion) keeps
    selective   "core_attention" (Megatron): drop everything of batch x heads x q x kv elements, the scores; with flash attention there are
                none, so nothing is dropped
                "keep_matmuls" (torch selective checkpointing): keep block inputs and the outputs of matmuls and attention that are needed, drop the rest
                "keep_every_other_matmul" (torchtitan's stock policy): the same, but the second, fourth, ... matmul runs again
    full        keep the block's inputs only; the whole forward runs again, its communication included
    (a, b, ...) a tuple of tensors: keep these, and the block's inputs that something reads later (planner.residency chooses such sets)

What runs again is the closure of what backward reads through the dataflow, up to kept tensors. Full recompute repeats the whole forward (Megatron's
CheckpointFunction, and torch's non-reentrant checkpoint with early_stop=False), or, where the engine stops early, everything up to the last kernel
whose output backward reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.graph import Block, Node

_MATMULS = frozenset({"gemm", "grouped_gemm", "conv", "attention"})
Policy = str | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """`kept`: tensors alive from forward to backward. `again`: forward nodes that run before backward, in order."""

    kept: tuple[str, ...]
    again: tuple[Node, ...]


def residency(block: Block, policy: Policy, *, selective: str = "keep_matmuls", stops_early: bool = False) -> Residency:
    """What `block` keeps and repeats under `policy` (none, selective, full, or the tensors to keep), `selective` being the engine's meaning of the word."""
    if policy == "none":
        return Residency(kept=block.saved, again=())
    forward = tuple(node for node in block.nodes if node.phase == "forward")
    needed = needed_by_backward(block)
    if isinstance(policy, tuple):
        again = _closure(forward, needed, set(policy), block)
        later = (*again, *(node for node in block.nodes if node.phase == "backward"))
        read = {name for node in later for name in node.inputs}
        entering = [name for name in kept_inputs(block) if name in read]
        return Residency(kept=tuple(dict.fromkeys((*entering, *policy))), again=again)
    if policy == "full":
        kept = kept_inputs(block)
        last = max((index for index, node in enumerate(forward) if not needed.isdisjoint(node.outputs)), default=-1)
        return Residency(kept=kept, again=forward[: last + 1] if stops_early else forward)
    if selective == "core_attention":
        scores = _scores(block)
        kept = tuple(name for name in block.saved if name not in scores)
        return Residency(kept=kept, again=_closure(forward, needed, set(kept), block))
    matmuls = [node for node in forward if node.op in _MATMULS and node.op != "attention"]
    dropped = {node.node_id for node in matmuls[1::2]} if selective == "keep_every_other_matmul" else set()
    matmul_outputs = {name for node in forward if node.op in _MATMULS and node.node_id not in dropped for name in node.outputs}
    inputs = set(kept_inputs(block))
    again = _closure(forward, needed, matmul_outputs | inputs, block)
    read = needed | {name for node in again for name in node.inputs}
    made = dict.fromkeys((*block.inputs, *(name for node in forward for name in node.outputs)))
    return Residency(kept=tuple(name for name in made if name in read and (name in matmul_outputs or name in inputs)), again=again)


def needed_by_backward(block: Block) -> set[str]:
    """Forward tensors that backward kernels read."""
    made = {name for node in block.nodes if node.phase == "forward" for name in node.outputs}
    return {name for node in block.nodes if node.phase == "backward" for name in node.inputs if name in made}


def kept_inputs(block: Block) -> tuple[str, ...]:
    """Inputs that must outlive forward: those autograd saves, and the hidden state (an input shaped like an output)."""
    tensors = {tensor.tensor_id: tensor for tensor in block.tensors}
    shapes = {(tensors[name].shape, tensors[name].dtype) for name in block.outputs}
    return tuple(name for name in block.inputs if name in block.saved or (tensors[name].shape, tensors[name].dtype) in shapes)


def _scores(block: Block) -> set[str]:
    """Tensors of batch x heads x q x kv elements that attention without a flash kernel makes (see planner.attention)."""
    return {name for node in block.nodes if node.role == "core_attention" for name in node.outputs}


def _closure(forward: tuple[Node, ...], needed: set[str], kept: set[str], block: Block) -> tuple[Node, ...]:
    """Forward nodes that must run again so that everything in `needed` exists, given `kept`."""
    wanted = needed - kept
    again: list[Node] = []
    for node in reversed(forward):
        if not wanted.isdisjoint(node.outputs):
            again.append(node)
            wanted |= {name for name in node.inputs if name not in kept and name not in block.inputs}
    return tuple(reversed(again))
