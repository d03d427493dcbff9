"""Packs without the lock are accounted for as if they had taken it, in host memory and on an accelerator: NOTE [Grants]
in `tierstore/ledger/grants.py`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import pytest
import torch

from tests.conftest import MakeStore
from tests.device.fake import SeenDevice
from tests.hooks.granted import (
    GROUP,
    NBYTES,
    SIDE,
    SaveThree,
    assert_right,
    charged_on_device,
    lock_held_by_another,
    met_as_they_append,
    new_leaf,
    scope_with,
    sines,
)
from tests.hooks.programs import in_threads
from tests.inspect_store import inspect
from tests.moments import interrupt, moments
from tierstore import StorageIOError, StoreClosedError, TierStore, tiered_offload
from tierstore.hooks.scope import OffloadScope

pytestmark = pytest.mark.usefixtures("validated")


@pytest.fixture
def roomy(make_store: MakeStore) -> TierStore:
    return make_store(host_bytes="64MiB")


class _Place(NamedTuple):
    """Where what is packed is: in host memory, or on an accelerator, from which it leaves at once or not at all."""

    new_store: Callable[[], TierStore]
    name: str

    def scope(self, store: TierStore) -> tiered_offload:
        return scope_with(store, {"host": "auto", "stays": "64MiB", "leaves": 0}[self.name])

    def charged(self, store: TierStore) -> tuple[int, int]:
        """What is tracked, and what is granted."""
        inside = inspect(store)
        if self.name == "host":
            return inside.tracked_bytes, inside.books.tracked.granted_bytes
        return charged_on_device(store)


@pytest.fixture(params=["host", "stays", "leaves"])
def place(request: pytest.FixtureRequest, make_store: MakeStore) -> _Place:
    options: dict[str, object] = {"host_bytes": "64MiB"}
    if request.param != "host":
        options |= {"staging_bytes": 4 * GROUP * NBYTES, "copies": request.getfixturevalue("copies")}
    return _Place(partial(make_store, **options), request.param)


def test_while_another_holds_the_lock_packs_go_on(place: _Place) -> None:
    store, leaf, most = place.new_store(), new_leaf(), GROUP // 2 if place.name == "leaves" else 100
    with place.scope(store):
        values = [leaf * 2]
        with lock_held_by_another(store, lambda: values.append(values[-1].sin())):
            hidden = sines(most, values[-1])
        loss = hidden.sum()
    number = len(values) - 1 + most
    assert store.stats().packed_tensors == number
    values.clear()
    del hidden
    loss.backward()
    assert_right(leaf, number)
    del loss
    store.flush()
    assert place.charged(store) == (0, 0)


@pytest.mark.parametrize("before", [True, False])
def test_grant_ended_as_a_pack_appends_it_is_entered_once(place: _Place, before: bool) -> None:
    store, leaf = place.new_store(), new_leaf()
    with met_as_they_append(store, lambda: store.flush(), before=before) as met, place.scope(store):
        loss = sines(60, leaf * 2).sum()
    assert len(met) >= 20
    stats = store.stats()
    assert (stats.packed_tensors, stats.packed_bytes, stats.live_handles) == (60, 60 * NBYTES, 60)
    loss.backward()
    assert_right(leaf, 60)


def test_graph_dropped_before_it_was_entered_was_packed_and_takes_no_room(place: _Place) -> None:
    store, with_lock = place.new_store(), list[int]()

    def pack() -> None:
        sines(1, new_leaf() * 2)
        with_lock.append(1)

    with place.scope(store):
        with lock_held_by_another(store, pack):
            for _ in range(3):
                sines(2, new_leaf() * 2)
            loss = sines(2, new_leaf() * 2).sum()
        assert len(inspect(store).tracked) == 2
        assert place.charged(store)[0] <= (2 + len(with_lock)) * NBYTES, "what died before is not counted"
    assert store.stats().packed_tensors == 8 + len(with_lock)
    assert store.stats().live_handles == 2
    loss.backward()
    del loss
    assert store.stats().device_bytes == 0
    assert place.charged(store) == (0, 0)


def test_log_dropped_with_its_grant_everything_is_given_back(place: _Place) -> None:
    store = place.new_store()
    scope = place.scope(store)
    for _ in range(3):
        with scope:
            loss = sines(20, new_leaf() * 2).sum()
            loss.backward()
        del loss
    assert store.stats().packed_tensors == 60
    assert place.charged(store) == (0, 0)
    assert inspect(store).books.tracked.grants == {}


@pytest.mark.parametrize("where", ["host", "device"])
def test_grant_of_one_thread_is_no_shortage_for_another(make_store: MakeStore, copies: SeenDevice, where: str) -> None:
    """What it may still track is charged in advance, but is given up where it is needed."""
    limit_bytes = 100 * NBYTES
    if where == "host":
        store = make_store(host_bytes=limit_bytes)
    else:
        store = make_store(host_bytes="64MiB", staging_bytes=4 * GROUP * NBYTES, copies=copies)
    with scope_with(store, limit_bytes):
        loss = sines(10, new_leaf() * 2).sum()  # it has a grant of half of the room
        others: list[torch.Tensor] = []

        def pack() -> None:
            with scope_with(store, limit_bytes):
                others.append(sines(85, new_leaf() * 2).sum())

        in_threads(pack)
        loss = sines(5, loss.expand(SIDE, SIDE) * 2).sum()
    store.flush()
    assert (copies.num_out, store.stats().spilled_bytes, len(others)) == (0, 0, 1)


@pytest.mark.parametrize("place", ["host", "stays"], indirect=True)
def test_views_of_one_storage_packed_without_the_lock_take_its_room_once_and_are_one_record(place: _Place) -> None:
    store = place.new_store()
    with place.scope(store):
        hidden = sines(3, new_leaf() * 2)
        loss = (hidden.t().sin() + hidden.sin() + hidden.cos()).sum()
        assert len(inspect(store).tracked) == 6
        assert place.charged(store) == (4 * NBYTES, 0)
        del hidden
    stats = store.stats()
    assert stats.host_bytes + stats.device_bytes == 4 * NBYTES
    assert place.name == "host" or [record.num_members for record in inspect(store).records] == [6]
    assert sum(record.nbytes for record in inspect(store).records) == 4 * NBYTES
    loss.backward()


@pytest.mark.parametrize("place", ["host", "stays"], indirect=True)
def test_backward_within_the_scope_enters_what_it_asks_for(place: _Place) -> None:
    store, leaf = place.new_store(), new_leaf()
    with place.scope(store):
        first = sines(10, leaf * 2).sum()
        in_threads(first.backward)
        second = sines(10, leaf * 2).sum()
        second.backward()
    assert leaf.grad is not None
    leaf.grad /= 2
    assert_right(leaf, 10)


def test_closed_store_next_pack_raises_and_nothing_is_charged(place: _Place) -> None:
    store = place.new_store()
    with place.scope(store):
        hidden = sines(10, new_leaf() * 2)
        in_threads(store.close)
        with pytest.raises(StoreClosedError):
            hidden.sin()
    assert place.name == "host" or place.charged(store) == (0, 0)
    assert inspect(store).devices.held_bytes == 0


@pytest.mark.parametrize("place", ["host", "stays"], indirect=True)
def test_forked_child_next_pack_raises(place: _Place) -> None:
    with place.scope(place.new_store()):
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


@pytest.mark.usefixtures("unvalidated")
def test_pack_interrupted_at_any_moment_the_store_is_whole_or_closed(place: _Place) -> None:
    store, num_closed = place.new_store(), 0
    loss = hidden = None
    for moment in moments(OffloadScope.pack, interrupt, least=5):
        leaf = new_leaf()
        with suppress(StoreClosedError), place.scope(store):
            hidden = sines(10, leaf * 2)
            with suppress(KeyboardInterrupt), moment:
                hidden.sin()
            loss = sines(5, hidden).sum()
            loss.backward()
            assert_right(leaf, 15)
        del loss, hidden
        if inspect(store).closed is None:
            assert store.stats().live_handles == 0
            assert place.charged(store) == (0, 0)
        else:
            num_closed += 1
            store = place.new_store()
    assert num_closed == 0, "no moment of a pack without the lock is in the middle of a change"


# --- in host memory


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
    with tiered_offload(roomy, min_bytes=0):
        loss = SaveThree.apply(SaveThree.apply(sines(5, new_leaf() * 2)))
        inspect(roomy)  # enters them
        (log,) = {tracked.log for tracked in inspect(roomy).tracked}
        assert [index for index, _ in log.settled(log.on_host)] == list(range(8))
        sines(1, loss)
        roomy.flush()
        assert list(log.on_host) == [11]
