"""Hand-built graphs: a GPT layer kernel by kernel as eager PyTorch runs it, small enough to count by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

from costmodel.engine import Engine, engine
from costmodel.mesh import Mesh
from planner.graph import Block, Graph, Layer, Loop, Node, Tensor
from planner.job import Job
from planner.strategy import Strategy

TOKENS = ("batch", "sequence")


@dataclass(slots=True, kw_only=True)
class Sketch:
    """Collects nodes and tensors of a block; backward nodes are given in reverse order of the forward ones."""

    batch: int
    sequence: int
    hidden: int
    heads: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    forward: list[Node] = field(default_factory=list)
    backward: list[Node] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)

    def tensor(self, name: str, *dims: tuple[int, str], dtype: str = "compute", kind: str = "activation") -> str:
        self.tensors[name] = Tensor(
            tensor_id=name, shape=tuple(size for size, _ in dims), axes=tuple(axis for _, axis in dims), dtype=dtype, kind=kind,
            trainable=kind == "parameter",
        )  # fmt: skip
        return name

    def rows(self, name: str, width: int, axis: str = "", *, dtype: str = "compute", kind: str = "activation") -> str:
        return self.tensor(name, (self.batch, "batch"), (self.sequence, "sequence"), (width, axis), dtype=dtype, kind=kind)

    def node(self, node_id: str, op: str, inputs: tuple[str, ...], outputs: tuple[str, ...], *, of: str = "", **facts: object) -> None:
        phase = "backward" if of else "forward"
        node = Node(node_id=node_id, op=op, phase=phase, inputs=inputs, outputs=outputs, forward_id=of, **facts)  # type: ignore[arg-type]
        (self.backward if of else self.forward).append(node)

    def linear(self, name: str, source: str, width: int, axis: str = "") -> str:
        """y = x W^T with both backward matmuls: gradients `<x>.grad:<name>` and `<name>.weight.grad`."""
        x = self.tensors[source]
        rows = self.batch * self.sequence
        inner = Loop(name="k", size=x.shape[-1], axis=x.axes[-1])
        m, n = Loop(name="m", size=rows, axis="tokens"), Loop(name="n", size=width, axis=axis)
        weight = self.tensor(f"{name}.weight", (width, axis), (inner.size, inner.axis), kind="parameter")
        out = self.rows(name, width, axis)
        flops = 2.0 * rows * width * inner.size
        self.node(f"{name}/mm", "gemm", (source, weight), (out,), loops=(m, n, inner), flops=flops)
        self.saved.append(source)
        self.rows(f"{name}.grad", width, axis)
        self.rows(f"{source}.grad:{name}", inner.size, inner.axis)
        self.tensor(f"{weight}.grad", (width, axis), (inner.size, inner.axis))
        turned = (m, Loop(name="n", size=inner.size, axis=inner.axis), Loop(name="k", size=width, axis=axis))
        crossed = (
            Loop(name="m", size=width, axis=axis),
            Loop(name="n", size=inner.size, axis=inner.axis),
            Loop(name="k", size=rows, axis="tokens"),
        )
        self.node(
            f"{name}/wgrad",
            "gemm",
            (f"{name}.grad", source),
            (f"{weight}.grad",),
            of=f"{name}/mm",
            loops=crossed,
            flops=flops,
            role="wgrad",
        )
        self.node(
            f"{name}/dgrad",
            "gemm",
            (f"{name}.grad", weight),
            (f"{source}.grad:{name}",),
            of=f"{name}/mm",
            loops=turned,
            flops=flops,
            role="dgrad",
        )
        return out

    def norm(self, name: str, source: str, gradient: str) -> str:
        """LayerNorm that keeps its input, mean and 1/std; `gradient` is the gradient of its output, `<source>.grad:<name>` the one it makes."""
        weight = self.tensor(f"{name}.weight", (self.hidden, ""), kind="parameter")
        statistics = tuple(self.rows(f"{name}.{what}", 1, dtype="fp32") for what in ("mean", "rstd"))
        out = self.rows(name, self.hidden)
        self.node(f"{name}/norm", "norm", (source, weight), (out, *statistics))
        self.saved += [source, *statistics]
        self.rows(f"{source}.grad:{name}", self.hidden)
        self.tensor(f"{weight}.grad", (self.hidden, ""))
        reads = (gradient, source, weight, *statistics)
        self.node(f"{name}/norm_backward", "norm", reads, (f"{source}.grad:{name}", f"{weight}.grad"), of=f"{name}/norm", role="wgrad")
        return out

    def add(self, name: str, *terms: str) -> str:
        out = self.rows(name, self.tensors[terms[0]].shape[-1], self.tensors[terms[0]].axes[-1])
        self.node(f"{name}/add", "elementwise", terms, (out,))
        return out

    def accumulate(self, name: str, *terms: str) -> str:
        out = self.rows(name, self.tensors[terms[0]].shape[-1], self.tensors[terms[0]].axes[-1])
        self.node(f"{name}/accumulate", "elementwise", terms, (out,), of="accumulate")
        return out

    def attention(self, queries: tuple[str, ...], kv_heads: int) -> str:
        dim = self.hidden // self.heads
        loops = (
            Loop(name="batch", size=self.batch, axis="batch"), Loop(name="heads", size=self.heads, axis="heads"),
            Loop(name="kv_heads", size=kv_heads, axis="kv_heads"), Loop(name="q", size=self.sequence, axis="sequence"),
            Loop(name="kv", size=self.sequence, axis="sequence"), Loop(name="head_dim", size=dim), Loop(name="v_dim", size=dim),
        )  # fmt: skip
        flops = 2.0 * self.batch * self.heads * self.sequence**2 * 2 * dim / 2
        out = self.rows("context", self.hidden, "heads")
        lse = self.tensor("lse", (self.batch, "batch"), (self.heads, "heads"), (self.sequence, "sequence"), dtype="fp32")
        self.node("attention/flash", "attention", queries, (out, lse), loops=loops, flops=flops, causal=True)
        self.saved += [*queries, out, lse]
        self.rows("context.grad", self.hidden, "heads")
        gradients = tuple(f"{name}.grad" for name in queries)
        reads = ("context.grad", *queries, out, lse)
        self.node(
            "attention/flash_backward", "attention", reads, gradients, of="attention/flash", loops=loops, flops=2.5 * flops, causal=True
        )
        return out

    def block(self, kind_id: str, role: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Block:
        return Block(
            kind_id=kind_id, role=role, nodes=(*self.forward, *reversed(self.backward)), tensors=tuple(self.tensors.values()), inputs=inputs,
            outputs=outputs, saved=tuple(dict.fromkeys(self.saved)),
        )  # fmt: skip


def gpt_layer(*, batch: int = 1, sequence: int = 32, hidden: int = 64, heads: int = 8, kv_heads: int = 8, separate: bool = False) -> Block:
    """LayerNorm, QKV (one matmul, or three when `separate`), attention, projection, residual, LayerNorm, 4h MLP with GELU, residual."""
    s = Sketch(batch=batch, sequence=sequence, hidden=hidden, heads=heads)
    s.rows("x", hidden, kind="input")
    s.rows("y.grad", hidden, kind="input")
    s.accumulate("x.grad", s.rows("r.grad", hidden), s.rows("x.grad:n1", hidden))
    first = s.norm("n1", "x", "n1.grad")
    if separate:
        width = hidden // heads * kv_heads
        for name in ("qk", "q", "k", "v"):
            s.rows(f"n1.grad:{name}", hidden)
        s.accumulate("n1.grad", "n1.grad:qk", "n1.grad:v")
        s.accumulate("n1.grad:qk", "n1.grad:q", "n1.grad:k")
        queries = (s.linear("q", first, hidden, "heads"), s.linear("k", first, width, "kv_heads"), s.linear("v", first, width, "kv_heads"))
    else:
        queries = (s.linear("qkv", first, 3 * hidden, "heads"),)
        _rename_gradient(s, "n1.grad:qkv", "n1.grad")
    projected = s.linear("p", s.attention(queries, kv_heads), hidden)
    _rename_gradient(s, "context.grad:p", "context.grad")
    _rename_gradient(s, "p.grad", "r.grad")
    residual = s.add("r", "x", projected)
    s.accumulate("r.grad", "y.grad", s.rows("r.grad:n2", hidden))
    second = s.norm("n2", residual, "n2.grad")
    up = s.linear("f1", second, 4 * hidden, "ffn")
    _rename_gradient(s, "n2.grad:f1", "n2.grad")
    active = s.rows("g", 4 * hidden, "ffn")
    s.node("g/gelu", "elementwise", (up,), (active,))
    s.saved.append(up)
    s.node("g/gelu_backward", "elementwise", ("g.grad", up), ("f1.grad",), of="g/gelu")
    down = s.linear("f2", active, hidden)
    _rename_gradient(s, "g.grad:f2", "g.grad")
    _rename_gradient(s, "f2.grad", "y.grad")
    s.add("y", residual, down)
    return s.block("layer", "layer", ("x",), ("y",))


def _rename_gradient(s: Sketch, old: str, new: str) -> None:
    """Let backward kernels call the tensor `old` by the name `new`."""
    tensor = s.tensors.pop(old)
    if new not in s.tensors:
        s.tensors[new] = Tensor(tensor_id=new, shape=tensor.shape, axes=tensor.axes, dtype=tensor.dtype)

    def renamed(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(new if name == old else name for name in names)

    for index, node in enumerate(s.backward):
        s.backward[index] = Node(
            node_id=node.node_id, op=node.op, phase=node.phase, inputs=renamed(node.inputs), outputs=renamed(node.outputs), loops=node.loops,
            flops=node.flops, causal=node.causal, forward_id=node.forward_id, module=node.module, role=node.role,
        )  # fmt: skip


def embedding(*, batch: int, sequence: int, hidden: int, vocab: int) -> Block:
    """Token embedding."""
    s = Sketch(batch=batch, sequence=sequence, hidden=hidden, heads=1)
    s.tensor("ids", (batch, "batch"), (sequence, "sequence"), dtype="int64", kind="input")
    s.tensor("wte", (vocab, "vocab"), (hidden, ""), kind="parameter")
    s.tensor("wte.grad", (vocab, "vocab"), (hidden, ""))
    s.rows("x", hidden)
    s.rows("x.grad", hidden, kind="input")
    s.node("wte/embedding", "embedding", ("ids", "wte"), ("x",))
    s.node("wte/backward", "embedding", ("x.grad", "ids"), ("wte.grad",), of="wte/embedding", role="wgrad")
    s.saved.append("ids")
    return s.block("embedding", "embedding", ("ids",), ("x",))


def head(*, batch: int, sequence: int, hidden: int, vocab: int) -> Block:
    """LayerNorm, logits, cross-entropy."""
    s = Sketch(batch=batch, sequence=sequence, hidden=hidden, heads=1)
    s.rows("x", hidden, kind="input")
    s.tensor("labels", (batch, "batch"), (sequence, "sequence"), dtype="int64", kind="input")
    normal = s.norm("n", "x", "n.grad")
    logits = s.linear("lm_head", normal, vocab, "vocab")
    _rename_gradient(s, "n.grad:lm_head", "n.grad")
    s.tensor("loss", dtype="fp32")
    s.node("loss/cross_entropy", "cross_entropy", (logits, "labels"), ("loss",))
    s.node("loss/backward", "cross_entropy", (logits, "labels"), ("lm_head.grad",), of="loss/cross_entropy")
    s.saved.append(logits)
    return s.block("head", "head", ("x", "labels"), ("loss",))


def gpt(
    *, layers: int = 4, batch: int = 1, sequence: int = 32, hidden: int = 64, heads: int = 8, kv_heads: int = 8, vocab: int = 128,
    tied: bool = False, separate: bool = False,
) -> Graph:  # fmt: skip
    """A GPT of `layers` equal layers."""
    sizes = {"batch": batch, "sequence": sequence, "hidden": hidden}
    kinds = (
        embedding(**sizes, vocab=vocab), gpt_layer(**sizes, heads=heads, kv_heads=kv_heads, separate=separate), head(**sizes, vocab=vocab),
    )  # fmt: skip
    paths = (("wte", "embedding"), *((f"h.{index}", "layer") for index in range(layers)), ("head", "head"))
    total = kinds[0].num_parameters + layers * kinds[1].num_parameters + kinds[2].num_parameters
    pair = (("wte", "lm_head.weight"),) if tied else ()
    return Graph(
        name="gpt", batch=batch, sequence=sequence, kinds=kinds, layers=tuple(Layer(path=path, kind_id=kind) for path, kind in paths), tied=pair,
        num_parameters=total - (vocab * hidden if tied else 0), num_trainable_parameters=total, num_active_parameters=total, num_heads=heads,
        num_kv_heads=kv_heads, vocab_size=vocab,
    )  # fmt: skip


MEGATRON: Engine = engine("megatron")
TORCH: Engine = engine("torchtitan")


def job(**changes: object) -> Job:
    """A small job."""
    return Job(**{"global_batch": 16, "seq_len": 32, **changes})  # type: ignore[arg-type]


def strategy(*, pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1, ep: int = 1, **changes: object) -> Strategy:
    """A strategy on a mesh of these sizes."""
    facts = {"schedule": "1f1b" if pp > 1 else "none", **changes}
    return Strategy(mesh=Mesh(pp=pp, dp_shard=dp, cp=cp, tp=tp, ep=ep), **facts)  # type: ignore[arg-type]
