"""What the ranks of the pool run for tests.runtime.test_memory. Imported by the workers, not collected."""

from __future__ import annotations

from typing import Any

import torch

import runtime
from costmodel.engine import engine
from planner.models import resolve, spec_graph
from planner.pricing import estimate_graph
from runtime.measure import build_meter
from tests.runtime.cases import logits_loss
from tests.runtime.plans import LLAMA_LAYOUTS, make_plan

SEQUENCE, VOCAB, BATCH = 256, 512, 8
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": SEQUENCE, "tie_word_embeddings": False,
}  # fmt: skip


def predicted_and_counted(*, plan: dict[str, Any]) -> tuple[float, float]:
    """This rank's predicted peak of tensors, and the live bytes at the peak of a step once the optimizer has its state."""
    from transformers import LlamaConfig, LlamaForCausalLM

    made = make_plan(
        chain="model.layers", layouts=LLAMA_LAYOUTS, ends=("model.embed_tokens", "lm_head"), global_batch=BATCH, seq_len=SEQUENCE, **plan
    )
    graph = spec_graph(resolve({"model_type": "llama", **SIZES}), batch=1, sequence=SEQUENCE)
    estimate = estimate_graph(graph, made.cluster, made.job, made.strategy, engine("torch"))
    torch.manual_seed(1)
    trainer = runtime.apply(made, LlamaForCausalLM(LlamaConfig(**SIZES)), loss_fn=logits_loss)
    meter = build_meter(trainer, 3)
    for _ in range(3):
        ids = torch.randint(0, VOCAB, (BATCH // made.strategy.mesh.dp, SEQUENCE))
        meter.step(_, {"input_ids": ids, "labels": ids})
    return estimate.stages[trainer.place.pipeline_index].allocated_bytes, meter.peak_bytes
