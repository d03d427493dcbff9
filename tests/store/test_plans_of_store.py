"""What memory plans ask of a store: limits of several, and figures of the last."""

from __future__ import annotations

import gc

from tierstore.store.plans import PlansOfStore


class Plan:
    pass


def test_of_several_plans_the_least_limits_hold_until_they_end() -> None:
    process: list[int | None] = []
    host: list[int] = []
    plans, one, other = PlansOfStore(process.append, host.append, 100), Plan(), Plan()
    plans.keep_within(one, 50, 10)
    plans.keep_within(other, 70, 5)
    assert (process[-1], host[-1], plans.limits_process) == (50, 5, True)
    plans.keep_within(one, None, None)
    assert (process[-1], host[-1]) == (70, 5)
    plans.keep_within(other, None, None)
    assert (process[-1], host[-1], plans.limits_process) == (None, 100, False)


def test_figures_are_those_of_the_plan_that_told_last_and_end_with_it() -> None:
    plans, one, other = PlansOfStore(lambda _: None, lambda _: None, 100), Plan(), Plan()
    plans.tell(one, {"limit_bytes": 1})
    plans.tell(other, {"limit_bytes": 2})
    assert plans.figures == {"limit_bytes": 2}
    plans.tell(other, {})
    assert plans.figures == {"limit_bytes": 1}
    del one
    gc.collect()
    assert plans.figures == {}
