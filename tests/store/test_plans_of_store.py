"""What memory plans ask of a store: limits of several, and figures of the last."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from tests.conftest import MakeStore
from tierstore import StoreBusyError, TierStore, tiered_offload
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


def test_plan_that_dies_without_a_word_takes_its_limits_along_at_the_next_call() -> None:
    process: list[int | None] = []
    host: list[int] = []
    plans, one, other = PlansOfStore(process.append, host.append, 100), Plan(), Plan()
    plans.keep_within(one, 50, 0)
    plans.keep_within(other, 70, 5)
    del one
    assert (process[-1], host[-1]) == (50, 0), "a death calls nothing"
    plans.drain()
    assert (process[-1], host[-1]) == (70, 5)
    del other
    plans.drain()
    assert (process[-1], host[-1]) == (None, 100)
    num_calls = len(host)
    plans.drain()
    assert len(host) == num_calls, "nothing has changed"


def test_limits_that_could_not_be_set_are_set_by_the_next_call() -> None:
    host: list[int] = []
    is_refused = True

    def limit_host(nbytes: int) -> None:
        if is_refused:
            raise StoreBusyError("a store")
        host.append(nbytes)

    plans, plan = PlansOfStore(lambda _: None, limit_host, 100), Plan()
    with pytest.raises(StoreBusyError):
        plans.keep_within(plan, 50, 10)
    is_refused = False
    plans.drain()
    assert host == [10]


def in_a_scope(store: TierStore) -> None:
    with tiered_offload(store):
        pass


def put_something(store: TierStore) -> None:
    store.put(torch.ones(4))


@pytest.mark.parametrize("call", [TierStore.stats, TierStore.flush, put_something, in_a_scope])
def test_store_after_its_plan_died_holds_what_it_was_opened_for(
    make_store: MakeStore, call: Callable[[TierStore], object]
) -> None:
    store, plan = make_store(host_bytes="64MiB"), Plan()
    store.plans.keep_within(plan, 2**40, 0)
    assert store.residency.window_limits[0] == 0
    del plan
    call(store)
    assert store.residency.window_limits[0] == 64 * 2**20
    assert not store.plans.limits_process
