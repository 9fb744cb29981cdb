"""Plans made by hand for tests of what reads plans. Their estimates are placeholders; their decisions are complete and consistent."""

from __future__ import annotations

from costmodel.estimate import Estimate, Line, StageMemory
from costmodel.hardware import Cluster, Device, Link, NodePool
from planner.job import Job
from planner.models.spec import Experts, LatentAttention, ModelSpec
from planner.plan import Plan, Proof, Stage
from planner.strategy import Strategy

LLAMA_8B = ModelSpec(
    name="llama3-8b", family="llama", num_layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256, rope_dim=128
)  # fmt: skip
LLAMA_70B = ModelSpec(
    name="llama3-70b", family="llama", num_layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=28672, vocab=128256, rope_dim=128
)  # fmt: skip
GPT2 = ModelSpec(
    name="gpt2", family="gpt2", num_layers=12, hidden=768, heads=12, kv_heads=12, head_dim=64, ffn=3072, vocab=50257, max_sequence=1024,
    activation="gelu_new", tied=True,
)  # fmt: skip
MIXTRAL = ModelSpec(
    name="mixtral-8x7b", family="mixtral", num_layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=32000, rope_dim=128,
    experts=Experts(num_experts=8, top_k=2, ffn=14336, router="top_k"),
)  # fmt: skip
QWEN_30B_A3B = ModelSpec(
    name="qwen3-30b-a3b", family="qwen3_moe", num_layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, ffn=6144, vocab=151936,
    rope_dim=128, qk_norm="head", experts=Experts(num_experts=128, top_k=8, ffn=768),
)  # fmt: skip
DEEPSEEK_16B = ModelSpec(
    name="deepseek-v2-lite", family="deepseek_v2", num_layers=27, hidden=2048, heads=16, kv_heads=16, head_dim=192, ffn=10944, vocab=102400,
    experts=Experts(num_experts=64, top_k=6, ffn=1408, shared_ffn=2816, first_dense=1, normalized=False),
    latent=LatentAttention(q_rank=0, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
)  # fmt: skip


def sample_cluster(num_nodes: int = 1, *, devices_per_node: int = 8, kind: str = "gpu", arch: str = "hopper") -> Cluster:
    """Equal hosts of 80 GB devices."""
    device = Device(
        device_id="H100" if kind == "gpu" else "cpu",
        arch=arch,
        memory_bytes=80e9,
        memory_bandwidth_bytes_per_s=3.35e12,
        peak_flops=(("bf16", 989e12),),
        kind=kind,
    )
    link = Link(kind="link", bandwidth_bytes_per_s=400e9, latency_s=5e-6)
    pool = NodePool(
        device=device, num_nodes=num_nodes, devices_per_node=devices_per_node, fast_domain=devices_per_node, fast_link=link, network=link,
        host_link=link, host_memory_bytes=2e12,
    )  # fmt: skip
    return Cluster(name=f"{devices_per_node}x{device.device_id}*{num_nodes}", pools=(pool,))


def sample_plan(
    spec: ModelSpec | None,
    strategy: Strategy,
    *,
    engine: str,
    num_layers: int = 0,
    model: str = "a-model",
    job: Job | None = None,
    cluster: Cluster | None = None,
) -> Plan:
    """A plan with `strategy`; stages follow strategy.stage_layers, or split the layers as evenly as they go."""
    layers = spec.num_layers if spec else num_layers
    num_devices = strategy.mesh.num_devices
    return Plan(
        model=model,
        graph_id="0123456789abcdef",
        cluster=cluster or sample_cluster(max(1, num_devices // 8), devices_per_node=min(8, num_devices)),
        job=job or Job(global_batch=64, seq_len=4096),
        engine=engine,
        strategy=strategy,
        stages=_stages(layers, strategy),
        layouts=(("layers.*.self_attn.q_proj", "column"),) if strategy.mesh.tp > 1 else (),
        estimate=_estimate(),
        proof=Proof(objective_s=1.0, bound_s=1.0, gap_frac=0.0, method="by hand", status="sample", num_candidates=1, num_evaluated=1),
        assumptions=("made by hand",),
        num_layers=layers,
        spec=spec,
    )


def _stages(num_layers: int, strategy: Strategy) -> tuple[Stage, ...]:
    chunks = strategy.mesh.pp * strategy.vpp
    counts = strategy.stage_layers or tuple(num_layers // chunks + (index < num_layers % chunks) for index in range(chunks))
    stages, first = [], 0
    for index, count in enumerate(counts):
        paths = [f"model.layers.{first + offset}" for offset in range(count)]
        paths = ["model.embed_tokens"] * (index == 0) + paths + ["lm_head"] * (index == chunks - 1)
        recompute = {"full": count, "first_k": min(count, strategy.recompute_layers)}.get(strategy.recompute, 0)
        stages.append(Stage(stage_index=index, rank_index=index % strategy.mesh.pp, layer_paths=tuple(paths), recompute_layers=recompute))
        first += count
    return tuple(stages)


def _estimate() -> Estimate:
    memory = StageMemory(
        rank_index=0,
        classes=(Line(name="parameters", amount=16e9),),
        init_peak_bytes=20e9,
        step_peak_bytes=60e9,
        optimizer_peak_bytes=30e9,
        in_flight=1,
    )
    return Estimate(
        step_s=1.0, time=(Line(name="compute", amount=1.0),), compute_by_class=(), communication_by_axis=(), hidden_communication_s=0.0,
        tokens_per_s=1e5, tokens_per_s_per_device=1e4, mfu_frac=0.4, hfu_frac=0.5, mfu_denominator="bf16 dense", stages=(memory,), usable_bytes=75e9,
        host_bytes_per_node=0.0,
    )  # fmt: skip
