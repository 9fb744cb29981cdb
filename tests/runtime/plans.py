"""Plans filled by hand for tests: no search, no cost model."""

from __future__ import annotations

from typing import Any

from costmodel.estimate import Estimate, Line, StageMemory
from costmodel.hardware import Cluster, Device, Link, NodePool
from costmodel.mesh import Mesh
from planner.job import Job
from planner.plan import Plan, Proof, Stage
from planner.strategy import Strategy

GPT_LAYOUTS = (
    ("embed", "vocab"),
    ("positions", "replicate"),
    *((f"blocks.*.{name}", "replicate") for name in ("attention_norm", "mlp_norm")),
    *((f"blocks.*.attention.{name}_proj", "column") for name in "qkv"),
    ("blocks.*.attention.out_proj", "row"),
    ("blocks.*.mlp.up_proj", "column"),
    ("blocks.*.mlp.down_proj", "row"),
    ("norm", "replicate"),
    ("head", "vocab"),
)

LLAMA_LAYOUTS = (
    ("model.embed_tokens", "vocab"),
    *((f"model.layers.*.{name}", "replicate") for name in ("input_layernorm", "post_attention_layernorm")),
    *((f"model.layers.*.self_attn.{name}_proj", "column") for name in "qkv"),
    ("model.layers.*.self_attn.o_proj", "row"),
    *((f"model.layers.*.mlp.{name}_proj", "column") for name in ("gate", "up")),
    ("model.layers.*.mlp.down_proj", "row"),
    ("model.norm", "replicate"),
    ("lm_head", "vocab"),
)


def cluster(num_devices: int) -> Cluster:
    """CPU ranks of this machine."""
    link = Link(kind="loopback", bandwidth_bytes_per_s=1e9, latency_s=1e-4)
    device = Device(
        device_id="cpu", arch="cpu", memory_bytes=2e9, memory_bandwidth_bytes_per_s=1e10, peak_flops=(("fp32", 1e11),), kind="cpu"
    )
    pool = NodePool(
        device=device, num_nodes=1, devices_per_node=num_devices, fast_domain=num_devices, fast_link=link, network=link, host_link=link,
        host_memory_bytes=1e10,
    )  # fmt: skip
    return Cluster(name="local", pools=(pool,))


def estimate(num_stages: int) -> Estimate:
    """An estimate with every field set and nothing in it."""
    stages = tuple(
        StageMemory(
            rank_index=index,
            classes=(Line(name="parameters", amount=1.0),),
            init_peak_bytes=1.0,
            step_peak_bytes=1.0,
            optimizer_peak_bytes=1.0,
            in_flight=1.0,
        )
        for index in range(num_stages)
    )
    return Estimate(
        step_s=1.0, time=(), compute_by_class=(), communication_by_axis=(), hidden_communication_s=0.0, tokens_per_s=1.0,
        tokens_per_s_per_device=1.0, mfu_frac=0.1, hfu_frac=0.1, mfu_denominator="none", stages=stages, usable_bytes=2e9, host_bytes_per_node=0.0,
    )  # fmt: skip


def make_plan(
    *,
    chain: str = "blocks",
    num_layers: int = 4,
    layouts: tuple[tuple[str, str], ...] = (),
    mesh: dict[str, int] | None = None,
    global_batch: int = 8,
    seq_len: int = 16,
    precision: str = "fp32",
    optimizer: str = "adamw",
    ends: tuple[str, str] = ("embed", "head"),
    **strategy: Any,
) -> Plan:
    """A plan for a model whose blocks are `chain`.0 .. `chain`.(num_layers - 1); `strategy` are fields of Strategy."""
    sizes = Mesh(**(mesh or {}))
    vpp = strategy.get("vpp", 1)
    num_stages = sizes.pp * vpp
    counts = strategy.get("stage_layers") or [num_layers // num_stages + (index < num_layers % num_stages) for index in range(num_stages)]
    recompute_layers = strategy.get("recompute_layers", 0)
    stages, start = [], 0
    for index, count in enumerate(counts):
        paths = [f"{chain}.{layer}" for layer in range(start, start + count)]
        paths = ([ends[0]] if index == 0 else []) + paths + ([ends[1]] if index == num_stages - 1 else [])
        wrapped = count if strategy.get("recompute") == "full" else min(recompute_layers, count)
        stages.append(Stage(stage_index=index, rank_index=index % sizes.pp, layer_paths=tuple(paths), recompute_layers=wrapped))
        start += count
    return Plan(
        model="test",
        graph_id="0" * 16,
        cluster=cluster(sizes.num_devices),
        job=Job(global_batch=global_batch, seq_len=seq_len, precision=precision, optimizer=optimizer),
        engine="torch",
        strategy=Strategy(mesh=sizes, **{**strategy, "stage_layers": tuple(counts)}),
        stages=tuple(stages),
        layouts=layouts if sizes.tp > 1 else (),
        estimate=estimate(sizes.pp),
        proof=Proof(objective_s=1.0, bound_s=1.0, gap_frac=0.0, method="hand", status="none", num_candidates=1, num_evaluated=1),
        assumptions=(),
        num_layers=num_layers,
    )
