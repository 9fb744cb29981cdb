"""The layout that the rules of planner.graph describe, written as placements: Megatron's column and row linears with sequence parallelism.

It is one point of the space that planner.intraop.solve searches, so no solve without a memory limit is slower.
"""

from __future__ import annotations

from planner.graph import TENSOR_PARALLEL_AXES, Block, Node, Tensor
from planner.intraop.borders import borders, choices
from planner.intraop.check import LayoutPrice, price_layout
from planner.intraop.layout import REPLICATE, OpLayout, shard, shard_dim
from planner.intraop.price import Prices
from planner.intraop.rules import Rule, Tensors, rules


def rule_based(block: Block, prices: Prices, *, num_micro_batches: int = 1, state_factor: float = 1.0) -> LayoutPrice:
    """The price of the rule-based layout: tensor-parallel axes are cut, everything else along the sequence, addends only out of matmuls and sums."""
    tensors = {tensor.tensor_id: tensor for tensor in block.tensors}
    nodes = {node.node_id: node for node in block.nodes}
    ops = []
    for node in block.nodes:
        rule = max(rules(node, tensors, prices.size, nodes), key=lambda rule: _score(node, rule, tensors))
        ops.append(OpLayout(node_id=node.node_id, loop=rule.name, inputs=rule.inputs, outputs=rule.outputs))
    options = {**choices(block, prices.size, {}), **{item.owner: item.options for item in borders(block, prices.size, {}) if item.options}}
    chosen = {name: _held(tensors[name.removesuffix("@out")], places) for name, places in options.items()}
    return price_layout(block, ops, chosen, prices, num_micro_batches=num_micro_batches, state_factor=state_factor)


def _score(node: Node, rule: Rule, tensors: Tensors) -> tuple[int, int]:
    """Tensor-parallel dims cut; where there are none, dims of the sequence."""
    labels = [
        tensors[name].axes[dim]
        for name, place in zip((*node.inputs, *node.outputs), (*rule.inputs, *rule.outputs), strict=True)
        if (dim := shard_dim(place)) is not None
    ]
    return sum(label in TENSOR_PARALLEL_AXES for label in labels), sum(label in ("sequence", "tokens") for label in labels)


def _held(tensor: Tensor, places: tuple[str, ...]) -> str:
    for wanted in (TENSOR_PARALLEL_AXES, frozenset({"sequence"})):
        for dim, axis in enumerate(tensor.axes):
            if axis in wanted and shard(dim) in places:
                return shard(dim)
    return REPLICATE
