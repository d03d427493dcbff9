"""A model that saves some 100 MiB, and plans for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tierstore import MemoryPlan, TierStore, plan_memory
from tierstore.memory_plan.contents import contents_of
from tierstore.memory_plan.decision import Action, Decision, Prices
from tierstore.memory_plan.meter import ResidentMeter
from tierstore.memory_plan.prices import TriedDecision

WIDTH, ROWS, NUM_BLOCKS = 256, 2048, 6


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.inner(batch)).sin().exp().tanh()
        return nn.functional.dropout(hidden, 0.1) * hidden.cos()


class Model(nn.Module):
    """Saves some 100 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            batch = batch + block(batch * 0.5)
        return batch


def loss_of(model: nn.Module, rows: int = ROWS) -> torch.Tensor:
    batch = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))
    return model(batch).square().mean()  # type: ignore[no-any-return]


def planned(model: nn.Module, store: TierStore, limit: object, **options: Any) -> MemoryPlan:
    return plan_memory(model, lambda: loss_of(model), store=store, limit=limit, **options)  # type: ignore[arg-type]


def far_above() -> int:
    return ResidentMeter().level() + 2**31


def planned_by(
    prices: Prices, store: TierStore, limit_bytes: int | None = None, decision: Decision | None = None
) -> MemoryPlan:
    """A plan by prices that were measured before; it keeps everything, if it is not told otherwise."""
    choice = TriedDecision.untried(decision or prices.uniform(Action("keep")))
    contents = contents_of(choice, prices, limit_bytes or far_above(), 0, ResidentMeter.unit)
    return MemoryPlan(contents, prices, store)
