"""Blocks for the intra-op tests and the benchmark: random small ones for the oracle, irregular large ones for the clock."""

from __future__ import annotations

from random import Random

from costmodel.blocks import Machine
from costmodel.engine import engine
from costmodel.hardware import Cluster
from costmodel.mesh import Mesh
from planner.graph import Block, Loop, Node, Tensor
from planner.intraop.price import Prices
from planner.models.builder import BlockBuilder, Variable
from planner.models.ops import activation, add, linear, mul, softmax


def prices(cluster: str | Cluster = "8xH100", *, tp: int = 8, name: str = "torch") -> Prices:
    pool = (Cluster.parse(cluster) if isinstance(cluster, str) else cluster).pool
    return Prices(machine=Machine.of(pool, Mesh(tp=tp), engine(name)), engine=engine(name))


def random_block(seed: int) -> Block:
    """Two or three forward kernels on rows of random widths: matmuls, sums, products, softmax, reductions, with reuse."""
    random = Random(seed)
    tensors = [
        Tensor(
            tensor_id="x",
            shape=(4, 8 * 2 ** random.randrange(6), width := 16 * 2 ** random.randrange(8)),
            axes=("batch", "sequence", ""),
            kind="input",
        )
    ]
    nodes: list[Node] = []
    rows = {"x": width}
    for index in range(random.choice((2, 2, 3))):
        source = random.choice(sorted(rows))
        kind = random.choice(("gemm", "gemm", "add", "softmax", "silu", "sum"))
        out, shape = f"t{index}", (*tensors[0].shape[:2], rows[source])
        inputs, op, loops, flops = (source,), "elementwise", (), 0.0
        if kind == "gemm":
            wide = 16 * 2 ** random.randrange(8)
            tensors.append(Tensor(tensor_id=f"w{index}", shape=(wide, rows[source]), axes=("", ""), kind="parameter"))
            sizes = (shape[0] * shape[1], wide, rows[source])
            loops = tuple(Loop(name=n, size=s, axis=a) for n, s, a in zip("mnk", sizes, ("tokens", "", ""), strict=True))
            inputs, op, flops, shape = (source, f"w{index}"), "gemm", 2.0 * sizes[0] * sizes[1] * sizes[2], (*shape[:2], wide)
        elif kind == "add":
            inputs = (source, random.choice([name for name in sorted(rows) if rows[name] == rows[source]]))
        elif kind == "softmax":
            op = "softmax"
        elif kind == "sum":
            op, shape = "reduce", (*shape[:2], 1)
        tensors.append(Tensor(tensor_id=out, shape=shape, axes=("batch", "sequence", "")))
        nodes.append(Node(node_id=f"n{index}/{kind}.0", op=op, phase="forward", inputs=inputs, outputs=(out,), loops=loops, flops=flops))
        rows[out] = shape[-1]
    last = nodes[-1].outputs
    return Block(
        kind_id=f"random{seed}", role="layer", nodes=tuple(nodes), tensors=tuple(tensors), inputs=("x",), outputs=last, saved=tuple(sorted(rows)),
    )  # fmt: skip


def irregular_block(seed: int, num_ops: int, *, sequence: int = 2048) -> Block:
    """A block of at least `num_ops` kernels, forward and backward, without any repeated structure: random widths, branches, gates and skips."""
    random = Random(seed)
    b = BlockBuilder()
    axes = ("batch", "sequence", "")
    values: list[Variable] = [b.input("x", (1, sequence, 1024), axes)]
    while len(b._nodes) * 2.5 < num_ops:
        module = f"m{len(values)}"
        source = random.choice(values[-6:])
        kind = random.choice(("linear", "linear", "silu", "mix", "gate"))
        if kind == "linear":
            values.append(linear(b, source, module, 64 * random.randrange(3, 64)))
        elif kind == "silu":
            values.append(activation(b, source, module, "silu"))
        else:
            other = linear(b, random.choice(values[-12:]), module, source.shape[-1])
            values.append(add(b, source, other, module) if kind == "mix" else mul(b, source, softmax(b, other, module), module))
    out = values[0]
    for index, value in enumerate(values[-6:]):
        out = add(b, out, linear(b, value, f"join{index}", 1024), f"join{index}")
    return b.finish("irregular", "layer", [out])
