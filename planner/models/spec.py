"""ModelSpec: one transformer as numbers and switches, enough to write down the graph that its Hugging Face implementation runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from costmodel.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of experts: `num_experts` gated experts of width `ffn`, `top_k` of them a token.

    shared_ffn: width of the experts every token visits (0 = none), `shared_gate`: scaled by a sigmoid gate. first_dense: leading layers with a dense
    feed-forward instead. step: every step-th layer is sparse. router: "softmax" (fp32 softmax, then top-k), "top_k" (top-k, then softmax), "sigmoid"
    (DeepSeek V3). normalized: the chosen weights are divided by their sum. biases: router and experts have biases.
    """

    num_experts: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    shared_gate: bool = False
    first_dense: int = 0
    step: int = 1
    router: str = "softmax"
    normalized: bool = True
    biases: bool = False
    groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """DeepSeek's multi-head latent attention: queries through `q_rank` (0 = direct), keys and values through `kv_rank` (arXiv 2405.04434, section 2.1).

    A head's query and key have `nope_dim` plain and `rope_dim` rotated features, its value `v_dim`.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Input of a vision transformer: square images of `size` pixels and `channels`, cut into `patch` x `patch` patches, sorted into `classes`."""

    size: int
    patch: int
    channels: int
    classes: int

    @property
    def num_patches(self) -> int:
        """(size / patch) squared."""
        return (self.size // self.patch) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A transformer of a known family.

    family: the Hugging Face `model_type` whose implementation is meant. num_layers: decoder layers (encoder layers of an encoder-only model);
    encoder_layers: those of the encoder of an encoder-decoder. ffn: width of the dense feed-forward. max_sequence: learned positions, 0 = none
    learned. norm, norm_place ("pre", "post": OLMo 2, "sandwich": Gemma), fused: see planner.models.norms and planner.models.decoder.
    window: keys a sliding-window layer sees, 0 = none; windowed: which layers slide (() = all when window > 0).
    rope_dim: features of a head that rotate; rope_kinds: 2 when sliding layers have their own tables; rope: how ("halves": x cos + rotate_half(x) sin;
    "chunks": the same on halves with half-width tables, gpt-oss; "strided": on even and odd features, DeepSeek V3; "complex": DeepSeek V2);
    rope_dtype: dtype of the tables. embedding_scale: embeddings are multiplied by sqrt(hidden). fused: one matmul makes q, k, v and one gate, up.
    qk_norm: "", "head" (a norm per head), "head_transposed" (the same after the transposition), "full" (over all heads).
    attention_bias: of q, k, v; output_bias: of the output projection; ffn_bias, head_bias. tied: the head shares the embedding.
    sinks: learned logits that join the softmax; score_softcap, logit_softcap: c tanh(x / c). attention: "flash" (one fused kernel) or "eager"
    (kept scores). lora_rank > 0: adapters on the linear modules named in lora_targets, the rest frozen.
    """

    name: str
    family: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_sequence: int = 0
    encoder_layers: int = 0
    activation: str = "silu"
    gated: bool = True
    norm: str = "llama"
    norm_place: str = "pre"
    fused: bool = False
    embedding_scale: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    head_bias: bool = False
    tied: bool = False
    qk_norm: str = ""
    rope_dim: int = 0
    rope_kinds: int = 1
    rope: str = "halves"
    rope_dtype: str = "compute"
    window: int = 0
    windowed: tuple[bool, ...] = ()
    type_vocab: int = 0
    position_buckets: int = 0
    sinks: bool = False
    score_softcap: bool = False
    attention: str = "flash"
    logit_softcap: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    image: Image | None = None
    frozen: bool = False
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "ffn"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} is {value!r}", where=f"ModelSpec.{name}", remedy="give a positive whole number")
        if self.heads % self.kv_heads:
            raise InputError(
                f"{self.kv_heads} key-value heads do not divide {self.heads} heads",
                where="ModelSpec.kv_heads",
                remedy=f"give a divisor of {self.heads}",
            )

    def lora(self, rank: int, targets: Iterable[str]) -> ModelSpec:
        """The same model frozen, with trainable rank-`rank` adapters on every linear module whose last name is in `targets`. Raises InputError."""
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise InputError(f"rank is {rank!r}", where="ModelSpec.lora", remedy="give a positive whole number")
        if isinstance(targets, str) or not tuple(targets):
            raise InputError(f"targets is {targets!r}", where="ModelSpec.lora", remedy='name linear modules, e.g. ("q_proj", "v_proj")')
        return replace(self, lora_rank=rank, lora_targets=tuple(targets), frozen=True)

    def freeze(self) -> ModelSpec:
        """The same model with no trainable parameter."""
        return replace(self, frozen=True)

    def slides(self, layer_index: int) -> bool:
        """Whether a layer attends through the sliding window."""
        return bool(self.window) and (not self.windowed or self.windowed[layer_index])

    def sparse(self, layer_index: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        experts = self.experts
        return experts is not None and layer_index >= experts.first_dense and (layer_index + 1) % experts.step == 0
