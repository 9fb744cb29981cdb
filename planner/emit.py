"""Emission: the nodes and exchanges of a divided block become `Work` with local sizes, and their liveness becomes peaks.

Matmul traffic is the operands once; other kernels read their inputs and write their outputs once. A look-up (embedding, index) reads the rows it writes, not
the whole table. fp8: the matmuls of linears (an operand is a parameter) run in fp8 after one cast kernel a tensor and phase, 1 byte written for each
element read; weights are assumed to be cast once a step together with the optimizer. Attention, logits and everything else stay in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from costmodel.engine import Engine
from costmodel.work import DTYPE_BYTES, Collective, Compute, Work
from planner.division import Division, has_tokens
from planner.exchange import MATMULS, Exchange, Item, base, is_whole
from planner.graph import Node, Tensor

# Of a causal zig-zag ring: a later step computes all rows on half of the keys or half of the rows on all of them, equally often over the ranks.
RING_ROWS_FRAC = 0.75
_LAYOUTS = {"dgrad": "NN", "wgrad": "NT"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitter:
    """Sizes and dtypes of one divided block. `fp8`: forward ids of the matmuls that run in fp8."""

    division: Division
    engine: Engine
    tensors: dict[str, Tensor]
    fp8: frozenset[str] = frozenset()

    def size(self, name: str) -> float:
        """Local bytes of a physical tensor name."""
        return self.division.num_bytes(self.tensors[base(name)], whole=is_whole(name))

    def works(self, items: Sequence[Item]) -> tuple[Work, ...]:
        """The work of `items`, in order."""
        cast: set[str] = set()
        return tuple(work for item in items for work in self._work(item, cast))

    def _work(self, item: Item, cast: set[str]) -> Iterator[Work]:
        if isinstance(item, Exchange):
            call = Collective(
                name=item.node_id, kind=item.kind, full_bytes=item.full_bytes, axis=item.axis, dtype=item.dtype, overlaps=item.overlaps
            )
            yield from (call,) * item.count
        elif item.op in MATMULS and item.loops:
            if self._is_fp8(item):
                yield from self._casts(item, cast)
            yield self._matmul(item)
        elif item.op == "attention":
            yield from self._attention(item)
        else:
            yield self._kernel(item)

    def _is_fp8(self, node: Node) -> bool:
        return (node.forward_id or node.node_id) in self.fp8

    def _casts(self, node: Node, cast: set[str]) -> Iterator[Compute]:
        for name in node.inputs:
            tensor = self.tensors[base(name)]
            if name in cast or tensor.kind == "parameter" or tensor.dtype != "compute":
                continue
            cast.add(name)
            size = self.size(name)
            yield Compute(
                name=f"{name}/cast_fp8", op_class="copy", read_bytes=size, write_bytes=size / DTYPE_BYTES[self.division.compute_dtype],
                dtype=self.division.compute_dtype, backward=node.phase == "backward",
            )  # fmt: skip

    def _matmul(self, node: Node) -> Compute:
        loops = self.division.loops(node)
        m, n, k = (loops.get(name, 1) for name in ("m", "n", "k"))
        groups = loops.get("groups", 0)
        batch = groups or prod(size for name, size in loops.items() if name not in ("m", "n", "k", "groups"))
        dtype = "fp8" if self._is_fp8(node) else self.division.compute_dtype
        operand, result = DTYPE_BYTES[dtype], DTYPE_BYTES[self.division.compute_dtype]
        accumulates = node.role == "wgrad" and self.engine.flat_gradient_buffer
        read, written = _traffic(m, n, k, groups, batch, node.role)
        if groups and node.role == "wgrad":
            m, k = m * groups, max(1, k // groups)
        return Compute(
            name=node.node_id, op_class=node.op, flops=self.division.flops(node), read_bytes=read * operand,
            write_bytes=written * (DTYPE_BYTES["fp32"] if accumulates else result), dtype=dtype, m=m, n=n, k=k, batch=batch,
            backward=node.phase == "backward", layout=_LAYOUTS.get(node.role, "TN"), accumulate=accumulates,
        )  # fmt: skip

    def _attention(self, node: Node) -> Iterator[Work]:
        """One kernel, or on a ring one a step: each sees the keys of one rank, the last of them after the last message, and adds its rows to those before."""
        loops = self.division.loops(node)
        read, write = (sum(map(self.size, names)) for names in (node.inputs, node.outputs))
        whole = Compute(
            name=node.node_id, op_class="attention", flops=self.division.flops(node), read_bytes=read, write_bytes=write,
            dtype=self.division.compute_dtype, m=loops["q"], n=loops["kv"], k=loops["head_dim"], v_dim=loops["v_dim"], batch=loops["batch"],
            heads=loops["heads"], kv_heads=loops["kv_heads"], causal=node.causal, backward=node.phase == "backward",
        )  # fmt: skip
        steps = 1 if self.division.all_to_all else self.division.cp
        if steps == 1:
            yield whole
            return
        whole = replace(whole, n=-(-whole.n // steps))
        yield _part(whole, "steps", steps - 1, steps)
        yield Collective(name=f"{node.node_id}/wait", kind="wait", full_bytes=0.0, axis="cp")
        yield _part(whole, "last", 1, steps)
        merged = RING_ROWS_FRAC * (steps - 1) * write
        yield Compute(
            name=f"{node.node_id}/merge", op_class="elementwise", read_bytes=2.0 * merged, write_bytes=merged, dtype=whole.dtype,
            backward=whole.backward, num_kernels=steps - 1,
        )  # fmt: skip

    def _kernel(self, node: Node) -> Compute:
        whole = any(
            is_whole(name) or self.division.is_split(self.division.axes(self.tensors[base(name)])) for name in (*node.inputs, *node.outputs)
        )
        sizes = {name: self.division.num_bytes(self.tensors[base(name)], whole=whole) for name in (*node.inputs, *node.outputs)}
        write = sum(sizes[name] for name in node.outputs)
        read = sum(sizes[name] for name in node.inputs)
        if node.op in ("embedding", "index"):
            read = sum(min(sizes[name], write) for name in node.inputs)
        return Compute(
            name=node.node_id, op_class=node.op, read_bytes=read, write_bytes=write, dtype=self.division.compute_dtype,
            flops=node.flops * self._rows_share(node), backward=node.phase == "backward",
        )  # fmt: skip

    def _rows_share(self, node: Node) -> float:
        """The share of its work that a kernel without loops (a convolution) does: that of the most divided activation it touches."""
        tensors = [self.tensors[base(name)] for name in (*node.inputs, *node.outputs)]
        return min((self.division.share(self.division.axes(tensor)) for tensor in tensors if has_tokens(tensor)), default=1.0)


def _part(whole: Compute, name: str, steps: int, of: int) -> Compute:
    """`steps` of the `of` equal kernels that `whole` is made of."""
    share = steps / of
    return replace(
        whole, name=f"{whole.name}/{name}", flops=share * whole.flops, read_bytes=share * whole.read_bytes,
        write_bytes=share * whole.write_bytes, num_kernels=steps,
    )  # fmt: skip


def _traffic(m: int, n: int, k: int, groups: int, batch: int, role: str) -> tuple[float, float]:
    """Elements read and written by a matmul. `m` counts the rows of all groups of a grouped one; its weight gradient contracts them, so that `k` does."""
    if not groups:
        return float(batch) * (m * k + k * n), float(batch) * m * n
    if role == "wgrad":
        return float(k) * (m + n), float(groups) * m * n
    return float(m) * k + float(groups) * k * n, float(m) * n


def linears(nodes: Sequence[Node], tensors: dict[str, Tensor]) -> frozenset[str]:
    """Ids of the forward matmuls with a parameter operand."""
    return frozenset(
        node.node_id
        for node in nodes
        if node.op in ("gemm", "grouped_gemm")
        and node.phase == "forward"
        and any(tensors[name].kind == "parameter" for name in node.inputs)
    )
