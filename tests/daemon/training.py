"""A step of training, for tests that compare its gradients with those of a step without a store."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tierstore import TierStore, tiered_offload

__all__ = ["BATCH", "DEPTH", "WIDTH", "gradients", "make_model", "nothing"]

WIDTH, DEPTH, BATCH = 256, 6, 512


def make_model(seed: int) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(DEPTH)]
    return nn.Sequential(*blocks), torch.randn(BATCH, WIDTH)


def gradients(
    model: nn.Sequential, batch: Tensor, store: TierStore | None, between: Callable[[], None]
) -> list[Tensor]:
    """Of one step; `between` is called after forward."""
    model.zero_grad()
    if store is None:
        loss = model(batch).square().mean()
    else:
        with tiered_offload(store, min_bytes=0):
            loss = model(batch).square().mean()
    between()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def nothing() -> None:
    pass
