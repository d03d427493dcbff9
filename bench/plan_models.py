"""Three models whose saved tensors are most of their memory: a transformer, a residual network, a U-Net."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """A transformer block with dropout, of a width and a number of heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = batch, length, 3, self.heads, width // self.heads
        q, k, v = self.qkv(self.norm_1(x)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm_2(x)))))


class Transformer(nn.Module):
    """Predicts tokens. Twelve equal blocks."""

    def __init__(self, width: int = 384, tokens: int = 2000, length: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 6) for _ in range(12))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def convolution(before: int, after: int, stride: int = 1) -> list[nn.Module]:
    convolved = nn.Conv2d(before, after, 3, stride, 1, bias=False)
    return [convolved, nn.BatchNorm2d(after), nn.ReLU(inplace=True)]


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(*convolution(before, after, stride))
        self.second = nn.Sequential(*convolution(after, after)[:2])
        is_same = before == after and stride == 1
        self.shortcut = nn.Identity() if is_same else nn.Sequential(
            nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
        )  # fmt: skip
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.second(self.first(x)) + self.shortcut(x))


class ResidualNetwork(nn.Module):
    """Classifies pictures. The first blocks save sixteen times as much as the last ones."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(*convolution(3, width))
        blocks: list[nn.Module] = []
        before = width
        for after, number, stride in ((width, 6, 1), (2 * width, 6, 2), (4 * width, 8, 2), (8 * width, 3, 2)):
            for place in range(number):
                blocks.append(Residual(before, after, stride if place == 0 else 1))
                before = after
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(before, 100)

    def forward(self, pictures: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.blocks(self.stem(pictures)).mean((2, 3))), targets)


class Level(nn.Sequential):
    """What a U-Net does at one resolution: five pairs of convolutions."""

    def __init__(self, before: int, after: int) -> None:
        pairs = ((before if place == 0 else after, after) for place in range(5))
        super().__init__(*(nn.Sequential(*convolution(i, o), *convolution(o, o)) for i, o in pairs))


class Up(nn.Module):
    """Enlarges, joins what was skipped, and convolves."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.enlarge, self.level = nn.ConvTranspose2d(before, after, 2, 2), Level(2 * after, after)

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        return self.level(torch.cat([skipped, self.enlarge(x)], 1))


class UNet(nn.Module):
    """Segments pictures. What the first blocks make is needed by the last ones."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.downs = nn.ModuleList(Level(i, o) for i, o in zip([3, *widths], widths, strict=False))
        self.middle = Level(widths[-1], 2 * widths[-1])
        self.ups = nn.ModuleList(Up(2 * after, after) for after in reversed(widths))
        self.out = nn.Conv2d(width, 5, 1)

    def forward(self, pictures: Tensor, targets: Tensor) -> Tensor:
        x, skipped = pictures, []
        for down in self.downs:
            x = down(x)
            skipped.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for up, other in zip(self.ups, reversed(skipped), strict=True):
            x = up(x, other)
        return functional.cross_entropy(self.out(x), targets)


Made = tuple[nn.Module, tuple[Tensor, ...]]


def _transformer() -> Made:
    tokens = torch.randint(0, 2000, (8, 512))
    return Transformer(), (tokens, tokens.roll(-1, 1))


MODELS: dict[str, Callable[[], Made]] = {
    "transformer": _transformer,
    "residual network": lambda: (ResidualNetwork(), (torch.randn(16, 3, 112, 112), torch.randint(0, 100, (16,)))),
    "U-Net": lambda: (UNet(), (torch.randn(8, 3, 192, 192), torch.randint(0, 5, (8, 192, 192)))),
}
"""Each with a batch: arguments of the model that give the loss."""


def blocks_of_model(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, Transformer):
        return list(model.blocks)
    if isinstance(model, ResidualNetwork):
        return [model.stem, *model.blocks]
    levels = [*model.downs, model.middle, *(up.level for up in model.ups)]
    return [pair for level in levels for pair in level]
