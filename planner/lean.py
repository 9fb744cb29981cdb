"""Lean layers: what Megatron-core's layer code keeps less than the straightforward module, tensor by tensor.

- Latent attention splits keys and values out of one projection and makes the values contiguous: the projection's result is free
  (megatron-core transformer/multi_latent_attention.py).
- The router's matmul casts its input inside and keeps it as it came (transformer/moe/moe_utils.py, RouterGatingLinearFunction).
- A token's weight multiplies the activation between the two expert matmuls, in the activation's own kernel, since (p a) W = p (a W): the second
  matmul's result is not needed for backward (fusions/fused_bias_swiglu.py, weighted_bias_swiglu).
"""

from __future__ import annotations

from dataclasses import replace

from planner.graph import Block, Node, Tensor


def lean(block: Block) -> Block:
    """A fused `block` with the three rules applied; blocks without latent attention or experts come back as they are."""
    return _weighted_early(_router_input(_values_apart(block)))


def _values_apart(block: Block) -> Block:
    tensors = {tensor.tensor_id: tensor for tensor in block.tensors}
    nodes: list[Node] = []
    copies: dict[str, str] = {}
    for node in block.nodes:
        if node.op == "attention" and node.phase == "forward" and len(set(node.inputs)) == len(node.inputs) >= 3:
            value = node.inputs[2]
            loop = {item.name: item.size for item in node.loops}
            width = loop["batch"] * loop["kv_heads"] * loop["kv"] * loop["v_dim"]
            shape = tensors[value].shape
            if tensors[value].kind == "activation" and tensors[value].num_elements > width and value in block.saved:
                copies[value] = name = f"{node.node_id}/value"
                last = shape[-1] * width // tensors[value].num_elements
                tensors[name] = replace(tensors[value], tensor_id=name, shape=(*shape[:-1], last))
                nodes.append(Node(node_id=f"{name}/copy", op="copy", phase="forward", inputs=(value,), outputs=(name,), module=node.module))
        if node.op == "attention":
            node = replace(node, inputs=tuple(copies.get(name, name) for name in node.inputs))
        nodes.append(node)
    return _rebuilt(block, nodes, tensors, copies)


def _router_input(block: Block) -> Block:
    tensors = {tensor.tensor_id: tensor for tensor in block.tensors}
    saved = set(block.saved)
    narrow: dict[str, str] = {}
    for node in block.nodes:
        if node.phase == "forward":
            for wide in node.outputs:
                like = _same_in_compute_dtype(wide, node, tensors, saved)
                if like and wide in saved and all(other.op == "gemm" for other in block.nodes if wide in other.inputs):
                    narrow[wide] = like
    nodes = [
        replace(
            node,
            inputs=tuple(dict.fromkeys(narrow.get(name, name) for name in node.inputs)),
            outputs=tuple(name for name in node.outputs if name not in narrow),
        )
        for node in block.nodes
    ]
    return _rebuilt(block, nodes, tensors, narrow)


def _same_in_compute_dtype(wide: str, node: Node, tensors: dict[str, Tensor], saved: set[str]) -> str:
    """The tensor that `node` reads or writes beside `wide` with the same elements in the compute dtype, kept anyway; "" when there is none."""
    if tensors[wide].dtype != "fp32" or len(tensors[wide].shape) < 2:
        return ""
    size = tensors[wide].num_elements
    found = [n for n in (*node.outputs, *node.inputs) if n in saved and tensors[n].dtype == "compute" and tensors[n].num_elements == size]
    return found[-1] if len(node.outputs) == 1 and found else found[0] if len(found) == 1 else _normed(node, found)


def _normed(node: Node, found: list[str]) -> str:
    """Of several candidates the last result of the kernel (a norm's output comes after the sum it normalises)."""
    made = [name for name in node.outputs if name in found]
    return made[-1] if made else ""


def _weighted_early(block: Block) -> Block:
    makers = {name: node for node in block.nodes for name in node.outputs}
    for late in block.nodes:
        product = next((name for name in late.inputs if name in makers and makers[name].op == "grouped_gemm"), "")
        if late.phase != "forward" or late.op != "elementwise" or len(late.inputs) != 2 or product not in block.saved:
            continue
        share = next(name for name in late.inputs if name != product)
        inner = makers[product].inputs[0]
        found = _reverse(block, product, share, inner)
        if found is None:
            continue
        reverse, leaving, share_gradient = found
        arriving = next(name for name in reverse.inputs if name not in (product, share))
        renamed = {late.outputs[0]: product, arriving: leaving}
        nodes = []
        for node in block.nodes:
            if node is late or node is reverse:
                continue
            if inner in node.outputs:
                node = replace(node, inputs=(*node.inputs, share))
            if f"{inner}.grad" in node.inputs and node.phase == "backward":
                node = replace(node, inputs=(*node.inputs, share), outputs=(*node.outputs, share_gradient))
            inputs, outputs = (tuple(renamed.get(name, name) for name in names) for names in (node.inputs, node.outputs))
            nodes.append(replace(node, inputs=inputs, outputs=outputs))
        return replace(block, nodes=tuple(nodes), saved=tuple(name for name in block.saved if name != product))
    return block


def _reverse(block: Block, product: str, share: str, inner: str) -> tuple[Node, str, str] | None:
    """The kernel that differentiates product x share, its gradient of the product, and of the share.

    None when the kernel does more than that, or no kernel reads the gradient of `inner`: the block then keeps what it keeps.
    """
    readers = [node for node in block.nodes if node.phase == "backward" and product in node.inputs and share in node.inputs]
    moved = any(node.phase == "backward" and f"{inner}.grad" in node.inputs for node in block.nodes)
    if len(readers) != 1 or len(readers[0].outputs) != 2 or not moved:
        return None
    elements = {tensor.tensor_id: tensor.num_elements for tensor in block.tensors}
    leaving, share_gradient = sorted(readers[0].outputs, key=lambda name: -elements[name])
    return readers[0], leaving, share_gradient


def _rebuilt(block: Block, nodes: list[Node], tensors: dict[str, Tensor], renamed: dict[str, str]) -> Block:
    saved = tuple(dict.fromkeys(renamed.get(name, name) for name in block.saved))
    return replace(block, nodes=tuple(nodes), tensors=tuple(tensors.values()), saved=saved) if renamed else block
