"""The model that the demo trains: a small pre-norm transformer over bytes, in plain PyTorch.

It does not depend on the store. With the demo's default sizes the saved tensors take more than ten times the memory of
parameters, gradients and optimizer state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["ByteTransformer", "ModelShape", "random_batch"]

VOCABULARY = 256
"""One token per value of a byte."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model: `layers` blocks of `width` features in `heads` heads, over `context` bytes."""

    layers: int
    width: int
    heads: int
    context: int


class Attention(nn.Module):
    """Causal self-attention over all heads at once. Shape in and out: [batch, context, width]."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.to_qkv = nn.Linear(shape.width, 3 * shape.width)
        self.project = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from every position to itself and those before it."""
        batch, context, width = x.shape
        qkv = self.to_qkv(x).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast(Tensor, self.project(mixed.transpose(1, 2).reshape(batch, context, width)))


class Block(nn.Module):
    """Attention and a four times wider multilayer perceptron, each normalised before and added after."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Shape in and out: [batch, context, width]."""
        x = x + self.attention(self.attention_norm(x))
        return x + cast(Tensor, self.mlp(self.mlp_norm(x)))


class ByteTransformer(nn.Module):
    """Predicts the next byte; `forward` returns the mean cross-entropy in nats per byte."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, shape.width)
        self.position_embedding = nn.Parameter(0.02 * torch.randn(shape.context, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Loss over int64 `tokens` and `targets`, each of shape [batch, context]."""
        x = self.token_embedding(tokens) + self.position_embedding
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def random_batch(corpus: Tensor, batch: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw `batch` windows of a uint8 `corpus` of shape [n] with n > context, on the CPU.

    Returns:
        int64 tokens and, one byte further on, their targets; each of shape [batch, context].
    """
    starts = torch.randint(len(corpus) - context, (batch, 1), generator=generator)
    windows = corpus[starts + torch.arange(context + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
