"""Division: how the mesh divides tensors and loops by their logical axes. One rank's share, for one micro-batch.

The rule (planner/graph.py names the axes):

    batch, tokens        x micro_batch / graph.batch
    sequence, tokens     / cp, and / tp under sequence parallelism where the tensor has no tp axis and is not held whole
    heads, ffn, vocab    / tp
    kv_heads             / min(tp, number of kv heads): with more tp ranks than kv heads each rank keeps one whole head, replicated
    experts              / ep

Only the first sequence axis of a tensor is divided: a second one is the key side of attention scores, which stays whole. Causal context
parallelism is assumed to be balanced by zig-zag chunks (rank r holds chunks r and 2*cp-1-r), so that every rank does 1/cp of the attention.

Experts: with ep > 1 an expert lives whole on its rank (expert tensor parallelism 1, ep folded over tp, cp and dp as costmodel.mesh
says), so the ffn axis of its weights and activations is not divided. With ep == 1 the experts of a layer are divided by tp along ffn
like a dense MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.work import DTYPE_BYTES
from planner.graph import TENSOR_PARALLEL_AXES, TOKEN_AXES, Block, Node, Tensor

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Divisors of the logical axes. `batch_frac` = micro_batch / graph.batch; `compute_dtype` is what dtype "compute" means for storage.

    `routed`: activations inside the experts (see `routed_tensors`).
    """

    batch_frac: float = 1.0
    compute_dtype: str = "bf16"
    cp: int = 1
    tp: int = 1
    ep: int = 1
    kv_divisor: int = 1
    sequence_parallel: bool = False
    all_to_all: bool = False
    routed: frozenset[str] = frozenset()

    def is_split(self, axes: Axes) -> bool:
        """Whether tensor parallelism divides something with these axes."""
        return self.tp > 1 and not TENSOR_PARALLEL_AXES.isdisjoint(axes)

    def axes(self, tensor: Tensor) -> Axes:
        """The axes of `tensor` that count: inside experts that live whole on a rank, ffn does not."""
        if self.ep > 1 and (tensor.tensor_id in self.routed or "experts" in tensor.axes):
            return _without_ffn(tensor.axes)
        return tensor.axes

    def loop_axes(self, node: Node) -> Axes:
        """The axes of the loops of `node` that count; a second sequence loop (keys) is not divided."""
        axes = tuple(loop.axis for loop in node.loops)
        if self.ep > 1 and node.op == "grouped_gemm":
            return _without_ffn(axes)
        first = next((index for index, axis in enumerate(axes) if axis in ("sequence", "tokens")), len(axes))
        return tuple("" if index > first and axis in ("sequence", "tokens") else axis for index, axis in enumerate(axes))

    def is_whole(self, node: Node) -> bool:
        """Whether a matmul or attention sees all tokens of the tensor-parallel group: it has a tp axis, or it is attention, which mixes tokens."""
        return self.is_split(self.loop_axes(node)) or node.op == "attention"

    def share(self, axes: Axes, *, whole: bool = False) -> float:
        """The fraction of the unsharded elements that one rank holds. `whole`: sequence parallelism does not divide it (gathered, or partial sum)."""
        factor, sequence_seen = 1.0, False
        for axis in axes:
            if axis in ("batch", "tokens"):
                factor *= self.batch_frac
            if axis in ("sequence", "tokens") and not sequence_seen:
                sequence_seen = True
                factor /= self.cp
            elif axis in ("heads", "ffn", "vocab"):
                factor /= self.tp
            elif axis == "kv_heads":
                factor /= self.kv_divisor
            elif axis == "experts":
                factor /= self.ep
        if self.sequence_parallel and sequence_seen and not whole and not self.is_split(axes):
            factor /= self.tp
        return factor

    def num_elements(self, tensor: Tensor, *, whole: bool = False) -> float:
        """Local elements of `tensor`."""
        return tensor.num_elements * self.share(self.axes(tensor), whole=whole)

    def num_bytes(self, tensor: Tensor, *, whole: bool = False) -> float:
        """Local bytes of `tensor`."""
        dtype = self.compute_dtype if tensor.dtype == "compute" else tensor.dtype
        return self.num_elements(tensor, whole=whole) * DTYPE_BYTES[dtype]

    def loops(self, node: Node) -> dict[str, int]:
        """Local sizes of the loops of `node`, at least 1 each. Under all-to-all context parallelism attention has the whole sequence of fewer heads."""
        axes, whole = self.loop_axes(node), self.is_whole(node)
        sizes = {
            loop.name: max(1, round(loop.size * self.share((axis,), whole=whole))) for loop, axis in zip(node.loops, axes, strict=True)
        }
        if node.op == "attention" and self.all_to_all and self.cp > 1:
            sizes["q"] *= self.cp
            sizes["heads"] = max(1, sizes["heads"] // self.cp)
            sizes["kv_heads"] = max(1, sizes["kv_heads"] // self.cp)
        return sizes

    def flops(self, node: Node) -> float:
        """Local flops of `node`: its share of the iteration space. Query heads count for attention, not kv heads; rows for grouped matmuls, not groups:
        with balanced routing a rank computes as many rows as it sends, on fewer experts."""
        idle = {"attention": "kv_heads", "grouped_gemm": "groups"}.get(node.op)
        axes = tuple("" if loop.name == idle else axis for loop, axis in zip(node.loops, self.loop_axes(node), strict=True))
        return node.flops * self.share(axes, whole=self.is_whole(node))


def _without_ffn(axes: Axes) -> Axes:
    return tuple("" if axis == "ffn" else axis for axis in axes)


def has_tokens(tensor: Tensor) -> bool:
    """Whether the tensor is per token or per sequence (an activation or its gradient) rather than per parameter."""
    return not TOKEN_AXES.isdisjoint(tensor.axes)


def routed_tensors(block: Block) -> frozenset[str]:
    """Activations inside the experts: those with an ffn axis that a grouped matmul reads or writes, and those that elementwise kernels make of them."""
    inner = {tensor.tensor_id for tensor in block.tensors if tensor.kind == "activation" and "ffn" in tensor.axes}
    found = {name for node in block.nodes if node.op == "grouped_gemm" for name in (*node.inputs, *node.outputs) if name in inner}
    while True:
        touching = (
            node for node in block.nodes if node.op not in ("gemm", "attention") and not found.isdisjoint((*node.inputs, *node.outputs))
        )
        grown = found | {name for node in touching for name in (*node.inputs, *node.outputs) if name in inner}
        if grown == found:
            return frozenset(found)
        found = grown
