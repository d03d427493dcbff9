"""The write allowance: what it lets through, how it refills, and what a store does when it is spent."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import MakeStore
from tests.hooks.programs import assert_same_gradients, training
from tierstore import StoreFullError, TierStore, tiered_offload
from tierstore.disk.budget import DAY_SECONDS, WriteAllowance

MIB = 2**20
HOUR_SECONDS = 3600.0


def test_refills_evenly_up_to_a_day() -> None:
    allowance = WriteAllowance(2400, now=0.0)
    assert allowance.take(2400, 0.0)
    assert allowance.left_bytes(HOUR_SECONDS) == 100
    assert allowance.seconds_until(300, HOUR_SECONDS) == pytest.approx(2 * HOUR_SECONDS)
    assert not allowance.take(101, HOUR_SECONDS)
    assert allowance.take(100, HOUR_SECONDS)
    assert allowance.left_bytes(HOUR_SECONDS) == 0
    assert allowance.left_bytes(1000 * DAY_SECONDS) == 2400
    assert "2401 bytes are more than a day's" in allowance.refusal(2401, 0.0)
    assert WriteAllowance(0, now=0.0).seconds_until(0, 0.0) == 0


def test_what_was_not_written_comes_back_and_what_was_beside_it_counts() -> None:
    allowance = WriteAllowance(1000, now=0.0)
    assert allowance.take(800, 0.0)
    allowance.give_back(300)
    assert allowance.left_bytes(0.0) == 500
    allowance.give_back(-600)
    assert allowance.left_bytes(0.0) == -100
    assert not allowance.take(0, 0.0)
    assert allowance.seconds_until(0, 0.0) == pytest.approx(DAY_SECONDS / 10)
    allowance.give_back(5000)
    assert allowance.left_bytes(0.0) == 1000


@given(
    day_bytes=st.integers(1, 10**12),
    steps=st.lists(st.tuples(st.floats(0, 10**5), st.integers(0, 10**12)), min_size=1, max_size=60),
)
def test_no_span_of_time_sees_more_than_a_day_and_what_refilled(day_bytes: int, steps: list[tuple[float, int]]) -> None:
    now, taken = 0.0, [(0.0, 0)]
    allowance = WriteAllowance(day_bytes, now)
    for wait_seconds, num_bytes in steps:
        now += wait_seconds
        if allowance.take(num_bytes, now):
            taken.append((now, num_bytes))
        else:
            seconds = allowance.seconds_until(num_bytes, now)
            assert seconds > 0
            assert math.isinf(seconds) == (num_bytes > day_bytes)
    assert all(before <= after for (before, _), (after, _) in pairwise(taken))
    for first, (begins_at, _) in enumerate(taken):
        total = 0
        for ends_at, num_bytes in taken[first:]:
            total += num_bytes
            most = day_bytes * (1 + (ends_at - begins_at) / DAY_SECONDS)
            assert total <= most * (1 + 1e-9) + 1


class Clock:
    """Stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("tierstore.disk.local.monotonic", clock)
    return clock


def saved(store: TierStore, weight: torch.Tensor, factor: int) -> torch.Tensor:
    """A graph with one saved tensor of 1 MiB."""
    with tiered_offload(store, min_bytes=0):
        return (weight * factor / 50).exp().sum()


def check(weight: torch.Tensor, losses: list[torch.Tensor]) -> None:
    for factor, loss in enumerate(losses):
        expected = weight.detach().clone().requires_grad_()
        (expected * factor / 50).exp().sum().backward()
        (found,) = torch.autograd.grad(loss, [weight])
        assert torch.equal(found, expected.grad)


def test_allowance_spent_keeps_in_memory_then_raises_and_goes_on_when_refilled(
    make_store: MakeStore, clock: Clock
) -> None:
    store = make_store(host_bytes=4 * MIB, staging_bytes=2 * MIB, max_write_bytes_per_day=8 * MIB)
    assert store.stats().write_allowance_bytes == 8 * MIB
    weight = torch.randn(MIB // 4, requires_grad=True)
    losses: list[torch.Tensor] = []
    with pytest.raises(StoreFullError) as caught:
        losses.extend(saved(store, weight, factor) for factor in range(50))  # keeps those before the error
    error, stats = caught.value, store.stats()
    assert "the write allowance of 8388608 bytes a day is spent: 0 bytes of it are left" in str(error)
    assert "1048576 will be in 10800 s" in str(error)
    assert "the data is still in memory" in str(error)
    assert error.host_bytes == stats.host_bytes == 4 * MIB
    assert stats.written_bytes == 8 * MIB
    assert stats.write_allowance_bytes == 0
    del error, caught

    losses.append(try_again(store, weight, clock, len(losses)))
    assert store.stats().written_bytes >= 9 * MIB
    check(weight, losses)
    losses.clear()
    store.flush()
    assert store.stats().disk_bytes == 0
    clock.now += DAY_SECONDS
    assert store.stats().write_allowance_bytes == 8 * MIB
    assert_same_gradients(training("mlp", num_steps=2), store)


def try_again(store: TierStore, weight: torch.Tensor, clock: Clock, factor: int) -> torch.Tensor:
    """Not a second too early, as the error has said."""
    clock.now += 10_700.5
    with pytest.raises(StoreFullError, match="will be in 100 s"):
        saved(store, weight, factor)
    clock.now += 100 + 3 * 10_800  # others wait for room too
    return saved(store, weight, factor)


def test_allowance_counts_what_is_on_disk_not_what_was_given(make_store: MakeStore, clock: Clock) -> None:
    store = make_store(codec="zstd", max_write_bytes_per_day=2 * MIB)
    for _ in range(8):
        handle = store.put(torch.zeros(MIB // 4))
        store.flush()
        assert torch.equal(store.get(handle), torch.zeros(MIB // 4))
    stats = store.stats()
    assert stats.spilled_bytes == 8 * MIB
    assert stats.write_allowance_bytes == 2 * MIB - stats.written_bytes > MIB


def test_open_seconds_end_with_the_store(make_store: MakeStore) -> None:
    store = make_store()
    first, second = store.stats().open_seconds, store.stats().open_seconds
    assert 0 < first <= second
    store.close()
    assert store.stats().open_seconds == store.stats().open_seconds >= second
