"""Packs without the lock are accounted for as if they had taken it: NOTE [Grants] in `tierstore/ledger/grants.py`."""

import os
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch

from tests.conftest import MakeStore
from tests.hooks.granted import (
    NBYTES,
    SIDE,
    assert_right,
    lock_held_by_another,
    met_as_they_append,
    new_leaf,
    on_thread,
    sines,
)
from tests.inspect_store import inspect
from tests.moments import MOST_MOMENTS, Moment, interrupt
from tierstore import StorageIOError, StoreClosedError, TierStore, tiered_offload
from tierstore.hooks.scope import OffloadScope


@pytest.fixture
def roomy(make_store: MakeStore) -> TierStore:
    return make_store(host_bytes="64MiB")


def test_while_another_holds_the_lock_packs_go_on(roomy: TierStore) -> None:
    leaf = new_leaf()
    with tiered_offload(roomy, min_bytes=0):
        values = [leaf * 2]
        with lock_held_by_another(roomy, lambda: values.append(values[-1].sin())):
            hidden = sines(200, values[-1])
        loss = hidden.sum()
    number = len(values) - 1 + 200
    assert roomy.stats().packed_tensors == number
    loss.backward()
    assert_right(leaf, number)


@pytest.mark.parametrize("before", [True, False])
def test_grant_ended_as_a_pack_appends_it_is_entered_once(roomy: TierStore, before: bool) -> None:
    leaf = new_leaf()
    with met_as_they_append(roomy, lambda: roomy.stats(), before=before) as met, tiered_offload(roomy, min_bytes=0):
        loss = sines(60, leaf * 2).sum()
    assert len(met) >= 20
    stats = roomy.stats()
    assert (stats.packed_tensors, stats.packed_bytes, stats.live_handles) == (60, 60 * NBYTES, 60)
    loss.backward()
    assert_right(leaf, 60)


def test_grant_ended_before_a_pack_appends_select_was_asked_once_of_each_tensor(roomy: TierStore) -> None:
    """It may count, or answer otherwise when it is asked again."""
    asked: list[bool] = []

    def select_every_other(tensor: torch.Tensor) -> bool:
        asked.append(len(asked) % 2 == 0)
        return asked[-1]

    leaf = new_leaf()
    with (
        met_as_they_append(roomy, lambda: roomy.stats(), before=True) as met,
        tiered_offload(roomy, min_bytes=0, select=select_every_other),
    ):
        loss = sines(60, leaf * 2).sum()
    assert len(met) >= 10
    assert len(asked) == 60
    stats = roomy.stats()
    assert (stats.packed_tensors, stats.kept_bytes["selected out"]) == (30, 30 * NBYTES)
    loss.backward()
    assert_right(leaf, 60)


def test_threads_that_pack_beside_one_that_reads_stats_all_are_counted(make_store: MakeStore) -> None:
    """The budget holds the graphs of two of three threads."""
    store, leaves, is_over = make_store(host_bytes=600 * NBYTES), [new_leaf() for _ in range(3)], threading.Event()
    losses: list[torch.Tensor] = []

    def pack(leaf: torch.Tensor) -> None:
        with tiered_offload(store, min_bytes=0):
            losses.append(sines(300, leaf * 2).sum())

    def read() -> None:
        while not is_over.is_set():
            stats = store.stats()
            assert stats.host_bytes <= stats.host_bytes_peak <= 600 * NBYTES
            assert stats.live_handles <= stats.packed_tensors

    threads = [threading.Thread(target=pack, args=(leaf,)) for leaf in leaves]
    reader = threading.Thread(target=read)
    for thread in (reader, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    is_over.set()
    reader.join()
    assert store.stats().packed_tensors == 900
    for loss in losses:
        loss.backward()
    for leaf in leaves:
        assert_right(leaf, 300)
    assert store.stats().host_bytes_peak <= 600 * NBYTES


@pytest.mark.parametrize("reads_stats", [True, False])
@pytest.mark.parametrize("num_fitting", [0, 1, 5, 37])
def test_budget_fills_in_the_middle_of_a_grant_it_is_not_exceeded(
    make_store: MakeStore, num_fitting: int, reads_stats: bool
) -> None:
    store, leaf = make_store(host_bytes=num_fitting * NBYTES), new_leaf()
    for _ in range(3):  # the last ones follow a plan
        leaf.grad = None
        with tiered_offload(store, min_bytes=0):
            hidden = leaf * 2
            for _ in range(60):
                hidden = hidden.sin()
                if reads_stats:
                    assert store.stats().host_bytes <= num_fitting * NBYTES
            hidden.sum().backward()
        assert_right(leaf, 60)
    assert store.stats().host_bytes_peak <= num_fitting * NBYTES
    assert store.stats().packed_tensors == 180


def test_pack_for_which_the_grant_has_no_room_takes_the_lock(make_store: MakeStore) -> None:
    store = make_store(host_bytes=42 * NBYTES)
    with tiered_offload(store, min_bytes=0):
        values = [new_leaf() * 2]
        with lock_held_by_another(store, lambda: values.append(values[-1].sin())):
            [grant] = store._core.residency.books.tracked.grants.values()
            hidden = sines(grant.room_bytes // NBYTES, values[-1])
        assert len(grant.journal) == grant.nbytes // NBYTES > 10
        sines(5, hidden)
        assert len(grant.journal) == grant.nbytes // NBYTES


def test_unpack_of_what_was_not_entered_asks_for_its_index(roomy: TierStore) -> None:
    with tiered_offload(roomy, min_bytes=0):
        loss = sines(10, new_leaf() * 2).sum()
        loss.backward(retain_graph=True)
    [log] = [reference() for reference in roomy._core.of_thread.logs.values()]
    assert list(log.asked) == list(range(9, -1, -1))


def test_grant_of_one_thread_is_no_shortage_for_another(make_store: MakeStore) -> None:
    """What it may still track is charged in advance, but is given up where it is needed."""
    store = make_store(host_bytes=100 * NBYTES)
    with tiered_offload(store, min_bytes=0):
        loss = sines(10, new_leaf() * 2).sum()  # it has a grant of half of the room
        others: list[torch.Tensor] = []

        def pack() -> None:
            with tiered_offload(store, min_bytes=0):
                others.append(sines(85, new_leaf() * 2).sum())

        on_thread(pack)
        loss = sines(5, loss.expand(SIDE, SIDE) * 2).sum()
    store.flush()
    assert store.stats().spilled_bytes == 0
    assert len(others) == 1


def test_graph_dropped_before_it_was_entered_was_packed_and_takes_no_room(roomy: TierStore) -> None:
    with_lock: list[int] = []

    def pack() -> None:
        sines(1, new_leaf() * 2)
        with_lock.append(1)

    with tiered_offload(roomy, min_bytes=0):
        with lock_held_by_another(roomy, pack):
            for _ in range(5):
                sines(20, new_leaf() * 2)
            loss = sines(20, new_leaf() * 2).sum()
        inside = inspect(roomy)
        assert len(inside.tracked) == 20
        num_counted = 20 + len(with_lock)
        assert inside.tracked_bytes <= num_counted * NBYTES, "those that died before they were entered are not counted"
    assert roomy.stats().packed_tensors == 120 + len(with_lock)
    assert roomy.stats().live_handles == 20
    loss.backward()


def test_log_dropped_with_its_grant_everything_is_given_back(roomy: TierStore) -> None:
    scope = tiered_offload(roomy, min_bytes=0)
    for _ in range(3):
        with scope:
            loss = sines(20, new_leaf() * 2).sum()
            loss.backward()
    del loss
    roomy.stats()
    tracked = inspect(roomy).books.tracked
    assert (tracked.num_bytes, tracked.granted_bytes, tracked.grants) == (0, 0, {})
    assert roomy.stats().packed_tensors == 60


def test_views_of_one_storage_packed_without_the_lock_are_one_record(roomy: TierStore) -> None:
    with tiered_offload(roomy, min_bytes=0):
        hidden = sines(3, new_leaf() * 2)
        loss = (hidden.t().sin() + hidden.sin()).sum()
        assert len(inspect(roomy).tracked) == 5
        assert inspect(roomy).tracked_bytes == 4 * NBYTES
        del hidden
    assert roomy.stats().host_bytes == 4 * NBYTES
    loss.backward()


def test_backward_within_the_scope_enters_what_it_asks_for(roomy: TierStore) -> None:
    leaf = new_leaf()
    with tiered_offload(roomy, min_bytes=0):
        first = sines(10, leaf * 2).sum()
        on_thread(first.backward)
        second = sines(10, leaf * 2).sum()
        second.backward()
    assert leaf.grad is not None
    leaf.grad /= 2
    assert_right(leaf, 10)


def test_closed_store_next_pack_raises(roomy: TierStore) -> None:
    with tiered_offload(roomy, min_bytes=0):
        hidden = sines(10, new_leaf() * 2)
        on_thread(roomy.close)
        with pytest.raises(StoreClosedError):
            hidden.sin()


def test_forked_child_next_pack_raises(roomy: TierStore) -> None:
    with tiered_offload(roomy, min_bytes=0):
        hidden = sines(10, new_leaf() * 2)
        child = os.fork()
        if not child:
            code = 1
            try:
                hidden.sin()
            except StoreClosedError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        loss = hidden.sin().sum()
    loss.backward()


def test_failed_write_reaches_the_next_pack(make_store: MakeStore) -> None:
    store = make_store(host_bytes="64MiB")
    with tiered_offload(store, min_bytes=0):
        hidden = sines(10, new_leaf() * 2)
        with inspect(store).lock:  # as `Ledger.exchange` does when a write has failed
            inspect(store).ledger.drain()
            inspect(store).books.spill_error = StorageIOError("write", "a drive", "it is broken", "in memory")
        with pytest.raises(StorageIOError):
            hidden.sin()
        hidden = hidden.sin()
    hidden.sum().backward()


def test_what_the_newest_node_packed_is_not_settled(roomy: TierStore) -> None:
    class SaveThree(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            context.save_for_backward(x + 1, x + 2, x + 3)
            return x * 2

        @staticmethod
        def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] * 2

    with tiered_offload(roomy, min_bytes=0):
        loss = SaveThree.apply(SaveThree.apply(sines(5, new_leaf() * 2)))
        inspect(roomy)  # enters them
        (log,) = {tracked.log for tracked in inspect(roomy).tracked}
        assert [index for index, _ in log.settled(log.on_host)] == list(range(8))
        sines(1, loss)
        roomy.flush()
        assert list(log.on_host) == [11]


@pytest.mark.usefixtures("unvalidated")
def test_pack_interrupted_at_any_moment_the_store_is_whole_or_closed(make_store: MakeStore) -> None:
    store, num_closed = make_store(host_bytes="64MiB"), 0
    loss = hidden = None
    for number in range(1, MOST_MOMENTS):
        leaf = new_leaf()
        with suppress(StoreClosedError), tiered_offload(store, min_bytes=0):
            hidden = sines(10, leaf * 2)
            with suppress(KeyboardInterrupt), Moment(OffloadScope.pack, number, interrupt) as moment:
                hidden.sin()
            loss = sines(5, hidden).sum()
            loss.backward()
            assert_right(leaf, 15)
        del loss, hidden
        if not moment.has_come:
            break
        if inspect(store).closed is None:
            inside = inspect(store)
            assert store.stats().live_handles == 0
            assert (inside.tracked_bytes, inside.books.tracked.granted_bytes) == (0, 0)
        else:
            num_closed += 1
            store = make_store(host_bytes="64MiB")
    assert 5 < number < MOST_MOMENTS - 1
    assert num_closed == 0, "no moment of a pack without the lock is in the middle of a change"
