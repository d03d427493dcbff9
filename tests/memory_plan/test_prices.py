"""What a step and a byte cost, by measured times that may be anything."""

from __future__ import annotations

import itertools

import pytest

from tests.memory_plan.planned_model import Model, far_above, loss_of
from tierstore import TierStore
from tierstore.memory_plan.decision import Action, Decision, StepCosts
from tierstore.memory_plan.meter import ResidentMeter
from tierstore.memory_plan.prices import Trials, TriedDecision, costs_of, measure_prices
from tierstore.memory_plan.steps import MeasuredStep

GIB = 2**30
UNKNOWN = StepCosts(0.0, 0.0, 0)


def tried(seconds: float | None, stored_bytes: int) -> TriedDecision | None:
    if seconds is None:
        return None
    return TriedDecision(Decision({}, GIB, 1.0, stored_bytes), MeasuredStep(seconds, GIB))


def test_costs_of_steps_on_a_quiet_machine() -> None:
    """A plain step takes 4 s, a GiB in the store 2 s, and to compute all again 1 s."""
    costs = costs_of(UNKNOWN, tried(12.0, 4 * GIB), tried(7.0, GIB), 1.0)
    assert costs.step_seconds == pytest.approx(4.0)
    assert costs.store_seconds * GIB == pytest.approx(2.0)
    assert costs_of(UNKNOWN, tried(12.0, 4 * GIB), None, 1.0).step_seconds == pytest.approx(12 - 4 * 0.4)
    assert costs_of(UNKNOWN, None, tried(7.0, GIB), 1.0).step_seconds == pytest.approx(6 - 0.4)
    assert costs_of(UNKNOWN, None, None, 1.0).step_seconds == 3.0


MEASURED = None, 1e-3, 0.5, 60.0


@pytest.mark.parametrize("again_seconds", [0.0, 1e-9, 0.4, 100.0])
def test_no_difference_of_times_makes_a_step_or_a_byte_cost_nothing(again_seconds: float) -> None:
    """Any step may take longer than another, and less than what was computed again in it."""
    bytes_in_store = 0, 2**20, GIB, 40 * GIB
    for stored_seconds, again, stored_bytes, again_bytes in itertools.product(
        MEASURED, MEASURED, bytes_in_store, bytes_in_store
    ):
        costs = costs_of(UNKNOWN, tried(stored_seconds, stored_bytes), tried(again, again_bytes), again_seconds)
        measured = [seconds for seconds in (stored_seconds, again) if seconds is not None]
        assert costs.store_seconds > 0
        assert costs.step_seconds > 0 or (not measured and again_seconds == 0)
        assert not measured or costs.step_seconds <= max(measured)


class TrialsOfABusyMachine(Trials):
    """Real steps, whose times tell nothing."""

    again = 0.0
    seconds = (60.0, 1e-3)

    def take(self, decision: Decision, num_steps: int) -> MeasuredStep:
        measured = super().take(decision, num_steps)
        self.again_seconds = dict.fromkeys(self.again_seconds, self.again)
        first, *self.seconds = *self.seconds, 1.0  # type: ignore[assignment]
        return measured._replace(seconds=first)


@pytest.mark.parametrize(("again", "seconds"), [(0.0, (60.0, 1e-3)), (100.0, (1e-3, 60.0))], ids=["none", "too long"])
def test_prices_of_a_busy_machine_are_positive(store: TierStore, again: float, seconds: tuple[float, float]) -> None:
    """`again`: how long each block is said to have been computed again."""
    model, limit_bytes = Model(), far_above()
    trials = TrialsOfABusyMachine(model, lambda: loss_of(model, rows=64), store, ResidentMeter(), limit_bytes)
    trials.again, trials.seconds = again, seconds
    with trials:
        prices, _ = measure_prices(trials)
    strategies = [prices.uniform(action) for action in (Action("keep"), Action("store"), Action("recompute"))]
    assert [{action.kind for action in each.actions.values()} for each in strategies] == [
        {"keep"},
        {"store"},
        {"recompute"},
    ]
    assert all(each.step_seconds > 0 for each in strategies)
    assert strategies[0].step_seconds == min(each.step_seconds for each in strategies)
    assert prices.decide(limit_bytes) is not None
