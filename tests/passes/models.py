"""Small modules that are awkward on purpose."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TupleBlock(nn.Module):
    """A block that gives (hidden, something else), as many Hugging Face models do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        inner = torch.tanh(self.up(hidden))
        return hidden + scale * self.down(inner), inner


class Chain(nn.Module):
    """Embedding, blocks called by index with a scale that depends on it, norm and head; `late` is registered first but runs last."""

    def __init__(self, *, num_layers: int = 6, width: int = 8, late: bool = False, beside: bool = False) -> None:
        super().__init__()
        if late:
            self.late = nn.Linear(width, width)
        if beside:
            self.bias = nn.Parameter(torch.ones(width))
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(TupleBlock(width) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 16)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for index in range(len(self.layers)):
            hidden = self.layers[index](hidden, scale=1.0 + index)[0]
        hidden = self.late(hidden) if hasattr(self, "late") else hidden
        return self.head(self.norm(hidden))


class InlineBlock(nn.Module):
    """Attention-like block whose linears are its own children, with a norm narrower than the hidden state."""

    def __init__(self, width: int, norm_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(norm_width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = hidden.unflatten(-1, (-1, self.norm.normalized_shape[0]))
        return hidden + self.down(torch.tanh(self.up(self.norm(parts).flatten(-2))))


class Inline(nn.Module):
    """A chain of InlineBlocks."""

    def __init__(self, *, width: int = 8, norm_width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(InlineBlock(width, norm_width) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class FusedBlock(nn.Module):
    """Gate and up in one linear, cut in two by the reader: splitting it contiguously runs, and is wrong."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return hidden + self.down(torch.sigmoid(gate) * up)


class Fused(nn.Module):
    """A chain of FusedBlocks."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FusedBlock(width) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden
