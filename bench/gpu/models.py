"""The models that are trained: a residual network, and a decoder such as people fine-tune; plain torch.nn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that everybody uses


@dataclass(frozen=True)
class ResNetShape:
    """Bottlenecks in each of the four stages ((3, 8, 36, 3) is ResNet-152), images in a batch, pixels of a side."""

    stages: Sequence[int]
    width: int
    batch: int
    side: int


class Bottleneck(nn.Module):
    """1x1, 3x3 (which strides) and 1x1 convolutions, each with batch norm, around a shortcut (arXiv 1512.03385)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.convolutions(images) + self.shortcut(images), inplace=True)


class ResNet(nn.Module):
    """The loss of a classifier of 1,000 classes."""

    def __init__(self, shape: ResNetShape) -> None:
        super().__init__()
        width = shape.width
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        blocks, inputs = [], width
        for stage, num_blocks in enumerate(shape.stages):
            for number in range(num_blocks):
                blocks.append(Bottleneck(inputs, width << stage, 2 if stage and not number else 1))
                inputs = 4 * (width << stage)
        self.blocks = nn.ModuleList(blocks)
        self.classes = nn.Linear(inputs, 1000)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        images = self.stem(images)
        for block in self.blocks:
            images = block(images)
        return F.cross_entropy(self.classes(images.mean((2, 3))), labels)


@dataclass(frozen=True)
class DecoderShape:
    """Layers, width of the residual stream, tokens in the one sequence of a batch, entries of the vocabulary; heads
    of queries and of keys (0: as many as fill the width; all), and the width inside of the gated part (0: 8/3)."""

    layers: int
    width: int
    tokens: int
    vocabulary: int = 32_000
    head_width: int = 128
    heads: int = 0
    key_heads: int = 0
    hidden: int = 0


class DecoderLayer(nn.Module):
    """Attention with rotary positions (arXiv 2104.09864) and a gated feed-forward part (arXiv 2002.05202); grouped
    heads of keys (arXiv 2305.13245) with norms of queries and keys, as in Qwen3 (arXiv 2505.09388)."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        width, hidden = shape.width, shape.hidden or (shape.width * 8 // 3 + 255) // 256 * 256
        self.head_width, heads = shape.head_width, shape.heads or width // shape.head_width
        self.num_heads = (heads, shape.key_heads or heads, shape.key_heads or heads)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.head_norms = nn.ModuleList(nn.RMSNorm(self.head_width) for _ in range(2 if shape.key_heads else 0))
        self.qkv = nn.Linear(width, sum(self.num_heads) * self.head_width, bias=False)
        self.out = nn.Linear(heads * self.head_width, width, bias=False)
        self.gate_and_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, stream: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        rows, tokens, _ = stream.shape
        heads = self.qkv(self.norms[0](stream)).view(rows, tokens, -1, self.head_width).transpose(1, 2)
        query, key, value = heads.split(self.num_heads, 1)
        if self.head_norms:
            query, key = (norm(part) for norm, part in zip(self.head_norms, (query, key), strict=True))
        query, key = (_rotated(part, cosines, sines) for part in (query, key))
        is_grouped = query.shape[1] != key.shape[1]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=is_grouped)
        stream = stream + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_and_up(self.norms[1](stream)).chunk(2, -1)
        return stream + self.down(F.silu(gate) * up)


def _rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cosines + torch.cat((-second, first), -1) * sines


class Decoder(nn.Module):
    """The loss of predicting each next token."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        frequencies = 10_000.0 ** -(torch.arange(0, shape.head_width, 2) / shape.head_width)
        angles = torch.outer(torch.arange(shape.tokens), torch.cat((frequencies, frequencies)))
        self.register_buffer("cosines", angles.cos())
        self.register_buffer("sines", angles.sin())

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        stream = self.embedding(tokens)
        for block in self.blocks:
            stream = block(stream, self.cosines, self.sines)
        return F.cross_entropy(self.head(self.norm(stream)).flatten(0, 1), following.flatten())
