"""A small GPT: the model that the examples and tests plan, run and measure.

Pre-norm decoder, learned positions, causal attention through `scaled_dot_product_attention`, optionally tied embeddings. Nothing in it knows
of any parallelism: heads are `view(batch, sequence, -1, head_dim)`, so a column-parallel projection simply yields fewer heads.

    python -m planner.cli plan examples.gpt:build_model local --seq-len 64 --global-batch 8
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes. num_kv_heads 0 means as many as num_heads; norm is "layer" or "rms"; ffn_size 0 means 4 x hidden_size."""

    vocab_size: int = 512
    max_sequence: int = 128
    num_layers: int = 4
    hidden_size: int = 64
    num_heads: int = 8
    num_kv_heads: int = 0
    ffn_size: int = 0
    norm: str = "layer"
    tied: bool = False
    dropout: float = 0.0

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.hidden_size // self.num_heads


def build_norm(config: GPTConfig) -> nn.Module:
    """The normalisation that `config.norm` names."""
    return nn.RMSNorm(config.hidden_size, eps=1e-5) if config.norm == "rms" else nn.LayerNorm(config.hidden_size)


class Attention(nn.Module):
    """Causal (grouped-query) self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        kv_size = (config.num_kv_heads or config.num_heads) * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, kv_size)
        self.v_proj = nn.Linear(config.hidden_size, kv_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) to the same."""
        batch, sequence, _ = x.shape
        q, k, v = (proj(x).view(batch, sequence, -1, self.head_dim).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.out_proj(out.transpose(1, 2).reshape(batch, sequence, -1))


class MLP(nn.Module):
    """Two linears around a GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        ffn_size = config.ffn_size or 4 * config.hidden_size
        self.up_proj = nn.Linear(config.hidden_size, ffn_size)
        self.down_proj = nn.Linear(ffn_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) to the same."""
        return self.down_proj(F.gelu(self.up_proj(x)))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = build_norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) to the same."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Token ids (batch, sequence) to logits (batch, sequence, vocab)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_sequence, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = build_norm(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits for the token after every position."""
        x = self.embed(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model(config: GPTConfig | None = None) -> GPT:
    """A GPT of the default (CPU demo) size, or of `config`."""
    return GPT(config or GPTConfig())


def loss_fn(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross entropy of logits (batch, sequence, vocab) against `batch["labels"]` (batch, sequence), in fp32."""
    return F.cross_entropy(output.flatten(0, 1).float(), batch["labels"].flatten())


def batches(*, batch: int, sequence: int, vocab_size: int = 512, seed: int = 0) -> Iterator[dict[str, Tensor]]:
    """Endless batches {"input_ids", "labels"} of arithmetic progressions over 64 token ids: labels are the next tokens, and learnable."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(vocab_size, (batch, 1), generator=generator)
        stride = torch.randint(1, 3, (batch, 1), generator=generator)
        tokens = (start + stride * torch.arange(sequence + 1)) % min(vocab_size, 64)
        yield {"input_ids": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}
