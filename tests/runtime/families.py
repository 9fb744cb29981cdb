"""Small models of several families for plans that the search makes. Imported by the workers, not collected."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import runtime
from planner import codec

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 32,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {
    "vocab_size": 96,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**SIZES, "num_key_value_heads": 4}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4}),
    "one kv head": ("LlamaForCausalLM", "LlamaConfig", {**SIZES, "num_key_value_heads": 1}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {**SIZES, "num_key_value_heads": 4}),
    "bert": ("BertForMaskedLM", "BertConfig", {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
}


def build(family: str) -> nn.Module:
    """The model, seeded."""
    import transformers

    name, config_name, sizes = FAMILIES[family]
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config_name)(**sizes))


def config(family: str) -> dict[str, Any]:
    """Its config.json."""
    return {**build(family).config.to_dict(), "architectures": [FAMILIES[family][0]]}


def loss_fn(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross entropy of every token."""
    return F.cross_entropy(output.logits.flatten(0, 1).float(), batch["labels"].flatten())


def errors(*, family: str, plans: list[str]) -> list[float]:
    """For each plan, the largest relative error of the loss over two SGD steps, against one process."""
    ids = torch.randint(3, 96, (8, 16), generator=torch.Generator().manual_seed(0))
    batch, whole, truth = {"input_ids": ids, "labels": ids.clone()}, build(family), []
    trained = copy.deepcopy(whole)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for _ in range(2):
        loss = loss_fn(trained(input_ids=ids), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        truth.append(loss.item())
    found = []
    for text in plans:
        plan = codec.plan_from_json(text)
        trainer = runtime.apply(plan, build(family), loss_fn=loss_fn, optimizer_factory=lambda groups: torch.optim.SGD(groups, lr=0.1))
        share = 8 // plan.strategy.mesh.dp
        mine = {name: value[trainer.place.data_index * share :][:share] for name, value in batch.items()}
        found.append(max(abs(trainer.step(mine) - value) / value for value in truth))
    return found
