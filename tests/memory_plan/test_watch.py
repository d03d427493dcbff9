"""A plan corrects itself: steps are compared with what was predicted, and decided again where they differ."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conftest import MakeStore
from tests.existing import set_existing
from tests.hooks.programs import all_bits, grads
from tests.memory_plan.planned_model import WIDTH, Model, far_above, loss_of, planned_by
from tierstore import MemoryPlan, TierStore, TierStoreWarning, plan_memory
from tierstore.hooks.in_place import put_around_calls
from tierstore.hooks.module import ModuleScope
from tierstore.memory_plan.applied import PlannedCalls
from tierstore.memory_plan.choice import Corrected
from tierstore.memory_plan.meter import ResidentMeter
from tierstore.memory_plan.watch import Expected, StepWatch

MIB = 2**20


def train(model: torch.nn.Module, num_steps: int) -> list[Any]:
    found = []
    for _ in range(num_steps):
        model.zero_grad()
        torch.manual_seed(2)
        loss_of(model, rows=64).backward()
        found = all_bits(grads(model))
    return found


PAUSE, LONG_PAUSE = 0.05, 1.0


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
    watch, _ = watched(easy, store, model, num_calls=num_calls)
    for _ in range(2):
        assert measured_of(store) is None
        compute(model).backward()
        time.sleep(LONG_PAUSE)  # an optimizer, or data that is late: no part of a step
    loss_of(model)
    assert PAUSE <= (measured_of(store) or 0) < LONG_PAUSE
    watch.end()


def test_planning_counts_the_calls_of_the_model_with_gradients(store: TierStore) -> None:
    def compute() -> torch.Tensor:
        with torch.no_grad():
            model(torch.randn(64, WIDTH))
        return loss_of_two(model)

    model = Model()
    assert plan_memory(model, compute, store=store, limit=far_above())._expected().num_calls == 2


def test_step_with_other_calls_is_not_compared(easy: MemoryPlan, store: TierStore) -> None:
    model = Model()
    watch, _ = watched(easy, store, model)
    for _ in range(2):
        loss_of_two(model).backward()
    loss_of(model)  # an evaluation with gradients
    for _ in range(2):
        assert measured_of(store) is None
        loss_of(model).backward()
    loss_of(model)
    assert measured_of(store) is not None
    watch.end()


def test_no_hooks_stay_on_what_a_model_returns(easy: MemoryPlan, store: TierStore) -> None:
    class Returns(Model):
        def forward(self, batch: torch.Tensor) -> Any:
            return batch, super().forward(batch)

    model, leaf = Returns(), torch.randn(64, WIDTH, requires_grad=True)
    watch, _ = watched(easy, store, model)
    results = []
    for _ in range(4):
        results.append(model(leaf)[1])
        results[-1].sum().backward()
    watch.end()
    assert not leaf._backward_hooks
    assert not any(result._backward_hooks for result in results)


def test_step_that_fails_is_not_measured(easy: MemoryPlan, store: TierStore) -> None:
    class Fails(Model):
        is_failing = False

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            if self.is_failing:
                raise FloatingPointError
            return super().forward(batch)

    model = Fails()
    watch, _ = watched(easy, store, model)
    loss_of(model).backward()
    model.is_failing = True
    with pytest.raises(FloatingPointError):
        loss_of(model)
    model.is_failing = False
    time.sleep(LONG_PAUSE)
    for _ in range(2):
        model(torch.randn(64, WIDTH)).sum().backward()
    assert 0 < (measured_of(store) or 0) < LONG_PAUSE
    watch.end()


class CannotReset(ResidentMeter):
    def __init__(self) -> None:
        super().__init__()
        self.can_reset = False

    def reset(self) -> None:
        raise PermissionError


def test_peak_that_cannot_be_measured_is_not(easy: MemoryPlan, store: TierStore) -> None:
    model = Model()
    expected = train(copy.deepcopy(model), 6)
    watch, _ = watched(easy, store, model, CannotReset())
    assert train(model, 6) == expected
    assert measured_of(store) is None
    watch.end()


class Told(ResidentMeter):
    """Tells the same peak of each step, whatever else the process does."""

    def __init__(self, peak_bytes: int) -> None:
        super().__init__()
        self._peak_bytes = peak_bytes

    def peak(self) -> int:
        return self._peak_bytes


def live_of(plan: MemoryPlan) -> Any:
    assert plan._live is not None
    return plan._live


def watched(
    plan: MemoryPlan, store: TierStore, model: Model, meter: ResidentMeter | None = None, **wrong: Any
) -> tuple[StepWatch, dict[str, Any]]:
    """A watch over the plan's blocks that expects something else."""
    scope = ModuleScope(store, min_bytes=0)
    calls = {block.name: PlannedCalls(block.as_action(), block.traits, scope) for block in plan.blocks}
    live = live_of(plan)
    expected = Expected(plan.limit_bytes, plan.predicted.peak_bytes, plan.predicted.step_seconds, live.decision)
    watch = StepWatch(expected._replace(**wrong), calls, meter or ResidentMeter(), store, live.corrected)
    for name, through in calls.items():
        put_around_calls(model.get_submodule(name), through)
    put_around_calls(model, watch.around(None))
    return watch, calls


def test_prediction_that_missed_is_corrected_and_told(easy: MemoryPlan, store: TierStore) -> None:
    model = Model()
    watch, _ = watched(easy, store, model, peak_bytes=1, step_seconds=1e-9)
    assert store.stats().memory_plan["num_corrections"] == 0
    train(model, 5)  # the first is not measured; the fifth begins after the three that are
    told = store.stats().memory_plan
    assert told["num_corrections"] == 1
    assert told["predicted_peak_bytes"] >= ResidentMeter().level() // 2
    assert told["predicted_step_seconds"] > 1e-4
    watch.end()
    assert not store.stats().memory_plan


@pytest.mark.parametrize("is_narrow", [False, True])
def test_peak_above_the_limit_other_actions_and_the_same_bits(
    corrected: Corrected, make_store: MakeStore, is_narrow: bool
) -> None:
    """Something has to be stored, for which there is only room with a narrow window, or there is room for all ways."""
    model, store = Model(), make_store(host_bytes="64MiB", staging_bytes="48MiB")
    expected = train(model, 1)
    plan = planned_by(corrected, store)
    live = live_of(plan)
    measured_bytes = live.decision.peak_bytes + 50 * MIB
    limit_bytes = measured_bytes - MIB
    set_existing(live.corrected, _limit_bytes=limit_bytes)
    if is_narrow:
        prices = live.corrected.prices
        few = {name: [one for one in own if one.action.kind != "recompute"] for name, own in prices.options.items()}
        costs = replace(prices.costs, store_bytes=2**30, spared_bytes=2**30)
        live.corrected.prices = prices._replace(options=few, costs=costs)
    watch, calls = watched(plan, store, model, Told(measured_bytes), limit_bytes=limit_bytes, peak_bytes=1)
    assert train(model, 4) == expected
    assert {call.action.kind for call in calls.values()} == {"keep"}
    assert train(model, 1) == expected
    assert store.stats().memory_plan["num_corrections"] >= 1
    assert {call.action.kind for call in calls.values()} != {"keep"}
    assert store.residency.window_limits == (0, 32 * MIB if is_narrow else 48 * MIB), "it would stay in host memory"
    watch.end()


def test_peak_above_the_limit_and_nothing_takes_less_is_told_once(easy: MemoryPlan, store: TierStore) -> None:
    model, live = Model(), live_of(easy)
    set_existing(live.corrected, _limit_bytes=MIB)
    watch, calls = watched(easy, store, model, limit_bytes=MIB, peak_bytes=1)
    train(model, 4)
    with pytest.warns(TierStoreWarning, match=r"a step took .*B, more than the limit of 1 MiB, and .* no decision"):
        train(model, 1)
    train(model, 4)
    assert {call.action.kind for call in calls.values()} == {"keep"}
    watch.end()


def test_reserve_is_counted_once(easy: MemoryPlan, store: TierStore) -> None:
    """What an optimizer has taken meanwhile is part of what is measured, and was left free by the decision."""
    model, reserve_bytes, live = Model(), 200 * MIB, live_of(easy)
    peak_bytes = live.decision.peak_bytes + reserve_bytes
    set_existing(live.corrected, _limit_bytes=live.decision.peak_bytes + 50 * MIB)
    watch, calls = watched(
        easy,
        store,
        model,
        Told(peak_bytes),
        limit_bytes=peak_bytes + 50 * MIB,
        peak_bytes=peak_bytes,
        step_seconds=1e-9,
        reserve_bytes=reserve_bytes,
    )
    train(model, 5)
    assert store.stats().memory_plan["num_corrections"] == 1
    assert live.corrected.offset_bytes == 0
    assert {call.action.kind for call in calls.values()} == {"keep"}
    watch.end()
