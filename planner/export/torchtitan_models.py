"""The models torchtitan 0.3.0 ships, as specs: a plan's model is recognised by its sizes, never by its name.

Read from `torchtitan/models/{llama3,qwen3,deepseek_v3,gpt_oss}/__init__.py`; the launcher test builds every one of them and compares.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.errors import InputError
from planner.models.spec import Experts, LatentAttention, ModelSpec

# module, flavor, hidden size, layers, heads, kv heads, head dim, dense inner width, vocabulary, tied embeddings
_DENSE = (
    ("llama3", "1B", 2048, 16, 32, 8, 64, 8192, 128256, True),
    ("llama3", "3B", 3072, 28, 24, 8, 128, 8192, 128256, True),
    ("llama3", "8B", 4096, 32, 32, 8, 128, 14336, 128256, False),
    ("llama3", "70B", 8192, 80, 64, 8, 128, 28672, 128256, False),
    ("llama3", "405B", 16384, 126, 128, 8, 128, 53248, 128256, False),
    ("qwen3", "0.6B", 1024, 28, 16, 8, 128, 3072, 151936, True),
    ("qwen3", "1.7B", 2048, 28, 16, 8, 128, 6144, 151936, True),
    ("qwen3", "4B", 2560, 36, 32, 8, 128, 9728, 151936, True),
    ("qwen3", "8B", 4096, 36, 32, 8, 128, 12288, 151936, False),
    ("qwen3", "14B", 5120, 40, 40, 8, 128, 17408, 151936, False),
    ("qwen3", "32B", 5120, 64, 64, 8, 128, 25600, 151936, False),
)
# module, flavor, hidden size, layers, heads, kv heads, head dim, vocabulary, experts, top k, expert inner width
_EXPERTS = (
    ("qwen3", "30B-A3B", 2048, 48, 32, 4, 128, 151936, 128, 8, 768),
    ("qwen3", "235B-A22B", 4096, 94, 64, 4, 128, 151936, 128, 8, 1536),
    ("gpt_oss", "20b", 2880, 24, 64, 8, 64, 201088, 32, 4, 2880),
    ("gpt_oss", "120b", 2880, 36, 64, 8, 64, 201088, 128, 4, 2880),
)
# flavor, hidden size, layers, heads, dense inner width, vocabulary, experts, top k, expert inner width, shared inner width, dense layers, q rank
_DEEPSEEK = (
    ("16B", 2048, 27, 16, 10944, 102400, 64, 6, 1408, 2816, 1, 0),
    ("236B", 5120, 60, 128, 12288, 102400, 160, 6, 1536, 3072, 1, 1536),
    ("671B", 7168, 61, 128, 18432, 129280, 256, 8, 2048, 2048, 3, 1536),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flavor:
    """One shipped model: `torchtitan.models.<module>.model_registry(<name>)` builds a transformer of the sizes of `spec`."""

    module: str
    name: str
    spec: ModelSpec


def flavors() -> tuple[Flavor, ...]:
    """Every model this exporter can map to."""
    return (*map(_dense, _DENSE), *map(_mixture, _EXPERTS), *map(_deepseek, _DEEPSEEK))


def flavor_of(spec: ModelSpec | None, model: str) -> Flavor:
    """The shipped model with the sizes of `spec`. Raises InputError that lists what there is."""
    known = flavors()
    for flavor in known:
        if spec is not None and _sizes(flavor.spec) == _sizes(spec):
            return flavor
    names = ", ".join(f"{flavor.module} {flavor.name}" for flavor in known)
    what = f"torchtitan 0.3.0 ships no model with the sizes of {model}" if spec else f"the plan of {model} carries no sizes"
    raise InputError(what, where="Plan.spec", remedy=f"torchtitan has {names}; for other models export to torchrun")


def _sizes(spec: ModelSpec) -> tuple[object, ...]:
    """What decides parameters and work. The spec's family and name do not count, its blocks do."""
    experts, latent = spec.experts, spec.latent
    attention: tuple[object, ...] = (spec.kv_heads, spec.head_dim, spec.qk_norm)
    if latent is not None:
        attention = (latent.kv_rank, latent.q_rank, latent.nope_dim, latent.rope_dim, latent.v_dim)
    mixture = (experts.num_experts, experts.top_k, experts.ffn, experts.shared_ffn, experts.first_dense) if experts else ()
    dense = spec.ffn if experts is None or experts.first_dense else 0
    block = (spec.gated, spec.norm_place, spec.attention_bias, spec.sinks, spec.encoder_layers, spec.lora_rank, spec.image is None)
    return (spec.hidden, spec.num_layers, spec.heads, spec.vocab, spec.tied, dense, *attention, *mixture, *block)


def _dense(row: tuple[str, str, int, int, int, int, int, int, int, bool]) -> Flavor:
    module, name, hidden, layers, heads, kv_heads, head_dim, inner, vocabulary, tied = row
    spec = ModelSpec(
        name=name, family=module, num_layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=inner,
        vocab=vocabulary, tied=tied, qk_norm="head" if module == "qwen3" else "",
    )  # fmt: skip
    return Flavor(module=module, name=name, spec=spec)


def _mixture(row: tuple[str, str, int, int, int, int, int, int, int, int, int]) -> Flavor:
    module, name, hidden, layers, heads, kv_heads, head_dim, vocabulary, num_experts, top_k, inner = row
    biased = module == "gpt_oss"
    spec = ModelSpec(
        name=name, family=module, num_layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=inner,
        vocab=vocabulary, qk_norm="head" if module == "qwen3" else "", attention_bias=biased, output_bias=biased, sinks=biased,
        experts=Experts(num_experts=num_experts, top_k=top_k, ffn=inner, biases=biased, router="top_k" if biased else "softmax"),
    )  # fmt: skip
    return Flavor(module=module, name=name, spec=spec)


def _deepseek(row: tuple[str, int, int, int, int, int, int, int, int, int, int, int]) -> Flavor:
    name, hidden, layers, heads, dense, vocabulary, num_experts, top_k, inner, shared, first_dense, q_rank = row
    spec = ModelSpec(
        name=name, family="deepseek_v3", num_layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_dim=192, ffn=dense, vocab=vocabulary,
        experts=Experts(num_experts=num_experts, top_k=top_k, ffn=inner, shared_ffn=shared, first_dense=first_dense),
        latent=LatentAttention(q_rank=q_rank, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
    )  # fmt: skip
    return Flavor(module="deepseek_v3", name=name, spec=spec)
