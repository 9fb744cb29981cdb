"""Probabilities: a cross entropy that keeps them in fp32 for backward instead of the logits.

Megatron-LM (core/tensor_parallel/cross_entropy.py and its fused form), nanotron and their forks turn the logits into fp32, exponentiate and normalise in
place and keep the result; the logits in the compute dtype are free once the loss exists. In backward the gradient of the logits is written beside the
probabilities: with u bytes of logits in a 2-byte dtype, forward and backward both peak at 3 u.
"""

from __future__ import annotations

from dataclasses import replace

from planner.graph import Block


def keep_probabilities(block: Block) -> Block:
    """`block` with the logits that cross-entropy kernels keep replaced by fp32 tensors of the same shape; other blocks unchanged."""
    tensors = {tensor.tensor_id: tensor for tensor in block.tensors}
    made: dict[str, str] = {}
    nodes = []
    for node in block.nodes:
        if node.op == "cross_entropy":
            logits = [
                name for name in node.inputs if name in block.saved and tensors[name].dtype == "compute" and "vocab" in tensors[name].axes
            ]
            for name in logits:
                made[name] = f"{name}/probabilities"
                tensors[made[name]] = replace(tensors[name], tensor_id=made[name], dtype="fp32", kind="activation")
            if node.phase == "forward":
                node = replace(node, outputs=(*node.outputs, *(made[name] for name in logits)))
            else:
                node = replace(node, inputs=tuple(made.get(name, name) for name in node.inputs))
        nodes.append(node)
    saved = tuple(made.get(name, name) for name in block.saved)
    return replace(block, nodes=tuple(nodes), tensors=tuple(tensors.values()), saved=saved)
