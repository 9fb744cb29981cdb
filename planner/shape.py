"""ModelShape: the sizes a launcher needs to build the same decoder from its own code. A plan carries it so that it exports without the model at hand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer in numbers; 0, False and "" mean "has none".

    head_dim: of q and k (v has `v_head_dim` when that differs). ffn_size: inner width of a dense MLP. max_positions: longest sequence the model was made for.
    norm: "rmsnorm" or "layernorm". activation: "swiglu", "geglu", "gelu" or "relu". position: "rope", "learned" or "none"; rope_base: its theta.
    Mixture of experts: `num_experts` of inner width `expert_ffn_size`, `top_k` per token, shared experts of `shared_expert_ffn_size` in total, the first
    `num_dense_layers` layers dense. Latent attention (MLA): `kv_lora_rank` > 0; then q and k heads are `head_dim` wide without, `rope_head_dim` with rope.
    other_features: what else a block does that no field says, by its usual name ("post_norm", "logit_softcap", "sliding_window", ...).
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int = 0
    norm: str = "rmsnorm"
    activation: str = "swiglu"
    position: str = "rope"
    rope_base: float = 10000.0
    qkv_bias: bool = False
    linear_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    num_experts: int = 0
    top_k: int = 0
    expert_ffn_size: int = 0
    shared_expert_ffn_size: int = 0
    num_dense_layers: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    v_head_dim: int = 0
    other_features: tuple[str, ...] = ()
