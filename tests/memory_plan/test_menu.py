"""The options of a block."""

from __future__ import annotations

from typing import Any

import pytest

from tierstore.memory_plan.decision import Action, HeldOutput, Option, Prices, StepCosts, options_of
from tierstore.memory_plan.recording import Operator, RecordedCall

MIN_BYTES = 10
KEEP, STORE = Action("keep"), Action("store")
INPUTS, SAVED = {1: 50, 2: 4}, {1: 50, 2: 4, 10: 100, 11: 100, 12: 5, 13: 100}


def operator(seconds: float, outputs: dict[int, int], *, can_be_held: bool = True) -> Operator:
    return Operator(f"aten.op{len(outputs)}.default", seconds, outputs, can_be_held)


def recorded(**changes: Any) -> RecordedCall:
    operators = [
        operator(0.010, {10: 100}),
        operator(0.080, {11: 100}),
        operator(0.001, {12: 5}),
        operator(0.050, {13: 100}, can_be_held=False),
    ]
    settings = {"inputs": INPUTS, "saved": SAVED, "operators": operators}
    return RecordedCall("block", **(settings | changes))


def by_action(*calls: RecordedCall, kept_anyway: tuple[int, ...] = (), seconds: float = 0.141) -> dict[Action, Option]:
    return {option.action: option for option in options_of(calls, seconds, MIN_BYTES, kept_anyway)}


def test_options_of_a_block_the_more_held_the_less_computed() -> None:
    options = by_action(recorded())
    first = (HeldOutput(1, "aten.op1.default"),)
    both = (HeldOutput(0, "aten.op1.default"), *first)
    again = [Action("recompute", held, stores) for held in ((), first, both) for stores in (False, True)]
    assert set(options) == {KEEP, STORE, *again}
    assert options[KEEP] == Option(KEEP, SAVED, {}, 0.0)
    assert (options[STORE].kept, options[STORE].stored) == ({2: 4, 12: 5}, {1: 50, 10: 100, 11: 100, 13: 100})
    assert options[Action("recompute")].kept == INPUTS
    assert options[Action("recompute", first)].kept == {1: 50, 2: 4, 11: 100}
    stored = options[Action("recompute", both, True)]
    assert (stored.kept, stored.stored) == ({2: 4}, {1: 50, 10: 100, 11: 100})
    seconds = [options[action].seconds for action in again[::2]]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] == 0.141
    assert seconds[-1] > 0
    options = by_action(recorded(), kept_anyway=(1, 13))
    assert options[KEEP].kept == {2: 4, 10: 100, 11: 100, 12: 5}, "what is kept anyway costs nothing"
    assert options[STORE].stored == {10: 100, 11: 100}


def test_what_is_not_offered() -> None:
    """A block that differs is not computed again, calls of two kinds hold nothing, and what is worse is left out."""
    for calls in ([recorded(differs="a reason")], [recorded(), recorded(differs="a reason")]):
        assert set(by_action(*calls)) == {KEEP, STORE}
    assert any(action.held for action in by_action(recorded(), recorded()))
    other = recorded(operators=recorded().operators[1:])
    assert not any(action.held for action in by_action(recorded(), other))
    inputs_alone = RecordedCall("block", {1: 50}, {1: 50}, [operator(0.1, {2: 10})])
    assert set(by_action(inputs_alone)) == {KEEP, STORE}


def test_calls_share_what_is_held_once() -> None:
    options = by_action(recorded(), recorded(inputs={3: 60}, saved={3: 60, 10: 100}))
    assert options[Action("recompute")].kept == {1: 50, 2: 4, 3: 60}
    assert options[KEEP].kept == SAVED | {3: 60}


@pytest.mark.parametrize("kept_anyway", [(), (11,), (1, 2, 10, 11)], ids=str)
@pytest.mark.parametrize("recorded_seconds", [0.0, 1e-9, 0.08])
@pytest.mark.parametrize("seconds", [-1.0, 0.0, 1e-12, 0.141])
def test_whatever_a_busy_machine_measures_each_strategy_can_be_followed(
    seconds: float, recorded_seconds: float, kept_anyway: tuple[int, ...]
) -> None:
    """It costs some time to compute a block again. Where holding an output costs nothing, only that is offered."""
    call = recorded(operators=[operator(recorded_seconds, {11: 100}), operator(0.0, {12: 5})])
    options = by_action(call, seconds=seconds, kept_anyway=kept_anyway)
    assert options.keys() >= {KEEP, STORE}
    assert all(option.seconds > 0 for action, option in options.items() if action.kind == "recompute")
    prices = Prices({"block": list(options.values())}, [], StepCosts(1.0, 1e-9, 0))
    assert prices.uniform(KEEP).actions == {"block": KEEP}
    assert prices.uniform(STORE).actions == {"block": STORE}
    assert prices.uniform(Action("recompute")).actions["block"].kind == "recompute"
