"""Measured runs (one JSON object a line) -> what `planner.estimate` takes. The shared schema is documented in docs/accuracy.md.

Nothing here knows a source, a model or a GPU by name: shapes come from the row's dimensions, the engine from what its software text contains
(`ENGINE_WORDS`, data), the device from the cluster catalogue.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodel.errors import AutoplanError, InputError
from costmodel.hardware import Cluster
from costmodel.mesh import Mesh
from planner.job import Job
from planner.strategy import Strategy

# (words that appear in `software` or `plan.extra.engine`, engine). First match wins; without one, FSDP rows are "torchtitan" and the rest "megatron".
ENGINE_WORDS: tuple[tuple[str, str], ...] = (
    ("torchtitan", "torchtitan"),
    ("nanotron", "megatron"),
    ("megatron", "megatron"),
    ("nemo", "megatron"),
)

# Words of a run's schedule text -> ours; schedules the estimator does not have are refused, not approximated.
SCHEDULE_WORDS: tuple[tuple[str, str], ...] = (
    ("interleaved", "interleaved_1f1b"),
    ("1f1b-i", "interleaved_1f1b"),
    ("1f1b", "1f1b"),
    ("gpipe", "gpipe"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One measured run as the planner's inputs. `config` is a Hugging Face style configuration."""

    run_id: str
    source: str
    config: dict[str, Any]
    cluster: Cluster
    job: Job
    strategy: Strategy
    engine: str


def read_rows(paths: list[str]) -> Iterator[dict[str, Any]]:
    """Rows of .jsonl or .jsonl.gz files."""
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") if path.endswith(".gz") else Path(path).open(encoding="utf-8") as lines:
            for line in lines:
                if line.strip():
                    yield json.loads(line)


def problem(row: dict[str, Any]) -> Problem:
    """The planner's inputs for one row. Raises AutoplanError with the reason when the row cannot be expressed."""
    return Problem(
        run_id=row["id"],
        source=row["source"],
        config=_config(row["model"]),
        cluster=_cluster(row["cluster"]),
        job=_job(row),
        strategy=_strategy(row),
        engine=_engine(row),
    )


def reason(error: AutoplanError) -> str:
    """A refusal's reason without its numbers, so that equal refusals count together."""
    return "".join(char for char in error.what if not char.isdigit())[:100]


def _engine(row: dict[str, Any]) -> str:
    text = f"{row.get('software') or ''} {(row['plan'].get('extra') or {}).get('engine') or ''}".lower()
    for word, name in ENGINE_WORDS:
        if word in text:
            return name
    return "torchtitan" if row["plan"].get("fsdp") else "megatron"


def _cluster(cluster: dict[str, Any]) -> Cluster:
    per_node = min(cluster["gpus_per_node"], cluster["gpus"])
    return Cluster.parse(f"{per_node}x{cluster['gpu']}*{-(-cluster['gpus'] // per_node)}")


def _job(row: dict[str, Any]) -> Job:
    text = (row["job"].get("precision") or "bf16").lower()
    precision = "fp8" if "fp8" in text else next((name for name in ("bf16", "fp16", "fp32") if name in text), "bf16")
    return Job(global_batch=row["job"]["global_batch"], seq_len=row["model"]["seq_len"], precision=precision)


def _strategy(row: dict[str, Any]) -> Strategy:
    plan = row["plan"]
    pp, tp, cp = (plan.get(axis) or 1 for axis in ("pp", "tp", "cp"))
    dp = plan.get("dp") or row["cluster"]["gpus"] // (pp * tp * cp)
    zero = plan.get("zero_stage")
    if zero is None:
        zero = 3 if plan.get("fsdp") else 1
    vpp = row["model"]["layers"] // pp if isinstance(plan.get("vpp"), str) else plan.get("vpp") or 1
    schedule = _schedule(plan, pp, vpp)
    recompute = plan.get("recompute") or "none"
    shard = dp if zero else 1
    return Strategy(
        mesh=Mesh(pp=pp, dp_replicate=dp // shard, dp_shard=shard, cp=cp, tp=tp, ep=plan.get("ep") or 1),
        micro_batch=row["job"]["micro_batch"],
        zero_stage=zero if dp * cp > 1 else 0,
        sequence_parallel=tp > 1 and plan.get("sequence_parallel") is not False,
        schedule=schedule,
        vpp=vpp if schedule == "interleaved_1f1b" else 1,
        recompute=recompute if recompute in ("none", "selective", "full") else "full",
        flash_attention=plan.get("flash_attention") is not False,
        compile=bool(plan.get("compile")),
    )


def _schedule(plan: dict[str, Any], pp: int, vpp: int) -> str:
    if pp == 1:
        return "none"
    text = (plan.get("schedule") or "1f1b").lower()
    for word, name in SCHEDULE_WORDS:
        if word in text:
            return "interleaved_1f1b" if vpp > 1 else name
    raise InputError(
        f"schedule {text!r} is not modelled", where="plan.schedule", remedy=f"known: {', '.join(w for w, _ in SCHEDULE_WORDS)}"
    )


def _config(model: dict[str, Any]) -> dict[str, Any]:
    hidden, heads, layers = model["hidden"], model["heads"], model["layers"]
    vocab = model.get("vocab") or 50257
    tied = model.get("tied_embeddings") is not False
    moe, mla = model.get("moe"), model.get("mla")
    common = {
        "hidden_size": hidden, "intermediate_size": model["ffn_hidden"], "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": model.get("kv_heads") or heads, "vocab_size": vocab, "tie_word_embeddings": tied,
        "max_position_embeddings": model["seq_len"],
    }  # fmt: skip
    if mla:
        return {**common, "model_type": "deepseek_v2", **mla, **_moe_deepseek(moe or {})}
    if moe:
        return {
            **common, "model_type": "qwen3_moe", "num_experts": moe["experts"], "num_experts_per_tok": moe["top_k"],
            "moe_intermediate_size": moe["moe_ffn_hidden"], "head_dim": model.get("head_dim") or hidden // heads,
        }  # fmt: skip
    if _is_gated(model):
        return {**common, "model_type": "llama"}
    return {
        "model_type": "gpt2", "n_embd": hidden, "n_inner": model["ffn_hidden"], "n_layer": layers, "n_head": heads, "vocab_size": vocab,
        "n_positions": model["seq_len"], "tie_word_embeddings": tied,
    }  # fmt: skip


def _is_gated(model: dict[str, Any]) -> bool:
    """Whether the feed-forward has a gate: by the parameter count when it is given, else by the 4 x hidden rule of ungated models."""
    hidden, ffn, vocab = model["hidden"], model["ffn_hidden"], model.get("vocab") or 50257
    if not model.get("params_b"):
        return bool(ffn != 4 * hidden)
    embeddings = vocab * hidden * (1 if model.get("tied_embeddings") is not False else 2)
    attention = 2 * hidden * hidden * (1 + (model.get("kv_heads") or model["heads"]) / model["heads"])

    def miss(matrices: int) -> float:
        return float(abs(embeddings + model["layers"] * (attention + matrices * hidden * ffn) - model["params_b"] * 1e9))

    return miss(3) < miss(2)


def _moe_deepseek(moe: dict[str, Any]) -> dict[str, Any]:
    return {
        "n_routed_experts": moe.get("experts"), "num_experts_per_tok": moe.get("top_k"), "moe_intermediate_size": moe.get("moe_ffn_hidden"),
        "n_shared_experts": moe.get("shared_experts") or 0, "first_k_dense_replace": moe.get("dense_first_layers") or 0,
    }  # fmt: skip
