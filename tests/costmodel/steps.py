"""Hand-built steps: a Llama-like decoder lowered on paper, for tests of the cost model that must not depend on the planner."""

from __future__ import annotations

from costmodel.hardware import Cluster, Device, Link, NodePool
from costmodel.mesh import Mesh
from costmodel.work import BlockWork, Collective, Compute, MemoryItem, ParameterShard, StageWork, StepWork, Work

H100 = Device(
    device_id="h100-sxm5-80gb", arch="hopper", memory_bytes=80 * 2**30, memory_bandwidth_bytes_per_s=3.35e12,
    peak_flops=(("bf16", 989.4e12), ("fp16", 989.4e12), ("fp8", 1978.9e12), ("tf32", 494.7e12), ("fp32", 66.9e12)),
)  # fmt: skip
V100 = Device(
    device_id="v100-sxm2-16gb", arch="volta", memory_bytes=16 * 2**30, memory_bandwidth_bytes_per_s=9e11,
    peak_flops=(("fp16", 125e12), ("fp32", 15.7e12)),
)  # fmt: skip
CPU = Device(
    device_id="cpu", arch="x86", kind="cpu", memory_bytes=8 * 2**30, memory_bandwidth_bytes_per_s=2e10, peak_flops=(("fp32", 1.6e11),)
)  # fmt: skip


def pool(device: Device = H100, nodes: int = 1, per_node: int = 8) -> NodePool:
    """`nodes` hosts of `per_node` devices: NVLink 450 GB/s inside, 50 GB/s per device outside."""
    return NodePool(
        device=device, num_nodes=nodes, devices_per_node=per_node, fast_domain=per_node,
        fast_link=Link(kind="nvlink", bandwidth_bytes_per_s=450e9, latency_s=1e-6),
        network=Link(kind="infiniband", bandwidth_bytes_per_s=50e9, latency_s=5e-6),
        host_link=Link(kind="pcie", bandwidth_bytes_per_s=55e9, latency_s=5e-6), host_memory_bytes=2e12,
    )  # fmt: skip


def cluster(device: Device = H100, nodes: int = 1, per_node: int = 8) -> Cluster:
    """One pool."""
    return Cluster(name=f"{per_node}x{device.device_id}*{nodes}", pools=(pool(device, nodes, per_node),))


def gemm(name: str, m: int, n: int, k: int, *, backward: bool = False, dtype: str = "bf16") -> Compute:
    """One plain GEMM."""
    size = 4.0 if dtype == "fp32" else 2.0
    return Compute(
        name=name, op_class="gemm", flops=2.0 * m * n * k, m=m, n=n, k=k, read_bytes=size * (m * k + n * k), write_bytes=size * m * n,
        backward=backward, dtype=dtype,
    )  # fmt: skip


def elementwise(name: str, read_bytes: float, write_bytes: float, op_class: str = "elementwise") -> Compute:
    """One bandwidth-bound kernel."""
    return Compute(name=name, op_class=op_class, read_bytes=read_bytes, write_bytes=write_bytes)


def layer(*, tokens: int, sequence: int, hidden: int, ffn: int, heads: int, kv_heads: int, tp: int = 1, dtype: str = "bf16") -> BlockWork:
    """One Llama layer on one rank: eager kernels, plain tensor parallelism (all-reduce)."""
    size = 4 if dtype == "fp32" else 2
    head = hidden // heads
    wide = tokens * hidden * size
    kv = kv_heads * head // tp
    local, inner = hidden // tp, ffn // tp
    matmuls = [
        ("q", local, hidden),
        ("k", kv, hidden),
        ("v", kv, hidden),
        ("o", hidden, local),
        ("gate", inner, hidden),
        ("up", inner, hidden),
        ("down", hidden, inner),
    ]
    attention_flops = 2.0 * (tokens // sequence) * (heads // tp) * sequence**2 * 2 * head / 2

    def attention(backward: bool) -> Compute:
        return Compute(
            name="attention", op_class="attention", flops=attention_flops * (2.5 if backward else 1.0), batch=tokens // sequence, heads=heads // tp,
            kv_heads=max(1, kv_heads // tp), m=sequence, n=sequence, k=head, v_dim=head, causal=True, backward=backward, dtype=dtype,
            read_bytes=3.0 * tokens * local * size, write_bytes=1.0 * tokens * local * size,
        )  # fmt: skip

    reduce = Collective(name="tp", kind="all_reduce", full_bytes=wide, axis="tp", dtype=dtype)
    glue = [elementwise(f"norm.{index}", wide * 3, wide * 3, "norm") for index in range(2)] + [elementwise("residual", wide * 4, wide * 2)]
    gated = tokens * inner * size
    forward: list[Work] = [*glue, elementwise("swiglu", 4.0 * gated, 2.0 * gated), elementwise("rope", 3.0 * wide / tp, 2.0 * wide / tp)]
    forward += [gemm(name, tokens, n, k, dtype=dtype) for name, n, k in matmuls]
    forward += [attention(False), reduce, reduce]
    backward: list[Work] = [
        *glue,
        elementwise("swiglu.b", 6.0 * gated, 4.0 * gated),
        elementwise("rope.b", 3.0 * wide / tp, 2.0 * wide / tp),
        attention(True),
        reduce,
        reduce,
    ]
    for name, n, k in matmuls:
        backward += [gemm(f"{name}.dgrad", tokens, k, n, dtype=dtype), gemm(f"{name}.wgrad", n, k, tokens, dtype=dtype, backward=True)]
    saved = (MemoryItem(name="activations", num_bytes=tokens * size * (4.0 * hidden + 4.0 * local + 2.0 * kv + 4.0 * inner)),)
    return BlockWork(
        kind_id="layer", forward=tuple(forward), backward=tuple(backward), saved=saved, output_bytes=wide,
        parameters=ParameterShard(dense=sum(n * k for _, n, k in matmuls) + 2.0 * hidden), forward_peak_bytes=saved[0].num_bytes + wide,
        backward_peak_bytes=4.0 * gated,
    )  # fmt: skip


def head(*, tokens: int, hidden: int, vocab: int, tp: int = 1) -> BlockWork:
    """Final norm, output projection and loss in fp32."""
    local = vocab // tp
    logits = tokens * local * 2.0
    return BlockWork(
        kind_id="head", role="head",
        forward=(gemm("head", tokens, local, hidden), elementwise("loss", 5 * logits, 4 * logits, "cross_entropy")),
        backward=(
            elementwise("loss.b", 4 * logits, 3 * logits, "cross_entropy"), gemm("head.dgrad", tokens, hidden, local),
            gemm("head.wgrad", local, hidden, tokens),
        ),
        parameters=ParameterShard(dense=float(local * hidden)), saved=(MemoryItem(name="logits", num_bytes=3.0 * logits),), forward_peak_bytes=5.0 * logits,
        backward_peak_bytes=3.0 * logits, logits_bytes=3.0 * logits,
    )  # fmt: skip


def embedding(*, tokens: int, hidden: int, vocab: int, tp: int = 1) -> BlockWork:
    """Token embedding."""
    wide = tokens * hidden * 2.0
    return BlockWork(
        kind_id="embedding", role="embedding", forward=(elementwise("embed", wide, wide, "embedding"),),
        backward=(elementwise("embed.b", 2 * wide, 2.0 * wide, "embedding"),), parameters=ParameterShard(dense=float(vocab // tp * hidden)),
        saved=(MemoryItem(name="ids", num_bytes=tokens * 8.0),), output_bytes=wide, forward_peak_bytes=wide,
    )  # fmt: skip


def llama(
    *,
    mesh: Mesh,
    layers: int = 32,
    hidden: int = 4096,
    ffn: int = 14336,
    heads: int = 32,
    kv_heads: int = 8,
    vocab: int = 128256,
    sequence: int = 8192,
    micro_batch: int = 1,
    num_micro_batches: int = 1,
    zero_stage: int = 3,
    schedule: str = "none",
    vpp: int = 1,
    parameter_dtype: str = "fp32",
    gradient_dtype: str = "fp32",
    optimizer: str = "adamw",
    compiled: bool = False,
) -> StepWork:
    """A decoder of equal layers cut as evenly as possible; embedding on the first stage, head on the last."""
    tokens = micro_batch * sequence
    sizes = {"tokens": tokens, "hidden": hidden, "vocab": vocab, "tp": mesh.tp}
    block = layer(tokens=tokens, sequence=sequence, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads, tp=mesh.tp)
    count = mesh.pp * vpp
    stages = []
    for index in range(count):
        runs = [(block, layers // count + (index < layers % count))]
        if index == 0:
            runs.insert(0, (embedding(**sizes), 1))
        if index == count - 1:
            runs.append((head(**sizes), 1))
        boundary = tokens * hidden * 2.0 if index else 0.0
        stages.append(StageWork(stage_index=index, rank_index=index % mesh.pp, blocks=tuple(runs), boundary_bytes=boundary))
    step_tokens = float(tokens * num_micro_batches * mesh.dp)
    parameters = layers * block.parameters.dense * mesh.tp + hidden * vocab
    return StepWork(
        stages=tuple(stages), mesh=mesh, schedule=schedule, vpp=vpp, num_micro_batches=num_micro_batches, zero_stage=zero_stage, compute_dtype="bf16",
        parameter_dtype=parameter_dtype, gradient_dtype=gradient_dtype, optimizer=optimizer, tokens_per_step=step_tokens,
        model_flops_per_step=step_tokens * (6.0 * parameters + 6.0 * layers * hidden * sequence), compiled=compiled,
    )  # fmt: skip
