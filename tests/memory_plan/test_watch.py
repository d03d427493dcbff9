"""Steps under a plan are measured and compared with what was predicted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from tests.memory_plan.planned_model import WIDTH, Model, loss_of
from tierstore import MemoryPlan, TierStore, TierStoreWarning
from tierstore.hooks.in_place import put_around_calls
from tierstore.memory_plan.contents import Predicted
from tierstore.memory_plan.meter import ResidentMeter
from tierstore.memory_plan.watch import StepWatch

MIB = 2**20
PEAK_BYTES = 700 * MIB


class Told(ResidentMeter):
    """Tells the same peak of each step, whatever else the process does."""

    def peak(self) -> int:
        return PEAK_BYTES


def watched(
    plan: MemoryPlan, store: TierStore, model: Model, meter: ResidentMeter | None = None, **promised: Any
) -> StepWatch:
    """A watch over a model, of a plan that has promised something else."""
    watch = StepWatch(msgspec.structs.replace(plan._contents, **promised), meter or ResidentMeter(), store)
    put_around_calls(model, watch.around(None))
    return watch


def train(model: torch.nn.Module, num_steps: int) -> None:
    for _ in range(num_steps):
        loss_of(model, rows=64).backward()


def measured_of(store: TierStore) -> float | None:
    return store.stats().memory_plan.get("measured_step_seconds")


def loss_of_two(model: torch.nn.Module) -> torch.Tensor:
    return (model(torch.randn(64, WIDTH)) - model(torch.randn(64, WIDTH))).square().mean()


def test_step_has_as_many_calls_as_planning_counted(easy: MemoryPlan, store: TierStore) -> None:
    model = Model()
    watch = watched(easy, store, model, num_calls=2)
    train(model, 2)
    assert measured_of(store) is None
    for _ in range(3):
        loss_of_two(model).backward()
    assert (measured_of(store) or 0) > 0
    watch.end()


def test_no_hooks_stay_on_what_a_model_returns(easy: MemoryPlan, store: TierStore) -> None:
    class Returns(Model):
        def forward(self, batch: torch.Tensor) -> Any:
            return batch, super().forward(batch)

    model, leaf = Returns(), torch.randn(64, WIDTH, requires_grad=True)
    watch = watched(easy, store, model)
    results = []
    for _ in range(4):
        results.append(model(leaf)[1])
        results[-1].sum().backward()
    watch.end()
    assert not leaf._backward_hooks
    assert not any(result._backward_hooks for result in results)


def test_what_is_measured_is_told_beside_what_was_predicted(easy: MemoryPlan, store: TierStore) -> None:
    model = Model()
    watch = watched(easy, store, model, Told(), predicted=Predicted(1, 1e-9))
    train(model, 2)  # the first is not measured
    assert "measured_peak_bytes" not in store.stats().memory_plan
    train(model, 1)
    told = store.stats().memory_plan
    assert (told["predicted_peak_bytes"], told["predicted_step_seconds"]) == (1, 1e-9)
    assert told["measured_peak_bytes"] == PEAK_BYTES
    assert told["measured_step_seconds"] > 1e-4
    watch.end()
    assert not store.stats().memory_plan


def test_peak_above_the_limit_is_warned_of_once(easy: MemoryPlan, store: TierStore) -> None:
    model = Model()
    watch = watched(easy, store, model, Told(), limit_bytes=MIB)
    train(model, 4)
    with pytest.warns(
        TierStoreWarning, match=r"a step took 700 MiB, more than the memory plan's limit of 1.* MiB: plan"
    ):
        train(model, 1)
    train(model, 60)
    watch.end()
