"""What a run's software text says about its runtime: engine, defaults of switches that rows leave out, how layers are cut. Data: a new stack is a row here,
and a stack nobody listed is priced by what its plan asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from costmodel.engine import ENGINES, Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """words: any of them in the text selects the row. engines: candidates, best first. sequence_parallel: under tp > 1 unless said otherwise.
    flash_attention: unless said otherwise. selective_recompute: what the stack's stock policy means by it, where that is not the engine's.
    flash_attention: unless said otherwise. dropout: unless said otherwise; Megatron's own default is 0.1.
    cut: "even" layers per chunk, or "cost" (tests.bench.runs).
    """

    words: tuple[str, ...]
    engines: tuple[str, ...]
    sequence_parallel: bool = False
    cut: str = "even"
    flash_attention: bool = True
    selective_recompute: str = ""
    dropout: float = 0.0


STACKS: tuple[Stack, ...] = (
    Stack(words=("megatron-fsdp", "megatron_fsdp"), engines=("megatron_fsdp", "megatron"), sequence_parallel=True),
    Stack(words=("torchtitan", "fsdp2"), engines=("torchtitan",), sequence_parallel=True, selective_recompute="keep_every_other_matmul"),
    Stack(words=("nanotron",), engines=("nanotron", "megatron"), sequence_parallel=True, cut="cost"),
    Stack(words=("megatron-deepspeed", "megatron_deepspeed"), engines=("megatron_deepspeed", "megatron")),
    Stack(words=("nemo", "megatron-bridge"), engines=("megatron",), sequence_parallel=True),
    Stack(words=("megatron-lm fork",), engines=("megatron_local", "megatron"), flash_attention=False, dropout=0.1),
    Stack(words=("megatron",), engines=("megatron",)),
    Stack(words=("deepspeed",), engines=("deepspeed", "torchtitan", "megatron")),
    Stack(words=("llm-foundry", "composer", "fsdp", "litgpt", "lightning"), engines=("fsdp1", "fsdp", "torchtitan")),
    Stack(words=("transformers", "hugging face", "peft", "trl", "axolotl"), engines=("hf_trainer", "torch")),
)
PLAIN = Stack(words=(), engines=("megatron", "torchtitan", "torch"))
# Runs that name the attention kernel they picked (`plan.extra.kernel`) and no runtime: layers written in plain torch around it.
PICKED_KERNEL = Stack(words=(), engines=("megatron_deepspeed", "megatron"))


def stack_of(row: Mapping[str, Any]) -> Stack:
    """The first row of STACKS whose words occur in the engine, FSDP or software text, in that order of trust."""
    plan = row["plan"]
    for text in ((plan.get("extra") or {}).get("engine"), plan.get("fsdp"), row.get("software")):
        low = text.lower() if isinstance(text, str) else ""
        for stack in STACKS:
            if any(word in low for word in stack.words):
                return stack
    return PICKED_KERNEL if (plan.get("extra") or {}).get("kernel") else PLAIN


def engine_of(row: Mapping[str, Any], stack: Stack, zero_stage: int, schedule: str) -> Engine:
    """The first candidate that can run `zero_stage`, as the row says it was run: a fork that ran a schedule can run it, a stack that sharded further than its
    engine does so as fully_shard does; overlap switches are the row's."""
    known = {engine.name: engine for engine in ENGINES}
    candidates = [known[name] for name in stack.engines if name in known] or [known[name] for name in PLAIN.engines]
    engine = next((item for item in candidates if zero_stage in item.zero_stages), candidates[0])
    if zero_stage not in engine.zero_stages:
        engine = replace(engine, zero_stages=(*engine.zero_stages, zero_stage), fully_shard=engine.fully_shard or zero_stage >= 2)
    if stack.selective_recompute:
        engine = replace(engine, selective_recompute=stack.selective_recompute)
    if schedule != "none" and schedule not in engine.schedules:
        engine = replace(engine, schedules=(*engine.schedules, schedule))
    return _overlaps(engine, row["plan"].get("overlap"))


def _overlaps(engine: Engine, said: object) -> Engine:
    if isinstance(said, Mapping):
        return replace(
            engine, overlap_gradient_reduce=bool(said.get("grad_reduce", engine.overlap_gradient_reduce)),
            overlap_parameter_gather=bool(said.get("param_gather", engine.overlap_parameter_gather)),
        )  # fmt: skip
    if isinstance(said, str) and said.lower().startswith("none"):
        return replace(engine, overlap_gradient_reduce=False, overlap_parameter_gather=False, overlap_tensor_parallel=False)
    return engine
