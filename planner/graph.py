"""Graph: a model as blocks of kernels and tensors. Both doors (captured nn.Module, ModelSpec) produce it; equal blocks are stored once.

A block lists real kernels only, forward and backward; views are resolved to the tensor that owns the storage. Sizes are those of one
micro-batch of `batch` sequences of `sequence` tokens on one device, unsharded. Every tensor dimension and every loop of a matmul carries the
*logical axis* along which a mesh may divide it, and planner.lower divides by rule:

    batch, sequence, tokens (= batch x sequence)   scaled by the micro-batch; divided by cp (and by tp where sequence parallel holds)
    heads, kv_heads, ffn, vocab                    divided by tp (ffn: any inner feature dim that one linear makes and another contracts)
    experts                                        divided by ep
    "" (empty)                                     never divided

The rule for communication follows from the axes alone: a matmul that contracts a tp-divided loop and whose output has none is a
partial sum (all-reduce, or reduce-scatter under sequence parallel); a matmul with a tp-divided output that reads a tensor without tp axis needs
that tensor whole (all-gather under sequence parallel). Forward and backward obey the same rule.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

TOKEN_AXES = frozenset({"batch", "sequence", "tokens"})
TENSOR_PARALLEL_AXES = frozenset({"heads", "kv_heads", "ffn", "vocab"})
AXES = TOKEN_AXES | TENSOR_PARALLEL_AXES | {"experts", ""}
OPS = (
    "gemm", "grouped_gemm", "conv", "attention", "norm", "softmax", "elementwise", "reduce", "embedding", "cross_entropy", "copy", "index",
)  # fmt: skip
KINDS = ("input", "parameter", "buffer", "activation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A storage: its defining shape, the logical axis of every dim, and its dtype.

    dtype "compute" means the job's compute dtype (what autocast or a bf16 model would use); every other name is literal ("fp32", "int64", "bool").
    kind: "input" enters the block (activation of an earlier block, ids, rope tables); "parameter"; "buffer"; "activation" is made inside.
    `trainable` holds for parameters.
    """

    tensor_id: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    dtype: str = "compute"
    kind: str = "activation"
    trainable: bool = False

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One loop of a matmul-like kernel: its name (m, n, k, batch for gemm; see Node), size, and logical axis."""

    name: str
    size: int
    axis: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One kernel.

    node_id comes from the module path (`self_attn.q_proj/mm.0`). inputs and outputs name tensors of the block.
    loops of a gemm: m (rows of the output), n (columns), k (contracted), batch. grouped_gemm: m, n, k, groups. attention: batch, heads, kv_heads, q, kv,
    head_dim, v_dim. Other ops have none and are priced by bytes.
    `flops`: forward gemm 2mnk; attention forward 2*b*h*q*kv*(d+dv), halved when causal; attention backward 2.5 x forward; 0 for the rest.
    `forward_id` links a backward node to the forward node it differentiates.
    `module`: path of the module inside the block that ran it; `role`: "" or a hint that survives fusion ("dgrad", "wgrad").
    """

    node_id: str
    op: str
    phase: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    loops: tuple[Loop, ...] = ()
    flops: float = 0.0
    causal: bool = False
    forward_id: str = ""
    module: str = ""
    role: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One kind of block: nodes in execution order (forward then backward), its tensors, what it takes, gives, and keeps for backward.

    `saved` names the tensors that eager autograd keeps from forward to backward (parameters and block inputs owned by an earlier block's output
    excluded only when that block already counts them: a block counts its own input, not its output).
    Backward: the gradient of tensor x is called `x.grad`. The gradients of the block's outputs enter as tensors of kind "input" that `inputs`
    does not list; the gradients of its inputs and of its trainable parameters leave under that name. Rope tables and encoder outputs, read
    by many blocks, count as saved where they are made.
    `layouts`: for every parameterised module of the block its tensor-parallel style: column, row, vocab, replicate.
    `unsplit`: (module or parameter, why) of those whose layout cannot be had by cutting the weights of nn.Linear and nn.Embedding contiguously, as engines
    do that train the user's own module (costmodel.engine.Engine.splits_modules).
    `role`: "embedding" (before the first layer), "layer", "head" (after the last layer, loss included).
    """

    kind_id: str
    role: str
    nodes: tuple[Node, ...]
    tensors: tuple[Tensor, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    saved: tuple[str, ...]
    layouts: tuple[tuple[str, str], ...] = ()
    unsplit: tuple[tuple[str, str], ...] = ()

    def tensor(self, tensor_id: str) -> Tensor:
        """The tensor called `tensor_id`. Raises KeyError."""
        for tensor in self.tensors:
            if tensor.tensor_id == tensor_id:
                return tensor
        raise KeyError(tensor_id)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Parameters owned by the block."""
        return tuple(tensor for tensor in self.tensors if tensor.kind == "parameter")

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(tensor.num_elements for tensor in self.parameters)

    def flops(self, phase: str) -> float:
        """Flops of all nodes of `phase` ("forward" or "backward")."""
        return sum(node.flops for node in self.nodes if node.phase == phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One place in the model: the module path and the block kind that runs there.

    Tensors of a block of role "layer" are named relative to `path`; embedding and head own modules from several places, so theirs are full names
    and their paths are labels ("embed", "head").
    """

    path: str
    kind_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A whole model: block kinds stored once, layers in execution order (embedding, layers, head).

    `tied`: pairs of parameter names that are one storage; the second of each pair is not counted again. `vocab_size` and `max_sequence` are 0 when the model
    has none. `num_active_parameters` differs from the total for mixture-of-experts models.
    """

    name: str
    batch: int
    sequence: int
    kinds: tuple[Block, ...]
    layers: tuple[Layer, ...]
    tied: tuple[tuple[str, str], ...] = ()
    num_parameters: int = 0
    num_trainable_parameters: int = 0
    num_active_parameters: int = 0
    num_experts: int = 0
    top_k: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    vocab_size: int = 0
    notes: tuple[str, ...] = ()

    def kind(self, kind_id: str) -> Block:
        """The block kind called `kind_id`. Raises KeyError."""
        for block in self.kinds:
            if block.kind_id == kind_id:
                return block
        raise KeyError(kind_id)

    def runs(self) -> Iterator[tuple[Block, int]]:
        """Maximal runs of equal consecutive layers as (block, count)."""
        previous, count = "", 0
        for layer in self.layers:
            if layer.kind_id == previous:
                count += 1
                continue
            if count:
                yield self.kind(previous), count
            previous, count = layer.kind_id, 1
        if count:
            yield self.kind(previous), count

    @property
    def num_layers(self) -> int:
        """Layers that pipeline stages are cut between (role "layer")."""
        roles = {block.kind_id: block.role for block in self.kinds}
        return sum(roles[layer.kind_id] == "layer" for layer in self.layers)

    @property
    def graph_id(self) -> str:
        """Hash of the canonical form: equal models have equal ids whichever way they came in is *not* promised, equal graphs have."""
        return hashlib.sha256(json.dumps(_canonical(self), separators=(",", ":"), sort_keys=True).encode()).hexdigest()[:16]


def _canonical(value: object) -> object:
    if isinstance(value, tuple):
        return [_canonical(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: _canonical(getattr(value, name)) for name in value.__dataclass_fields__}
    return value
