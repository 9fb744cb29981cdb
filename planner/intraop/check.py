"""The price of a layout, recomputed from its placements alone: a walk over the graph that shares nothing with the integer program but the prices.

`price_layout` also refuses a layout that no rule allows, so it is the certificate of every solve and the oracle of the tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from costmodel.errors import InputError
from planner.graph import Block, Node, Tensor
from planner.intraop.borders import aliases, borders
from planner.intraop.layout import OpLayout, Reshard
from planner.intraop.price import Prices, can_reshard, reshard_kind
from planner.intraop.rules import Rule, rules


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPrice:
    """Seconds of one micro-batch, bytes of one rank, and the reshards that the placements imply."""

    block_s: float
    memory_bytes: float
    reshards: tuple[Reshard, ...]


def price_layout(
    block: Block,
    ops: Iterable[OpLayout],
    chosen: Mapping[str, str],
    prices: Prices,
    *,
    num_micro_batches: int = 1,
    state_factor: float = 1.0,
) -> LayoutPrice:
    """The price of running the nodes of `block` as `ops` say. `chosen`: placements of what enters and of free borders (planner.intraop.borders).

    Raises InputError when a node has no such rule or a tensor cannot get where it is read.
    """
    tensors = {tensor.tensor_id: tensor for tensor in block.tensors}
    nodes = {node.node_id: node for node in block.nodes}
    owners = {**chosen, **{name: chosen[owner] for name, owner in aliases(block).items()}}
    seconds, reads = 0.0, dict[tuple[str, str, str], float]()
    for op in ops:
        node = nodes[op.node_id]
        rule = find_rule(node, op, rules(node, tensors, prices.size, nodes))
        seconds += prices.kernel_s(node, rule, tensors)
        owners.update(zip(node.outputs, op.outputs, strict=True))
        reads.update({(name, node.phase, place): 1.0 for name, place in zip(node.inputs, op.inputs, strict=True)})
    for border in borders(block, prices.size, {}):
        share = 1.0 / num_micro_batches if border.phase == "step" else 1.0
        reads.setdefault((border.tensor_id, border.phase, chosen[border.owner]), share)
    reshards = []
    for (name, phase, target), share in reads.items():
        source = owners[name]
        if not can_reshard(source, target):
            raise InputError(f"{name} is {source} and read as {target}", where=block.kind_id, remedy="choose another rule for its reader")
        if source != target:
            cost = share * prices.reshard_s(tensors[name], source, target)
            kind = reshard_kind(source, target)
            reshards.append(Reshard(tensor_id=name, phase=phase, source=source, target=target, kind=kind, reshard_s=cost))
    total = seconds + sum(item.reshard_s for item in reshards)
    return LayoutPrice(block_s=total, memory_bytes=memory_bytes(block, tensors, owners, prices, state_factor), reshards=tuple(reshards))


def find_rule(node: Node, op: OpLayout, allowed: tuple[Rule, ...]) -> Rule:
    """The rule that an OpLayout names. Raises InputError."""
    for rule in allowed:
        if (rule.name, rule.inputs, rule.outputs) == (op.loop, op.inputs, op.outputs):
            return rule
    raise InputError(f"cannot run as {op.inputs} -> {op.outputs}", where=node.node_id, remedy="use one of planner.intraop.rules")


def memory_bytes(block: Block, tensors: dict[str, Tensor], owners: Mapping[str, str], prices: Prices, state_factor: float) -> float:
    """Bytes of parameters (times `state_factor`) and of what forward keeps for backward, on one rank."""
    held = sum(state_factor * prices.num_bytes(tensor, owners[tensor.tensor_id]) for tensor in block.parameters)
    return held + sum(prices.num_bytes(tensors[name], owners[name]) for name in dict.fromkeys(block.saved) if name in owners)
