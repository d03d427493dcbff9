"""The options of a block."""

from __future__ import annotations

from typing import Any

from tierstore.memory_plan.menu import Action, HeldOutput, Option, options_of
from tierstore.memory_plan.recording import Operator, RecordedCall

MIN_BYTES = 10


def operator(seconds: float, outputs: dict[int, int], *, can_be_held: bool = True) -> Operator:
    return Operator(f"aten.op{len(outputs)}.default", seconds, outputs, can_be_held)


def recorded(**changes: Any) -> RecordedCall:
    operators = [
        operator(0.010, {10: 100}),
        operator(0.080, {11: 100}),
        operator(0.001, {12: 5}),
        operator(0.050, {13: 100}, can_be_held=False),
    ]
    settings = {"inputs": {1: 50, 2: 4}, "saved": {1: 50, 2: 4, 10: 100, 11: 100, 12: 5, 13: 100}}
    return RecordedCall("block", operators=operators, **(settings | changes))  # type: ignore[arg-type]


def by_action(calls: list[RecordedCall]) -> dict[Action, Option]:
    return {option.action: option for option in options_of(calls, 0.141, MIN_BYTES)}


def test_options_of_a_block_the_more_held_the_less_computed() -> None:
    options = by_action([recorded()])
    first, both = (
        (HeldOutput(1, "aten.op1.default"),),
        (HeldOutput(0, "aten.op1.default"), HeldOutput(1, "aten.op1.default")),
    )
    assert set(options) == {
        Action("keep"),
        Action("store"),
        *(Action("recompute", held, stores) for held in ((), first, both) for stores in (False, True)),
    }
    assert options[Action("keep")] == Option(Action("keep"), recorded().saved, {}, 0.0)
    assert options[Action("store")].kept == {2: 4, 12: 5}
    assert options[Action("store")].stored == {1: 50, 10: 100, 11: 100, 13: 100}
    assert options[Action("recompute")].kept == {1: 50, 2: 4}
    assert options[Action("recompute", first)].kept == {1: 50, 2: 4, 11: 100}
    assert options[Action("recompute", both, True)].stored == {1: 50, 10: 100, 11: 100}
    assert options[Action("recompute", both, True)].kept == {2: 4}
    seconds = [option.seconds for action, option in options.items() if action.kind == "recompute" and not action.stores]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] == 0.141
    assert seconds[-1] > 0


def test_block_that_differs_is_kept_or_stored() -> None:
    for calls in ([recorded(differs="a reason")], [recorded(), recorded(differs="a reason")]):
        assert set(by_action(calls)) == {Action("keep"), Action("store")}


def test_calls_of_two_kinds_nothing_is_held() -> None:
    other = recorded()
    other.operators = other.operators[1:]
    assert not any(action.held for action in by_action([recorded(), other]))
    assert any(action.held for action in by_action([recorded(), recorded()]))


def test_calls_share_what_is_held_once() -> None:
    options = by_action([recorded(), recorded(inputs={3: 60}, saved={3: 60, 10: 100})])
    assert options[Action("recompute")].kept == {1: 50, 2: 4, 3: 60}
    assert options[Action("keep")].kept == {1: 50, 2: 4, 3: 60, 10: 100, 11: 100, 12: 5, 13: 100}


def test_option_that_is_worse_in_all_is_left_out() -> None:
    """The inputs are all that is saved: to compute again gains nothing."""
    options = by_action([RecordedCall("block", {1: 50}, {1: 50}, [operator(0.1, {2: 10})])])
    assert set(options) == {Action("keep"), Action("store")}
