"""What is trained in which size: model, batch, and how long a step is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .models import Decoder, DecoderShape, ResNet, ResNetShape

_BYTES_BESIDE = 4 * 2**30
"""Of device memory: context, libraries' workspaces, parameters and their gradients."""
_ROOM_FOR_EACH_SAVED_BYTE = 1.3
"""What backward makes meanwhile, and what the allocator cannot fill."""


@dataclass(frozen=True)
class Workload:
    """A model and its batch. `tokens`: in a step; 0: it has none. `saved_bytes_of_one`: by a forward, for each element
    of the batch; None: its batch is what it is."""

    shape: ResNetShape | DecoderShape
    dtype: torch.dtype
    tokens: int = 0
    saved_bytes_of_one: int | None = None

    def with_batch(self, batch: int | None) -> Workload:
        if batch is None or not isinstance(self.shape, ResNetShape):
            return self
        return replace(self, shape=replace(self.shape, batch=batch))

    def model(self, device: torch.device) -> nn.Module:
        torch.manual_seed(0)
        with device:
            made = ResNet(self.shape) if isinstance(self.shape, ResNetShape) else Decoder(self.shape)
        return made.to(self.dtype)

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        shape = self.shape
        if isinstance(shape, ResNetShape):
            images = torch.randn((shape.batch, 3, shape.side, shape.side), generator=generator, dtype=self.dtype)
            labels = torch.randint(1000, (shape.batch,), generator=generator)
            return images.to(device), labels.to(device)
        text = torch.randint(shape.vocabulary, (1, shape.tokens + 1), generator=generator).to(device)
        return text[:, :-1], text[:, 1:]


def fitting_batch(name: str, free_bytes: int | None) -> int | None:
    """The largest batch, halved and halved again, for which plain training fits into so much memory; None: as it is."""
    workload = WORKLOADS[name]
    if free_bytes is None or workload.saved_bytes_of_one is None or not isinstance(workload.shape, ResNetShape):
        return None
    batch = workload.shape.batch
    needed_bytes = _ROOM_FOR_EACH_SAVED_BYTE * workload.saved_bytes_of_one
    while batch > 1 and batch * needed_bytes + _BYTES_BESIDE > free_bytes:
        batch //= 2
    return batch


def _decoder(layers: int, width: int, tokens: int, **more: int) -> Workload:
    return Workload(DecoderShape(layers, width, tokens, **more), torch.bfloat16, tokens)


_TINY = DecoderShape(2, 64, 32, vocabulary=100, head_width=32)
_TINY_GROUPED = replace(_TINY, heads=4, key_heads=2, hidden=192)
_QWEN3 = {"heads": 16, "key_heads": 8, "hidden": 3072}
"""The shape of Qwen3-0.6B; its vocabulary is the other decoders'."""

WORKLOADS = {
    "resnet152": Workload(ResNetShape((3, 8, 36, 3), 64, 256, 224), torch.float32, saved_bytes_of_one=170 * 2**20),
    "decoder 2048 wide, 4k tokens": _decoder(16, 2048, 4096),
    "decoder 2048 wide, 8k tokens": _decoder(16, 2048, 8192),
    "decoder 4096 wide, 8k tokens": _decoder(8, 4096, 8192),
    "decoder 2048 wide, 512 tokens": _decoder(16, 2048, 512),
    "Qwen3-like, 24 layers, 32k tokens": _decoder(24, 1024, 32_768, **_QWEN3),
    "Qwen3-like, 8 layers, 8k tokens": _decoder(8, 1024, 8192, **_QWEN3),
    "decoder 4096 wide, 64k tokens": _decoder(4, 4096, 65_536, vocabulary=4096),
    "decoder 4096 wide, 131k tokens": _decoder(4, 4096, 131_072, vocabulary=4096),
    "decoder 4096 wide, 262k tokens": _decoder(4, 4096, 262_144, vocabulary=4096),
    "tiny resnet": Workload(ResNetShape((1, 1, 1, 1), 8, 2, 32), torch.float32),
    "tiny decoder": Workload(_TINY, torch.bfloat16, _TINY.tokens),
    "tiny grouped decoder": Workload(_TINY_GROUPED, torch.bfloat16, _TINY.tokens),
    **{f"tiny {which} decoder": Workload(_TINY, torch.bfloat16, _TINY.tokens) for which in ("small", "short", "long")},
}
