"""Small tensors stay tracked where staging has room for them: NOTE [Small tensors] in `tierstore/ledger/windows.py`."""

from collections.abc import Callable
from itertools import product

import pytest
import torch

from tests.conftest import MakeStore
from tests.hooks.programs import half_leaf, sine_chain
from tests.inspect_store import inspect
from tierstore import TierStore, tiered_offload

_KIB = 2**10
_MOST_BYTES = 512 * _KIB


class Watch:
    """Looks, after each pack, at what is held: a `select` that takes every tensor."""

    def __init__(self, store: TierStore) -> None:
        self.inside = inspect(store)
        self.most_tracked_bytes = 0
        with self.inside.lock:
            self.inside.drop_ended()  # else the graph before is counted until the store does so

    def __call__(self, _: torch.Tensor) -> bool:
        host, staging, tracked_bytes = (
            *map(self.inside.window, ("host", "staging")),
            self.inside.tracked_bytes_in_staging,
        )
        self.most_tracked_bytes = max(self.most_tracked_bytes, tracked_bytes)
        assert 0 <= tracked_bytes <= min(self.inside.tracked_bytes, _MOST_BYTES)
        assert staging.used_bytes <= staging.limit_bytes
        room = max(0, host.limit_bytes - host.used_bytes)
        most = room + sum(self.inside.newest_tracked_bytes)
        assert self.inside.uncharged_bytes <= most, "more than the newest node's has no room"
        return True


class Chain:
    """A graph that saves so many tensors of that size."""

    def __init__(
        self, store: TierStore, num: int, nbytes: int, select: Callable[[torch.Tensor], bool] | None = None
    ) -> None:
        self._leaf, self._num = half_leaf(nbytes // 4), num
        with tiered_offload(store, min_bytes=0, select=select):
            self._loss = sine_chain(self._leaf, num)

    def check(self) -> None:
        """Its gradient is that without a store."""
        expected = torch.autograd.grad(sine_chain(self._leaf, self._num), self._leaf)
        assert torch.equal(*torch.autograd.grad(self._loss, self._leaf), *expected)


def test_small_graph_is_never_registered(make_store: MakeStore) -> None:
    store = make_store(host_bytes=0)
    loss = Chain(store, 100, 32)
    assert inspect(store).records == []
    assert inspect(store).used_bytes == (0, 99 * 32)
    loss.check()
    del loss
    stats = store.stats()
    assert stats.packed_tensors == 99
    assert (stats.live_handles, stats.staging_used_bytes, stats.spilled_bytes, stats.cancelled_bytes) == (0, 0, 0, 0)


def test_flush_registers_small_tensors_and_has_them_written(make_store: MakeStore) -> None:
    store = make_store(host_bytes=0)
    loss = Chain(store, 100, 32)
    store.flush()
    assert inspect(store).tracked_bytes_in_staging == 0
    stats = store.stats()
    assert (stats.spilled_bytes, stats.staging_used_bytes) == (98 * 64 + 32, 0)  # a group, in which each is aligned
    loss.check()


@pytest.mark.parametrize("host_bytes", [0, 100 * _KIB])
@pytest.mark.parametrize("staging_bytes", ["64KiB", "1MiB"])
def test_small_tensors_are_held_within_host_and_staging(
    make_store: MakeStore, host_bytes: int, staging_bytes: str
) -> None:
    store = make_store(host_bytes=host_bytes, staging_bytes=staging_bytes)
    for nbytes, number in product((_KIB, 4 * _KIB, 5 * _KIB), range(3)):  # with a plan too
        watch = Watch(store)
        loss = Chain(store, 200, nbytes, watch)
        assert number or bool(watch.most_tracked_bytes) == (nbytes <= 4 * _KIB or staging_bytes == "1MiB")
        loss.check()
        del loss
    store.flush()
    assert store.stats().staging_used_bytes == 0
    assert inspect(store).tracked_bytes_in_staging == 0


@pytest.mark.parametrize("num_numbers", [1000, 16 * _KIB, 20 * _KIB], ids=["small", "as staging", "larger"])
@pytest.mark.parametrize("is_there", [False, True], ids=["put", "restored"])
def test_what_is_put_or_restored_takes_the_place_of_small_tensors(
    make_store: MakeStore, num_numbers: int, is_there: bool
) -> None:
    store = make_store(host_bytes=0, staging_bytes="64KiB")
    handle = store.put(torch.ones(num_numbers)) if is_there else None
    store.flush()
    loss = Chain(store, 10, 4 * _KIB)
    if handle is None:
        assert inspect(store).tracked_bytes_in_staging == 9 * 4 * _KIB
        handle = store.put(torch.ones(num_numbers))
        assert inspect(store).tracked_bytes_in_staging == 0
    assert torch.equal(store.get(handle), torch.ones(num_numbers))
    loss.check()


def test_store_closed_over_small_tensors_holds_nothing(make_store: MakeStore) -> None:
    store = make_store(host_bytes=0)
    loss = Chain(store, 10, 32)
    store.close()
    assert inspect(store).used_bytes == (0, 0)
    del loss
    inspect(store).drop_ended()
    assert inspect(store).tracked_bytes_in_staging == 0


def test_known_graph_small_tensors_between_large_ones_leave_in_groups(make_store: MakeStore) -> None:
    """Large ones leave as soon as the plan says so. The small ones before them wait for more of them."""
    store = make_store(host_bytes="4MiB", staging_bytes="64MiB")
    leaves = [half_leaf(2**18), half_leaf(2**14)]
    expected = [torch.autograd.grad(sine_chain(leaf * 2, 64).sum(), leaf) for leaf in leaves]
    for _ in range(3):
        with tiered_offload(store, min_bytes=0):
            large, small = (leaf * 2 for leaf in leaves)
            for _ in range(64):
                large = large.sin()
                small = small.sin()
            loss = large.sum() + small.sum()
        del large, small
        alone = [record for record in inspect(store).records if record.nbytes == 2**16 and record.num_members == 1]
        found = torch.autograd.grad(loss, leaves)
        del loss
    assert len(alone) < 16
    assert all(torch.equal(*each, gradient) for each, gradient in zip(expected, found, strict=True))


@pytest.mark.parametrize("host_bytes", [0, "4MiB"])
def test_large_tensor_finds_the_room_of_staging_that_small_ones_take(
    make_store: MakeStore, host_bytes: int | str
) -> None:
    """Small ones stay tracked in staging, and one as large as staging comes: they make way, and nothing hangs."""
    store = make_store(host_bytes=host_bytes, staging_bytes="4MiB")
    leaves = [half_leaf(2**20), half_leaf(2**14)]
    for _ in range(3):
        with tiered_offload(store, min_bytes=0):
            small, large = leaves[1] * 2, leaves[0] * 2
            for _ in range(8):
                for _ in range(12):
                    small = small.sin()
                large = large.sin()
            loss = large.sum() + small.sum()
        del large, small
        loss.backward()
        del loss
    expected = [
        torch.autograd.grad(sine_chain(leaf * 2, num).sum(), leaf) for leaf, num in zip(leaves, (8, 96), strict=True)
    ]
    assert all(torch.equal(3 * each, leaf.grad) for (each,), leaf in zip(expected, leaves, strict=True))
