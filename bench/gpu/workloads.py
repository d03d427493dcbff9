"""What is trained in which size: model, batch, and how long a step is measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .models import Decoder, DecoderShape, ResNet, ResNetShape

__all__ = ["WORKLOADS", "Workload"]


@dataclass(frozen=True)
class Workload:
    """A model and its batch.

    Attributes:
        shape: of the model.
        dtype: of its parameters.
        tokens: in a step; 0: it has none.
    """

    shape: ResNetShape | DecoderShape
    dtype: torch.dtype
    tokens: int = 0

    def model(self, device: torch.device) -> nn.Module:
        """The model, the same parameters each time."""
        torch.manual_seed(0)
        with device:
            made = ResNet(self.shape) if isinstance(self.shape, ResNetShape) else Decoder(self.shape)
        return made.to(self.dtype)

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random inputs and labels, the same each time."""
        generator = torch.Generator().manual_seed(1)
        shape = self.shape
        if isinstance(shape, ResNetShape):
            images = torch.randn((shape.batch, 3, shape.side, shape.side), generator=generator, dtype=self.dtype)
            labels = torch.randint(1000, (shape.batch,), generator=generator)
            return images.to(device), labels.to(device)
        text = torch.randint(shape.vocabulary, (1, shape.tokens + 1), generator=generator).to(device)
        return text[:, :-1], text[:, 1:]


def _decoder(layers: int, width: int, tokens: int) -> Workload:
    return Workload(DecoderShape(layers, width, tokens), torch.bfloat16, tokens)


_TINY = DecoderShape(2, 64, 32, vocabulary=100, head_width=32)

WORKLOADS = {
    "resnet152": Workload(ResNetShape((3, 8, 36, 3), 64, 256, 224), torch.float32),
    "decoder 2048 wide, 4k tokens": _decoder(16, 2048, 4096),
    "decoder 2048 wide, 8k tokens": _decoder(16, 2048, 8192),
    "decoder 4096 wide, 8k tokens": _decoder(8, 4096, 8192),
    "tiny resnet": Workload(ResNetShape((1, 1, 1, 1), 8, 2, 32), torch.float32),
    "tiny decoder": Workload(_TINY, torch.bfloat16, _TINY.tokens),
}
