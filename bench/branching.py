"""A model whose branches have different depths, trained under a store: what placement and prefetch have to deal with.

Everything that it saves is alive at the end of forward, so what a step saves is also the most that is saved at once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tierstore import StoreStats, TierStore, tiered_offload

__all__ = ["SAVED_BYTES", "SETTINGS", "Branching", "Step", "medians", "train"]

ROWS, WIDTH, STAGES = 8192, 256, 12
TENSOR_BYTES = ROWS * WIDTH * 4
SAVED_BYTES = (STAGES * 8 - 1) * TENSOR_BYTES
"""About what one step saves and nobody else holds; what it is to the byte, each step counts."""
SETTINGS = {"rows": ROWS, "width": WIDTH, "stages": STAGES}


class Stage(nn.Module):
    """Three branches from one stem: of four operations, of one, and a head whose loss is added at the very end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.long, self.short = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shape [rows, width] in and out, and the head's loss."""
        stem = self.stem(x).tanh()
        short = self.short(stem).sigmoid()
        long = (self.long(stem).sin() * stem).softmax(-1).exp()
        x = x + short * long
        return x, self.head(x.tanh()).square().mean()


class Branching(nn.Module):
    """Stages one after the other; the loss is the sum of all heads' losses, from the first to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage() for _ in range(STAGES))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        losses = []
        for stage in self.stages:
            x, loss = stage(x)
            losses.append(loss)
        return torch.stack(losses).sum()


class Step:
    """What the store counted in one step: the difference of its totals, as attributes of their names.

    Attributes:
        seconds: that the step took.
        saved_bytes: handed to the store, of which nobody else kept the memory.
    """

    def __init__(self, before: StoreStats, after: StoreStats, seconds: float) -> None:
        self._before, self._after = before, after
        self.seconds = seconds

    def __getattr__(self, total: str) -> Any:
        return getattr(self._after, total) - getattr(self._before, total)

    @property
    def saved_bytes(self) -> int:
        name = "alive elsewhere"
        return int(self.packed_bytes - (self._after.kept_bytes[name] - self._before.kept_bytes[name]))

    def stall_seconds_of(self, cause: str) -> float:
        """Time that training waited for that cause."""
        return self._after.stall_seconds[cause] - self._before.stall_seconds[cause]


def train(
    store: TierStore,
    num_steps: int,
    between: Callable[[], None] = lambda: None,
    *,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    **options: Any,
) -> list[Step]:
    """Train for some steps under `tiered_offload(store, **options)`.

    Args:
        between: called between forward and backward.
        wrap: applied to every stage; there is no scope around the whole model then.
    """
    torch.manual_seed(0)
    model, batch = Branching(), torch.randn(ROWS, WIDTH)
    if wrap is not None:
        model.stages = nn.ModuleList(wrap(stage) for stage in model.stages)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps = []
    for _ in range(num_steps):
        before, started = store.stats(), time.perf_counter()
        with tiered_offload(store, **options) if wrap is None else nullcontext():
            loss = model(batch)
        between()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
        steps.append(Step(before, store.stats(), time.perf_counter() - started))
    return steps


def medians(steps: list[Step], figure: Callable[[Step], float]) -> float:
    """The median of a figure over the steps after the first."""
    return statistics.median(figure(step) for step in steps[1:])
