"""What memory plans ask of a store: limits of several, and figures of the last."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conftest import MakeStore
from tests.inspect_store import inspect
from tierstore import StoreBusyError, TierStore, tiered_offload
from tierstore.ledger.windows import HostWindows
from tierstore.store.plans import PlansOfStore


class Plan:
    pass


def plans_of_store(process: list[int | None], windows: list[tuple[int, int]]) -> PlansOfStore:
    """Of one that was opened with windows of 100 and 60 bytes; notes the limits that are set."""
    return PlansOfStore(process.append, lambda *nbytes: windows.append(nbytes), 100, 60)


def test_of_several_plans_the_least_limits_hold_until_they_end() -> None:
    process: list[int | None] = []
    windows: list[tuple[int, int]] = []
    plans, one, other = plans_of_store(process, windows), Plan(), Plan()
    plans.keep_within(one, 50, 10, 20)
    plans.keep_within(other, 70, 5)
    assert (process[-1], windows[-1], plans.limits_process) == (50, (5, 20), True)
    plans.keep_within(one, None, None)
    assert (process[-1], windows[-1]) == (70, (5, 60))
    plans.keep_within(other, None, None)
    assert (process[-1], windows[-1], plans.limits_process) == (None, (100, 60), False)


def test_plan_that_dies_without_a_word_takes_its_limits_along_at_the_next_call() -> None:
    process: list[int | None] = []
    windows: list[tuple[int, int]] = []
    plans, one, other = plans_of_store(process, windows), Plan(), Plan()
    plans.keep_within(one, 50, 0)
    plans.keep_within(other, 70, 5)
    del one
    assert (process[-1], windows[-1]) == (50, (0, 60)), "a death calls nothing"
    plans.drain()
    assert (process[-1], windows[-1]) == (70, (5, 60))
    del other
    plans.drain()
    assert (process[-1], windows[-1]) == (None, (100, 60))
    num_calls = len(windows)
    plans.drain()
    assert len(windows) == num_calls, "nothing has changed"


def test_limits_that_could_not_be_set_are_set_by_the_next_call() -> None:
    windows: list[tuple[int, int]] = []
    is_refused = True

    def limit_windows(*nbytes: int) -> None:
        if is_refused:
            raise StoreBusyError("a store", "in between")
        windows.append(nbytes)

    plans, plan = PlansOfStore(lambda _: None, limit_windows, 100, 60), Plan()
    with pytest.raises(StoreBusyError):
        plans.keep_within(plan, 50, 10)
    is_refused = False
    plans.drain()
    assert windows == [(10, 60)]


def in_a_scope(store: TierStore) -> None:
    with tiered_offload(store):
        pass


def put_something(store: TierStore) -> None:
    store.put(torch.ones(4))


def test_store_moves_no_more_at_a_time_than_its_plans_allow(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of 1 MiB; a thread that waits for one may exceed the window by that."""
    store, plan = make_store(host_bytes=0, staging_bytes="64MiB", codec="none"), Plan()
    store._core.plans.keep_within(plan, None, None, 2 * 2**20)
    staging, charge, moved_bytes = inspect(store).window("staging"), HostWindows.charge, [0]

    def count(*arguments: Any) -> None:
        charge(*arguments)
        moved_bytes.append(staging.used_bytes)

    monkeypatch.setattr(HostWindows, "charge", count)
    leaf = torch.linspace(0, 1, 2**18, requires_grad=True)
    with tiered_offload(store):
        result = leaf
        for _ in range(40):
            result = result.sin()
    (found,) = torch.autograd.grad(result.sum(), leaf)
    expected = leaf
    for _ in range(40):
        expected = expected.sin()
    assert torch.equal(found, torch.autograd.grad(expected.sum(), leaf)[0])
    assert 2**20 <= max(moved_bytes) <= 3 * 2**20


@pytest.mark.parametrize("call", [TierStore.stats, TierStore.flush, put_something, in_a_scope])
def test_store_after_its_plan_died_holds_what_it_was_opened_for(
    make_store: MakeStore, call: Callable[[TierStore], object]
) -> None:
    store, plan = make_store(host_bytes="64MiB", staging_bytes="16MiB"), Plan()
    store._core.plans.keep_within(plan, 2**40, 0, 2**20)
    assert store._core.residency.window_limits == (0, 2**20)
    del plan
    call(store)
    assert store._core.residency.window_limits == (64 * 2**20, 16 * 2**20)
    assert not store._core.plans.limits_process
