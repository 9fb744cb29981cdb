"""Families: for every supported `model_type`, how its config becomes a ModelSpec and which program writes its graph.

Defaults are those of the transformers 5.24 configuration classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.models import ops, readers
from planner.models.assemble import Program
from planner.models.bert import build_bert
from planner.models.config import Config
from planner.models.decoder import build_decoder
from planner.models.gpt2 import build_gpt2
from planner.models.spec import Image, ModelSpec
from planner.models.t5 import build_t5
from planner.models.vit import build_vit


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`read` turns a config into a ModelSpec called `name`; `build` writes a ModelSpec's program."""

    model_type: str
    read: Callable[[Config, str], ModelSpec]
    build: Callable[[Program], None]


def _gpt2(config: Config, name: str) -> ModelSpec:
    readers.attention_kind(config, known=("flash",))
    hidden = config.integer("n_embd", "hidden_size", default=768)
    heads = config.integer("n_head", "num_attention_heads", default=12)
    if hidden % heads:
        raise config.fail("n_head", f"{heads} heads do not divide n_embd {hidden}", f"give a divisor of {hidden}")
    return ModelSpec(
        name=name,
        family="gpt2",
        num_layers=config.layers("n_layer", "num_hidden_layers", default=12),
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


def _bert(config: Config, name: str) -> ModelSpec:
    readers.attention_kind(config, known=("flash",))
    hidden = config.integer("hidden_size", default=768)
    heads = config.integer("num_attention_heads", default=12)
    config.choice("position_embedding_type", known=("absolute",), default="absolute")
    return ModelSpec(
        name=name,
        family="bert",
        num_layers=config.layers("num_hidden_layers", default=12),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=_whole_heads(config, hidden, heads),
        ffn=config.integer("intermediate_size", default=3072),
        vocab=config.integer("vocab_size", default=30522),
        max_sequence=config.integer("max_position_embeddings", default=512),
        type_vocab=config.integer("type_vocab_size", default=2),
        activation=config.choice("hidden_act", known=ops.ACTIVATIONS, default="gelu"),
        tied=config.flag("tie_word_embeddings", default=True),
    )


def _vit(config: Config, name: str) -> ModelSpec:
    readers.attention_kind(config, known=("flash",))
    hidden = config.integer("hidden_size", default=768)
    heads = config.integer("num_attention_heads", default=12)
    size, patch = config.integer("image_size", default=224), config.integer("patch_size", default=16)
    if size % patch:
        raise config.fail("patch_size", f"{patch} does not divide image_size {size}", f"give a divisor of {size}")
    labels = config.values.get("id2label")
    classes = len(labels) if isinstance(labels, dict) and labels else config.integer("num_labels", default=2)
    return ModelSpec(
        name=name,
        family="vit",
        num_layers=config.layers("num_hidden_layers", default=12),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=_whole_heads(config, hidden, heads),
        ffn=config.integer("intermediate_size", default=3072),
        vocab=0,
        activation=config.choice("hidden_act", known=ops.ACTIVATIONS, default="gelu"),
        attention_bias=config.flag("qkv_bias", default=True),
        image=Image(size=size, patch=patch, channels=config.integer("num_channels", default=3), classes=classes),
    )


def _t5(config: Config, name: str) -> ModelSpec:
    readers.attention_kind(config, known=("flash",))
    heads = config.integer("num_heads", default=8)
    encoder = config.layers("num_layers", default=6)
    kind, known = config.values.get("feed_forward_proj", "relu"), [*ops.ACTIVATIONS, *(f"gated-{name}" for name in ops.ACTIVATIONS)]
    if kind not in known:
        raise config.fail("feed_forward_proj", f"{kind!r} is not supported", f"use one of {', '.join(known)}")
    activation = "gelu_new" if kind == "gated-gelu" else str(kind).removeprefix("gated-")
    return ModelSpec(
        name=name,
        family="t5",
        num_layers=config.layers("num_decoder_layers", default=encoder),
        encoder_layers=encoder,
        hidden=config.integer("d_model", default=512),
        heads=heads,
        kv_heads=heads,
        head_dim=config.integer("d_kv", default=64),
        ffn=config.integer("d_ff", default=2048),
        vocab=config.integer("vocab_size", default=32128),
        activation=activation,
        gated=str(kind).startswith("gated-"),
        position_buckets=config.integer("relative_attention_num_buckets", default=32),
        tied=config.flag("scale_decoder_outputs", "tie_word_embeddings", default=True),
    )


def _whole_heads(config: Config, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise config.fail("num_attention_heads", f"{heads} heads do not divide hidden size {hidden}", f"give a divisor of {hidden}")
    return hidden // heads


FAMILIES: tuple[Family, ...] = (
    Family(model_type="gpt2", read=_gpt2, build=build_gpt2),
    Family(model_type="llama", read=readers.llama, build=build_decoder),
    Family(model_type="mistral", read=readers.mistral, build=build_decoder),
    Family(model_type="qwen2", read=readers.qwen2, build=build_decoder),
    Family(model_type="qwen3", read=readers.qwen3, build=build_decoder),
    Family(model_type="gemma2", read=readers.gemma2, build=build_decoder),
    Family(model_type="gemma3_text", read=readers.gemma3, build=build_decoder),
    Family(model_type="phi3", read=readers.phi3, build=build_decoder),
    Family(model_type="olmo", read=readers.olmo, build=build_decoder),
    Family(model_type="olmo2", read=readers.olmo2, build=build_decoder),
    Family(model_type="mixtral", read=readers.mixtral, build=build_decoder),
    Family(model_type="qwen2_moe", read=readers.qwen2_moe, build=build_decoder),
    Family(model_type="qwen3_moe", read=readers.qwen3_moe, build=build_decoder),
    Family(model_type="gpt_oss", read=readers.gpt_oss, build=build_decoder),
    Family(model_type="deepseek_v2", read=readers.deepseek_v2, build=build_decoder),
    Family(model_type="deepseek_v3", read=readers.deepseek_v3, build=build_decoder),
    Family(model_type="bert", read=_bert, build=build_bert),
    Family(model_type="vit", read=_vit, build=build_vit),
    Family(model_type="t5", read=_t5, build=build_t5),
)
