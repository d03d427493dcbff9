"""Steps under a plan are measured and compared with what was predicted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from tests.memory_plan.planned_model import WIDTH, Model, far_above, loss_of
from tierstore import MemoryPlan, TierStore, TierStoreWarning, plan_memory
from tierstore.hooks.in_place import put_around_calls
from tierstore.memory_plan.contents import Predicted
from tierstore.memory_plan.meter import ResidentMeter
from tierstore.memory_plan.watch import StepWatch

MIB = 2**20
PAUSE, LONG_PAUSE = 0.05, 1.0
PEAK_BYTES = 700 * MIB


class Told(ResidentMeter):
    """Tells the same peak of each step, whatever else the process does."""

    def peak(self) -> int:
        return PEAK_BYTES


class CannotReset(ResidentMeter):
    def __init__(self) -> None:
        super().__init__()
        self.can_reset = False

    def reset(self) -> None:
        raise PermissionError


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


def loss_with_penalty(model: torch.nn.Module) -> torch.Tensor:
    batch = torch.randn(64, WIDTH, requires_grad=True)
    result = model(batch)
    (gradient,) = torch.autograd.grad(result.sum(), batch, create_graph=True)
    time.sleep(PAUSE)
    return result.square().mean() + gradient.square().mean()


def loss_of_two(model: torch.nn.Module) -> torch.Tensor:
    one = model(torch.randn(64, WIDTH))
    time.sleep(PAUSE)
    return (one - model(torch.randn(64, WIDTH))).square().mean()


@pytest.mark.parametrize(("compute", "num_calls"), [(loss_with_penalty, 1), (loss_of_two, 2)])
def test_step_lasts_from_its_first_forward_to_its_last_backward(
    easy: MemoryPlan, store: TierStore, compute: Callable[[Any], torch.Tensor], num_calls: int
) -> None:
    model = Model()
    watch = watched(easy, store, model, num_calls=num_calls)
    for _ in range(2):
        assert measured_of(store) is None
        compute(model).backward()
        time.sleep(LONG_PAUSE)  # an optimizer, or data that is late: no part of a step
    loss_of(model, rows=64)
    assert PAUSE <= (measured_of(store) or 0) < LONG_PAUSE
    watch.end()


def test_planning_counts_the_calls_of_the_model_with_gradients(store: TierStore) -> None:
    def compute() -> torch.Tensor:
        with torch.no_grad():
            model(torch.randn(64, WIDTH))
        return loss_of_two(model)

    model = Model()
    assert plan_memory(model, compute, store=store, limit=far_above())._contents.num_calls == 2


def test_step_with_other_calls_or_that_fails_is_not_compared(easy: MemoryPlan, store: TierStore) -> None:
    class Fails(Model):
        is_failing = False

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            if self.is_failing:
                raise FloatingPointError
            return super().forward(batch)

    model = Fails()
    watch = watched(easy, store, model)
    for _ in range(2):
        loss_of_two(model).backward()
    loss_of(model, rows=64)  # an evaluation with gradients
    assert measured_of(store) is None
    model.is_failing = True
    with pytest.raises(FloatingPointError):
        loss_of(model)
    model.is_failing = False
    time.sleep(LONG_PAUSE)
    train(model, 2)
    assert 0 < (measured_of(store) or 0) < LONG_PAUSE
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


def test_peak_that_cannot_be_measured_is_not(easy: MemoryPlan, store: TierStore) -> None:
    model = Model()
    watch = watched(easy, store, model, CannotReset())
    train(model, 6)
    assert measured_of(store) is None
    watch.end()


def test_prediction_that_missed_is_corrected_and_told(easy: MemoryPlan, store: TierStore) -> None:
    model = Model()
    watch = watched(easy, store, model, Told(), predicted=Predicted(1, 1e-9))
    assert store.stats().memory_plan["num_corrections"] == 0
    train(model, 5)  # the first is not measured; the fifth begins after the three that are
    told = store.stats().memory_plan
    assert told["num_corrections"] == 1
    assert told["predicted_peak_bytes"] == told["measured_peak_bytes"] == PEAK_BYTES
    assert told["predicted_step_seconds"] > 1e-4
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
