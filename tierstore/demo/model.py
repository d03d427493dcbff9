"""The model that the demo trains: a small pre-norm transformer over bytes, in plain PyTorch. Its saved tensors take
more than ten times the memory of parameters, gradients and optimizer state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

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
        batch, context, width = x.shape
        qkv = self.to_qkv(x).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast(Tensor, self.project(mixed.transpose(1, 2).reshape(batch, context, width)))


class Block(nn.Module):
    """Attention and a four times wider multilayer perceptron, each normalised before and added after."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width = shape.width
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + cast(Tensor, self.mlp(self.mlp_norm(x)))


class ByteTransformer(nn.Module):
    """Predicts the next byte of int64 `tokens`, of shape [batch, context]; `forward` returns the mean cross-entropy to
    `targets`, of the same shape, in nats per byte."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, shape.width)
        self.position_embedding = nn.Parameter(0.02 * torch.randn(shape.context, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token_embedding(tokens) + self.position_embedding
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def random_batch(corpus: Tensor, batch: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw `batch` windows of a uint8 `corpus` of shape [n] with n > context, on the CPU. Returns int64 tokens and, one
    byte further on, their targets; each of shape [batch, context]."""
    starts = torch.randint(len(corpus) - context, (batch, 1), generator=generator)
    windows = corpus[starts + torch.arange(context + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


_OF_MKL = "acos asin atan cos erf erfc erfinv exp log log10 log2 sin sqrt tan tanh trunc"


def choose_vector_kernels() -> None:
    """Make a process's first roots, logarithms and sines as exact as its later ones. Takes milliseconds.

    PyTorch computes these functions on the CPU with MKL; each of its threads computes a part of the tensor
    (`ATen/cpu/vml.h`). MKL chooses a function's kernel at its first call. If several threads make that call at once,
    one part may be computed, that one time, by a kernel of low precision, with errors of some thousand units in the
    last place (pytorch#188792; MKL 2024.2, which is in torch 2.13). `MKL_CBWR` does not change that. One thread
    computes a tensor of a single element, and later calls find the kernel chosen."""
    for dtype in (torch.float32, torch.float64):
        for name in _OF_MKL.split():
            getattr(torch, name)(torch.ones(1, dtype=dtype))
