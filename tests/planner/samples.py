"""A small plan, cluster and pricer for tests that need no model: everything by hand, numbers chosen to be easy to check."""

from __future__ import annotations

from dataclasses import dataclass, field

from costmodel.engine import engine
from costmodel.errors import InputError
from costmodel.estimate import Estimate, Line, StageMemory
from costmodel.hardware import Cluster, Device, Link, NodePool
from costmodel.mesh import Mesh
from planner.job import Job
from planner.outcome import Need
from planner.plan import Alternative, Plan, Proof, Rejection, Stage
from planner.restrict import parse_restrictions
from planner.space import Branch, Extents, Space
from planner.strategy import Strategy

GIB = 2.0**30


def cluster(num_nodes: int = 1, devices_per_node: int = 8, memory_gib: float = 80.0) -> Cluster:
    device = Device(
        device_id="test-gpu", arch="test", memory_bytes=memory_gib * GIB, memory_bandwidth_bytes_per_s=3e12,
        peak_flops=(("bf16", 1e15), ("fp32", 6e13)), source="made up",
    )  # fmt: skip
    link = Link(kind="nvlink", bandwidth_bytes_per_s=450e9, latency_s=1e-6)
    pool = NodePool(
        device=device, num_nodes=num_nodes, devices_per_node=devices_per_node, fast_domain=devices_per_node, fast_link=link,
        network=Link(kind="roce", bandwidth_bytes_per_s=50e9, latency_s=5e-6),
        host_link=Link(kind="pcie", bandwidth_bytes_per_s=64e9, latency_s=2e-6), host_memory_bytes=1e12,
    )  # fmt: skip
    return Cluster(name=f"{devices_per_node}xtest*{num_nodes}", pools=(pool,), notes=("a made-up device",))


def estimate_of(step_s: float, peak_bytes: float, usable_bytes: float = 80 * GIB, ranks: int = 2) -> Estimate:
    stages = tuple(
        StageMemory(
            rank_index=rank,
            classes=(
                Line(name="parameters", amount=0.25 * peak_bytes, detail="stored in bf16"),
                Line(name="activations", amount=0.75 * peak_bytes - rank),
            ),
            init_peak_bytes=0.25 * peak_bytes, step_peak_bytes=peak_bytes - rank, optimizer_peak_bytes=0.5 * peak_bytes, in_flight=float(ranks - rank),
        )
        for rank in range(ranks)
    )  # fmt: skip
    return Estimate(
        step_s=step_s,
        time=(Line(name="compute", amount=0.75 * step_s, detail="3 x 4"), Line(name="bubble", amount=0.25 * step_s)),
        compute_by_class=(Line(name="gemm", amount=0.75 * step_s),),
        communication_by_axis=(Line(name="tp", amount=0.0),),
        hidden_communication_s=0.125,
        tokens_per_s=1024 / step_s, tokens_per_s_per_device=128 / step_s, mfu_frac=0.4, hfu_frac=0.45,
        mfu_denominator="model flops / (8 x 1000 TFLOP/s bf16 dense)",
        stages=stages, usable_bytes=usable_bytes, host_bytes_per_node=32 * GIB, notes=("an estimate by hand",),
    )  # fmt: skip


def plan() -> Plan:
    strategy = Strategy(mesh=Mesh(pp=2, dp_shard=2, tp=2), micro_batch=2, zero_stage=3, schedule="1f1b", recompute="selective")
    other = Strategy(mesh=Mesh(pp=4, tp=2), micro_batch=1, schedule="1f1b")
    return Plan(
        model="toy", graph_id="0123456789abcdef", cluster=cluster(), job=Job(global_batch=32, seq_len=32), engine="torch", strategy=strategy,
        stages=(
            Stage(stage_index=0, rank_index=0, layer_paths=("embed", "layers.0", "layers.1")),
            Stage(stage_index=1, rank_index=1, layer_paths=("layers.2", "layers.3", "head")),
        ),
        layouts=(("layers.*.up", "column"), ("layers.*.down", "row")),
        estimate=estimate_of(2.0, 60 * GIB),
        proof=Proof(
            objective_s=2.0, bound_s=2.0, gap_frac=0.0, method="best-first branch and bound", status="optimal", num_candidates=1234, num_evaluated=5,
        ),
        assumptions=("a made-up device",),
        alternatives=(Alternative(strategy=other, step_s=2.5, peak_bytes=70 * GIB, remark="bubble +500 ms"),),
        levers=(
            Alternative(strategy=other, step_s=1.5, peak_bytes=100 * GIB, remark="no recompute", fits=False),
            Alternative(strategy=other, step_s=1.25, peak_bytes=50 * GIB, remark="16 devices"),
            Alternative(strategy=other, step_s=3.0, peak_bytes=40 * GIB, remark="full recompute"),
        ),
        rejections=(Rejection(reason="the estimated peak does not fit", count=17, example="pp 1: 90.0 GiB"),),
        num_parameters=1_000_000, num_layers=4, tied=(("embed.weight", "head.weight"),),
    )  # fmt: skip


def space(fix: str = "", *, num_nodes: int = 1, devices_per_node: int = 8, engine_name: str = "torch", **changes: int) -> Space:
    values = {"num_layers": 4, "num_experts": 0, "global_batch": 16, "seq_len": 64, "heads": 8, **changes}
    return Space(
        extents=Extents(num_layers=values["num_layers"], num_experts=values["num_experts"], tp_extents=(("heads", values["heads"]),)),
        cluster=cluster(num_nodes, devices_per_node),
        job=Job(global_batch=values["global_batch"], seq_len=values["seq_len"]),
        engine=engine(engine_name),
        restrictions=parse_restrictions(fix),
    )


@dataclass(slots=True, kw_only=True)
class FakePricer:
    """Prices by a formula with the shape of the truth: work divides over devices, pipelines idle, recompute trades time for memory.

    `slack` loosens the bounds (1 = as tight as the estimate). `calls` counts full estimates.
    """

    space: Space
    usable_bytes: float = 40 * GIB
    slack: float = 0.8
    calls: int = 0
    broken: tuple[int, ...] = ()
    seen: list[Strategy] = field(default_factory=list)

    def least_states_bytes(self, mesh: Mesh, zero_stage: int) -> Need:
        return Need(peak_bytes=self.slack * self.states_bytes(mesh, zero_stage))

    def least_branch_s(self, branch: Branch, level: int) -> float:
        return (0.9, 0.95, 1.0)[level] * min(map(self.least_s, branch.strategies()))

    def least_s(self, strategy: Strategy) -> float:
        return self.slack * self.formula(strategy)[0]

    def sharp_s(self, strategy: Strategy) -> float:
        return (1.0 + self.slack) / 2.0 * self.formula(strategy)[0]

    def least_bytes(self, strategy: Strategy, limit_bytes: float) -> Need:
        return Need(peak_bytes=self.slack * self.formula(strategy)[1])

    def estimate(self, strategy: Strategy) -> Estimate:
        self.calls += 1
        self.seen.append(strategy)
        if strategy.micro_batch in self.broken:
            raise InputError(f"micro-batch {strategy.micro_batch} is broken", where="Strategy.micro_batch", remedy="choose another")
        step_s, peak_bytes = self.formula(strategy)
        return estimate_of(step_s, peak_bytes, self.usable_bytes, ranks=strategy.mesh.pp)

    def formula(self, strategy: Strategy) -> tuple[float, float]:
        mesh, job = strategy.mesh, self.space.job
        layers = self.space.extents.num_layers / (mesh.pp * strategy.vpp)
        again = {"none": 0.0, "selective": 0.1, "full": 1.0, "first_k": strategy.recompute_layers / layers}[strategy.recompute]
        micro_batches = strategy.num_micro_batches(job.global_batch)
        one = strategy.micro_batch**0.9 * (3 + again) / (mesh.tp * mesh.pp * mesh.cp)
        communication = (
            0.01 * (mesh.tp - 1) * strategy.micro_batch * (1.0 if strategy.sequence_parallel else 1.3) + 0.02 * strategy.zero_stage
        )
        step_s = one * (micro_batches + (mesh.pp - 1) / strategy.vpp) + communication * micro_batches + 0.05 * (mesh.dp > 1)
        shards = {0: (1, 1, 1), 1: (1, 1, mesh.dp_shard), 2: (1, mesh.dp_shard, mesh.dp_shard), 3: (mesh.dp_shard,) * 3}[
            strategy.zero_stage
        ]
        states = 16 * GIB * sum(part / shard for part, shard in zip((1, 1, 6), shards, strict=True)) / (mesh.tp * mesh.pp)
        in_flight = micro_batches if strategy.schedule == "gpipe" else min(micro_batches, mesh.pp)
        kept = {"none": 1.0, "selective": 0.7, "full": 0.1, "first_k": 1 - 0.9 * strategy.recompute_layers / layers}[strategy.recompute]
        activations = 4 * GIB * strategy.micro_batch * in_flight * kept / (mesh.pp * mesh.tp)
        return step_s, states + activations

    def states_bytes(self, mesh: Mesh, zero_stage: int) -> float:
        shards = {0: (1, 1, 1), 1: (1, 1, mesh.dp_shard), 2: (1, mesh.dp_shard, mesh.dp_shard), 3: (mesh.dp_shard,) * 3}[zero_stage]
        return 16 * GIB * sum(part / shard for part, shard in zip((1, 1, 6), shards, strict=True)) / (mesh.tp * mesh.pp)
