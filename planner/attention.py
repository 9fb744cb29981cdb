"""Attention without a flash kernel: the scores are made, kept and differentiated as ordinary kernels.

One `attention` node becomes a scores matmul, a softmax, with dropout a mask, and a values matmul. Backward keeps the softmax output (and
the dropout mask and the dropped probabilities) of batch x heads x q x kv elements instead of the output and the log-sum-exp: with 2-byte
activations the 5 a s^2 b bytes of Korthikanti et al. 2022 (arXiv:2205.05198, eq. 1), 2 a s^2 b without dropout. All flops are paid, the
causal half included.
"""

from __future__ import annotations

from dataclasses import replace

from planner.graph import Block, Loop, Node, Tensor


def unfuse_attention(block: Block, *, dropout: bool = False) -> Block:
    """`block` with every attention node replaced by matmuls and a softmax. `dropout`: the probabilities are dropped, which keeps a mask."""
    tensors = {tensor.tensor_id: tensor for tensor in block.tensors}
    forward = {node.node_id: node for node in block.nodes if node.op == "attention" and node.phase == "forward"}
    nodes: list[Node] = []
    saved = list(block.saved)
    for node in block.nodes:
        if node.op != "attention":
            nodes.append(node)
        elif node.phase == "forward":
            made = _forward(node, dropout)
            nodes.extend(made)
            score = _score_tensors(node, dropout)
            tensors.update({tensor.tensor_id: tensor for tensor in score})
            if any(other.forward_id == node.node_id for other in block.nodes):
                saved.extend(tensor.tensor_id for tensor in score if tensor.tensor_id != _name(node, "scores"))
        else:
            origin = forward[node.forward_id]
            made = _backward(node, origin, dropout)
            nodes.extend(made)
            tensors.update({tensor.tensor_id: tensor for tensor in _score_gradients(node, origin)})
    read = {name for node in nodes if node.phase == "backward" for name in node.inputs}
    statistics = {name for node in forward.values() for name in node.outputs}
    kept = tuple(name for name in saved if name not in statistics or name in read)
    return replace(block, nodes=tuple(nodes), tensors=tuple(tensors.values()), saved=kept)


def _name(node: Node, what: str) -> str:
    return f"{node.node_id}/{what}"


def _sizes(node: Node) -> dict[str, Loop]:
    return {loop.name: loop for loop in node.loops}


def _score_tensor(name: str, node: Node, dtype: str = "compute") -> Tensor:
    loop = _sizes(node)
    shape = (loop["batch"].size, loop["heads"].size, loop["q"].size, loop["kv"].size)
    return Tensor(tensor_id=name, shape=shape, axes=(loop["batch"].axis, loop["heads"].axis, loop["q"].axis, ""), dtype=dtype)


def _score_tensors(node: Node, dropout: bool) -> tuple[Tensor, ...]:
    made = [_score_tensor(_name(node, "scores"), node), _score_tensor(_name(node, "probabilities"), node)]
    if dropout:
        made += [_score_tensor(_name(node, "dropped"), node), _score_tensor(_name(node, "mask"), node, "bool")]
    return tuple(made)


def _score_gradients(node: Node, forward: Node) -> tuple[Tensor, ...]:
    return tuple(_score_tensor(_name(node, what), forward) for what in ("dropped.grad", "scores.grad"))


def _matmul(node: Node, what: str, inputs: tuple[str, ...], outputs: tuple[str, ...], m: Loop, n: Loop, k: Loop) -> Node:
    loop = _sizes(node)
    batch = Loop(name="batch", size=loop["batch"].size, axis=loop["batch"].axis)
    heads = Loop(name="heads", size=loop["heads"].size, axis=loop["heads"].axis)
    sized = tuple(replace(item, name=name) for name, item in (("m", m), ("n", n), ("k", k)))
    flops = 2.0 * batch.size * heads.size * m.size * n.size * k.size
    return Node(
        node_id=_name(node, what), op="gemm", phase=node.phase, inputs=inputs, outputs=outputs, loops=(batch, heads, *sized), flops=flops,
        forward_id=node.forward_id, module=node.module,
    )  # fmt: skip


def _dims(node: Node) -> tuple[Loop, Loop, Loop, Loop]:
    loop = _sizes(node)
    return loop["q"], replace(loop["kv"], axis=""), loop["head_dim"], loop["v_dim"]


def _forward(node: Node, dropout: bool) -> list[Node]:
    q, kv, dim, v_dim = _dims(node)
    scores, probabilities = _name(node, "scores"), _name(node, "probabilities")
    read = (_name(node, "dropped"),) if dropout else (probabilities,)
    softmax = Node(
        node_id=_name(node, "softmax"), op="softmax", phase="forward", inputs=(scores,), outputs=(probabilities,), module=node.module, role="core_attention",
    )  # fmt: skip
    made = [replace(_matmul(node, "scores", node.inputs, (scores,), q, kv, dim), role="core_attention"), softmax]
    if dropout:
        made.append(
            Node(
                node_id=_name(node, "dropout"),
                op="elementwise",
                phase="forward",
                inputs=(probabilities,),
                outputs=(_name(node, "dropped"), _name(node, "mask")),
                module=node.module,
                role="core_attention",
            )
        )
    return [*made, _matmul(node, "values", (*read, *node.inputs), node.outputs[:1], q, v_dim, kv)]


def _backward(node: Node, forward: Node, dropout: bool) -> list[Node]:
    """d(dropped) = dO V^T; dV = dropped^T dO; dS = softmax backward; dQ = dS K; dK = dS^T Q. Inputs of the flash node: gradient, q, k, v, out, lse."""
    q, kv, dim, v_dim = _dims(forward)
    node = replace(node, loops=forward.loops)
    probabilities = _name(forward, "probabilities")
    kept = _name(forward, "dropped") if dropout else probabilities
    mask = (_name(forward, "mask"),) if dropout else ()
    gradient = tuple(name for name in node.inputs if name not in forward.outputs and name not in forward.inputs)
    d_dropped, d_scores = _name(node, "dropped.grad"), _name(node, "scores.grad")
    first, last = node.outputs[:1], node.outputs[1:2] or node.outputs[:1]
    values = node.outputs[2:3] or node.outputs[:1]
    softmax = Node(
        node_id=_name(node, "softmax"), op="softmax", phase="backward", inputs=(d_dropped, probabilities, *mask), outputs=(d_scores,),
        forward_id=node.forward_id, module=node.module,
    )  # fmt: skip
    return [
        _matmul(node, "dropped.grad", (*gradient, *forward.inputs), (d_dropped,), q, kv, v_dim),
        _matmul(node, "values.grad", (kept, *gradient), values, kv, v_dim, q),
        softmax,
        _matmul(node, "query.grad", (d_scores, *forward.inputs), first, q, dim, kv),
        _matmul(node, "key.grad", (d_scores, *forward.inputs), last, kv, dim, q),
    ]
