"""Families: for every supported `model_type`, how its config becomes a ModelSpec and which program writes its graph.

Defaults are those of the transformers 5.24 configuration classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.models import decoder, gpt2, ops, readers
from planner.models.assemble import Program
from planner.models.config import Config
from planner.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`read` turns a config into a ModelSpec called `name`; `build` writes a ModelSpec's program."""

    model_type: str
    read: Callable[[Config, str], ModelSpec]
    build: Callable[[Program], None]


def _gpt2(config: Config, name: str) -> ModelSpec:
    hidden = config.integer("n_embd", "hidden_size", default=768)
    heads = config.integer("n_head", "num_attention_heads", default=12)
    if hidden % heads:
        raise config.fail("n_head", f"{heads} heads do not divide n_embd {hidden}", f"give a divisor of {hidden}")
    return ModelSpec(
        name=name,
        family="gpt2",
        num_layers=config.integer("n_layer", "num_hidden_layers", default=12),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=config.integer("n_inner", default=4 * hidden),
        vocab=config.integer("vocab_size", default=50257),
        max_sequence=config.integer("n_positions", "max_position_embeddings", default=1024),
        activation=config.choice("activation_function", known=ops.ACTIVATIONS, default="gelu_new"),
        tied=config.flag("tie_word_embeddings", default=True),
    )


FAMILIES: tuple[Family, ...] = (
    Family(model_type="gpt2", read=_gpt2, build=gpt2.build),
    Family(model_type="llama", read=readers.llama, build=decoder.build),
    Family(model_type="mistral", read=readers.mistral, build=decoder.build),
    Family(model_type="qwen2", read=readers.qwen2, build=decoder.build),
    Family(model_type="qwen3", read=readers.qwen3, build=decoder.build),
    Family(model_type="gemma2", read=readers.gemma2, build=decoder.build),
    Family(model_type="gemma3_text", read=readers.gemma3, build=decoder.build),
    Family(model_type="phi3", read=readers.phi3, build=decoder.build),
    Family(model_type="olmo", read=readers.olmo, build=decoder.build),
    Family(model_type="olmo2", read=readers.olmo2, build=decoder.build),
    Family(model_type="mixtral", read=readers.mixtral, build=decoder.build),
    Family(model_type="qwen2_moe", read=readers.qwen2_moe, build=decoder.build),
    Family(model_type="qwen3_moe", read=readers.qwen3_moe, build=decoder.build),
    Family(model_type="gpt_oss", read=readers.gpt_oss, build=decoder.build),
    Family(model_type="deepseek_v2", read=readers.deepseek_v2, build=decoder.build),
    Family(model_type="deepseek_v3", read=readers.deepseek_v3, build=decoder.build),
)
