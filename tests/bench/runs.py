"""Measured runs (one JSON object a line) -> what the planner prices. The shared schema is documented in docs/accuracy.md.

Nothing here knows a source, a model or a GPU by name: shapes come from the row's dimensions (tests.bench.shapes), the runtime from what its software text
contains (tests.bench.stacks), the machine from the catalogue (tests.bench.machines).
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from costmodel.engine import Engine
from costmodel.errors import AutoplanError, InputError
from costmodel.hardware import Cluster
from costmodel.mesh import Mesh
from planner.job import Job
from planner.strategy import SCHEDULES, Strategy
from tests.bench.machines import Machines
from tests.bench.shapes import config_of
from tests.bench.stacks import Stack, engine_of, stack_of

Row = Mapping[str, Any]

# Words of a run's schedule text (lower case, without blanks, - and _) -> ours; the first that occurs wins. ZB-1p and ZB-2p are the automatic schedules under
# the memory of H1 and H2.
SCHEDULE_WORDS: tuple[tuple[str, str], ...] = (
    ("dualpipe", "dualpipev"), ("vhalf", "v_half"), ("vmin", "v_min"), ("zbv", "zbv"), ("zbh1", "zb_h1"), ("zb1p", "zb_h1"),
    ("zbh2", "zb_h2"), ("zb2p", "zb_h2"), ("interleavedzb", "interleaved_zb"), ("breadth", "breadth_first"), ("bfs", "breadth_first"),
    ("interleav", "interleaved_1f1b"), ("1f1bi", "interleaved_1f1b"), ("vpp", "interleaved_1f1b"), ("1f1b", "1f1b"), ("gpipe", "gpipe"),
    ("afab", "gpipe"),
)  # fmt: skip
# Megatron's --hidden-dropout when its arguments are given without it (megatron-core 0.19.2 arguments.py).
MEGATRON_DROPOUT = 0.1
# Published adapters: rank and the attention projections, where a row says "lora" and no more.
LORA_RANK, LORA_TARGETS = 8, ("q_proj", "k_proj", "v_proj", "c_attn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One measured run as the planner's inputs. `config` is a Hugging Face style configuration; `lora`: only adapters train."""

    run_id: str
    source: str
    config: dict[str, Any]
    lora: bool
    cluster: Cluster
    job: Job
    strategy: Strategy
    engine: Engine


def read_rows(paths: list[str]) -> Iterator[dict[str, Any]]:
    """Rows of .jsonl and .csv files, plain or .gz."""
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") if path.endswith(".gz") else Path(path).open(encoding="utf-8") as lines:
            if path.removesuffix(".gz").endswith(".csv"):
                yield from csv.DictReader(lines)
            else:
                yield from (json.loads(line) for line in lines if line.strip())


def problem(row: Row, machines: Machines) -> Problem:
    """The planner's inputs for one row. Raises AutoplanError with the reason when the row cannot be expressed."""
    plan, stack, arguments = row["plan"], stack_of(row), (row.get("extra") or {}).get("model_args") or {}
    tp, cp, pp = (plan.get(axis) or 1 for axis in ("tp", "cp", "pp"))
    schedule, vpp = _schedule(plan, row["model"]["layers"] + _lighter_ends(row))
    stage_layers = _cut(row, stack, pp * vpp)
    if len(stage_layers) < pp * vpp:  # Ranks that hold no layer idle: the step is that of the ranks that do.
        pp = len(stage_layers)
        vpp = 1
        schedule = "none" if pp == 1 else "1f1b" if schedule == "interleaved_1f1b" else schedule
    dp = plan.get("dp") or max(1, row["cluster"]["gpus"] // (pp * tp * cp))
    zero_stage = _zero_stage(plan) if dp * cp > 1 else 0
    engine = engine_of(row, stack, zero_stage, schedule)
    if arguments.get("no-gradient-accumulation-fusion"):
        engine = replace(engine, weight_gradient_placeholders=False)
    shard = dp if zero_stage or (plan.get("ep") or 1) > 1 else 1  # experts are spread over dp_shard
    replicate = plan.get("dp_replicate") or dp // shard
    mesh = Mesh(pp=pp, dp_replicate=replicate, dp_shard=dp // replicate, cp=cp, tp=tp, ep=plan.get("ep") or 1)
    strategy = Strategy(
        mesh=mesh,
        micro_batch=row["job"]["micro_batch"],
        zero_stage=zero_stage,
        sequence_parallel=tp > 1 and _said(plan.get("sequence_parallel"), stack.sequence_parallel),
        schedule=schedule,
        vpp=vpp,
        stage_layers=stage_layers if pp > 1 else (),
        recompute=_recompute(plan, engine),
        cp_kind="all_to_all" if "a2a" in str(plan.get("cp_comm") or "").lower() else "ring",
        flash_attention=cp > 1
        or _said(
            plan.get("flash_attention"),
            stack.flash_attention
            and "unfused" not in str(arguments.get("attention-backend"))
            and arguments.get("transformer-impl") != "local",
        ),
        compile=bool(plan.get("compile")),
    )
    return Problem(
        run_id=row["id"],
        source=row["source"],
        config=config_of(row["model"], arguments, tp),
        lora="lora" in str(row["job"].get("peft") or "").lower(),
        cluster=machines.cluster(row["cluster"], mesh.num_devices),
        job=_job(row, dp, arguments, stack),
        strategy=strategy,
        engine=engine,
    )


def measured_step_s(row: Row) -> float | None:
    """Seconds of the measured step: printed, else from tokens/s per device."""
    measured, tokens = row["measured"], row["measured"].get("tokens_per_s_per_gpu")
    if measured.get("step_time_s"):
        return float(measured["step_time_s"])
    return row["job"]["global_batch"] * row["model"]["seq_len"] / (tokens * row["cluster"]["gpus"]) if tokens else None


def reason(error: AutoplanError) -> str:
    """A refusal's reason without its numbers, so that equal refusals count together."""
    return re.sub(r"\d+", "N", error.what)[:100]


def _said(value: object, default: bool) -> bool:
    return default if value is None else bool(value)


def _job(row: Row, dp: int, arguments: Row, stack: Stack) -> Job:
    job = row["job"]
    dropout = (
        job.get("dropout")
        if job.get("dropout") is not None
        else arguments.get("hidden-dropout", MEGATRON_DROPOUT if arguments else stack.dropout)
    )
    text = (job.get("precision") or "bf16").lower()
    precision = "fp8" if "fp8" in text else next((name for name in ("bf16", "fp16", "fp32") if name in text), "bf16")
    wanted = (job.get("optimizer") or "adamw").lower()
    optimizer = "adamw_8bit" if "8bit" in wanted or "8-bit" in wanted else "sgd" if wanted.startswith("sgd") else "adamw"
    batch, per_pass = job["global_batch"], job["micro_batch"] * dp
    if batch % per_pass and job.get("grad_accum"):
        batch = job["grad_accum"] * per_pass
    return Job(global_batch=batch, seq_len=row["model"]["seq_len"], precision=precision, optimizer=optimizer, dropout=float(dropout))


def _zero_stage(plan: Row) -> int:
    zero, fsdp = plan.get("zero_stage"), plan.get("fsdp")
    if isinstance(fsdp, str) and "optim_grads_params" in fsdp:
        return 3
    if zero is not None:
        return int(zero)
    if fsdp:
        return 2 if isinstance(fsdp, str) and "grad_op" in fsdp.lower() else 3
    return 0 if plan.get("distributed_optimizer") is False else 1


def _recompute(plan: Row, engine: Engine) -> str:
    text = (plan.get("recompute") or "none").lower()
    known = next((name for name in ("none", "selective", "full") if text.startswith(name)), "full")
    return known if known in engine.recompute else "full"


def _schedule(plan: Row, layers: int) -> tuple[str, int]:
    """(schedule, chunks per rank). A text instead of a number of chunks means as many as there are layers for."""
    pp, given = plan.get("pp") or 1, plan.get("vpp")
    if pp == 1:
        return "none", 1
    vpp = -(-layers // pp) if isinstance(given, str) else int(given or 1)
    text = re.sub(r"[\s_-]", "", (plan.get("schedule") or "1f1b").lower())
    name = next((name for word, name in SCHEDULE_WORDS if word in text), None)
    if name is None or name not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        raise InputError(f"schedule {plan.get('schedule')!r} is not modelled", where="plan.schedule", remedy=f"known: {known}")
    if name == "1f1b" and vpp > 1:
        name = "interleaved_1f1b"
    if name == "interleaved_1f1b" and vpp == 1:
        name = "1f1b"
    return name, vpp if name not in ("1f1b", "gpipe", "zb_h1", "zb_h2") else 1


def _cut(row: Row, stack: Stack, chunks: int) -> tuple[int, ...]:
    """Layers of each chunk that holds anything, as launchers cut: evenly, one fewer on the first and last where the row says so, or by running cost."""
    if stack.cut == "cost":
        return _cost_cut(row["model"], chunks)
    lighter = _lighter_ends(row) if chunks > 1 else 0
    base, extra = divmod(row["model"]["layers"] + lighter, chunks)
    counts = [base + (index < extra) for index in range(chunks)]
    if lighter:
        return (counts[0] - 1, *counts[1:-1], counts[-1] - 1)
    return tuple(count for count in counts if count)


def _lighter_ends(row: Row) -> int:
    """2 when the row says that the first and the last stage hold one layer fewer (each makes room for embedding and head), else 0."""
    notes = row.get("notes") or ""
    return 2 if "first and last" in notes and "one layer fewer" in notes else 0


def _cost_cut(model: Row, chunks: int) -> tuple[int, ...]:
    """nanotron (PipelineBlock placement in its trainer): blocks go to a rank until the running sum of costs passes the rank's share. A layer costs
    4 hidden^2 + 3 ffn hidden, the head vocab x hidden; the head may end up alone on a rank, and ranks after it hold nothing."""
    layer = 4 * model["hidden"] ** 2 + 3 * model["ffn_hidden"] * model["hidden"]
    head, layers = (model.get("vocab") or 0) * model["hidden"], model["layers"]
    share, counts, total = (layers * layer + head) / chunks, [0] * chunks, 0.0
    rank = 0
    for _ in range(layers):
        counts[rank] += 1
        total += layer
        if total > share * (rank + 1) and rank + 1 < chunks:
            rank += 1
    return tuple(counts[: rank + 1])
