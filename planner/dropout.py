"""Dropout: graphs are made without it; a job with dropout > 0 gets it where transformers put it.

Sites: the output of every matmul that closes a branch of a layer (it contracts a tp-divided loop: attention output and second linear of
the MLP), and of the embedding. Each site is an elementwise kernel forward that also writes a mask of one byte an element, which backward
reads (Korthikanti et al. 2022: the two masks of s b h bytes of a layer). Dropout of attention probabilities is planner.attention's;
flash kernels keep a seed only.
"""

from __future__ import annotations

from dataclasses import replace

from planner.graph import Block, Node, Tensor
from planner.sums import is_partial


def add_dropout(block: Block) -> Block:
    """`block` with a dropout after every branch output and embedding."""
    tensors = {tensor.tensor_id: tensor for tensor in block.tensors}
    sites = {
        node.outputs[0]: node
        for node in block.nodes
        if node.phase == "forward"
        and (is_partial(node, tensors) or node.op == "embedding")
        and node.op != "grouped_gemm"
        and len(node.outputs) == 1
    }
    nodes: list[Node] = []
    renamed: dict[str, str] = {}
    masked: dict[str, dict[str, str]] = {node.node_id: {} for node in sites.values()}
    saved = list(block.saved)
    forward = {name for node in block.nodes if node.phase == "forward" for name in (*node.inputs, *node.outputs)}
    for node in block.nodes:
        if node.phase == "backward":
            names = masked.get(node.forward_id, {})
            if node.forward_id in masked:
                site = next(source for source, maker in sites.items() if maker.node_id == node.forward_id)
                nodes.extend(_mask_gradients(node, site, forward, tensors, names))
            nodes.append(_renamed(node, names))
            continue
        nodes.append(_renamed(node, renamed))
        if node.outputs[:1] and node.outputs[0] in sites:
            source = node.outputs[0]
            like = tensors[source]
            tensors[f"{source}/dropped"] = replace(like, tensor_id=f"{source}/dropped")
            tensors[f"{source}/mask"] = replace(like, tensor_id=f"{source}/mask", dtype="bool")
            nodes.append(_kernel(node, "dropout", "forward", (source,), (f"{source}/dropped", f"{source}/mask")))
            renamed[source] = f"{source}/dropped"
            if any(other.forward_id == node.node_id for other in block.nodes):
                saved.append(f"{source}/mask")
    outputs = tuple(renamed.get(name, name) for name in block.outputs)
    return replace(block, nodes=tuple(nodes), tensors=tuple(tensors.values()), saved=tuple(saved), outputs=outputs)


def _kernel(node: Node, what: str, phase: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Node:
    return Node(
        node_id=f"{node.node_id}/{what}",
        op="elementwise",
        phase=phase,
        inputs=inputs,
        outputs=outputs,
        forward_id=node.forward_id,
        module=node.module,
    )


def _renamed(node: Node, names: dict[str, str]) -> Node:
    return node if names.keys().isdisjoint(node.inputs) else replace(node, inputs=tuple(names.get(name, name) for name in node.inputs))


def _mask_gradients(node: Node, site: str, forward: set[str], tensors: dict[str, Tensor], names: dict[str, str]) -> list[Node]:
    """The backward kernel of a site, before the first backward kernel of its matmul: the gradient that it reads is masked. Adds to `names`."""
    made = []
    for name in node.inputs:
        like = tensors[name]
        if name in forward or name in names or like.shape != tensors[site].shape:
            continue
        result = f"{name}/masked:{node.forward_id}"
        tensors[result] = replace(like, tensor_id=result, kind="activation")
        made.append(_kernel(node, "dropout_backward", "backward", (name, f"{site}/mask"), (result,)))
        names[name] = result
    return made
