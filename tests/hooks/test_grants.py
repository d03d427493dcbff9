"""Packs without the lock are accounted for as if they had taken it, in host memory and on an accelerator: NOTE [Grants]
in `tierstore/ledger/grants.py`."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

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
from tests.hooks.late_copies import LateCopies
from tests.hooks.programs import forget_after_error, in_threads
from tests.inspect_store import inspect
from tests.moments import interrupt, moments
from tierstore import ModifiedInPlaceError, StorageIOError, StoreClosedError, TierStore, tiered_offload
from tierstore.hooks.scope import OffloadScope
from tierstore.ledger.state import State

pytestmark = pytest.mark.usefixtures("validated")

_GROUP = 16
"""So many tensors fit into a group, where staging holds four groups."""


class _Copies(LateCopies):
    """Tells from which stream was copied. Tensors of one column are on a second device, those of two in host memory.

    Streams are as on a real accelerator: a new object each time, whose comparisons are torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.copied_from: Counter[tuple[int, int]] = Counter()

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        return None if tensor.shape[-1] == 2 else torch.device("cpu", int(tensor.shape[-1] == 1))

    def current_stream(self, device: torch.device) -> Any:
        return torch.Stream(stream_id=self.now, device_index=device.index, device_type=1)

    def copy_out_many(self, sources: Any, targets: Any, stream: Any) -> Any:
        self.copied_from[_name(stream)] += sum(len(source) for source in sources) // NBYTES
        return super().copy_out_many(sources, targets, stream)


def _name(stream: Any) -> tuple[int, int]:
    return stream.device_index, stream.stream_id


@pytest.fixture
def copies() -> Iterator[_Copies]:
    with _Copies() as engine:
        yield engine


@pytest.fixture
def store(make_store: MakeStore, copies: _Copies) -> TierStore:
    """On an accelerator."""
    return make_store(host_bytes="64MiB", staging_bytes=4 * _GROUP * NBYTES, copies=copies)


@pytest.fixture
def roomy(make_store: MakeStore) -> TierStore:
    return make_store(host_bytes="64MiB")


class _Place(NamedTuple):
    """Where what is packed is: in host memory, or on an accelerator, from which it leaves at once or not at all."""

    new_store: Callable[[], TierStore]
    name: str

    def scope(self, store: TierStore) -> tiered_offload:
        return _scope(store, {"host": "auto", "stays": "64MiB", "leaves": 0}[self.name])

    def charged(self, store: TierStore) -> tuple[int, int]:
        """What is tracked, and what is granted."""
        inside = inspect(store)
        if self.name == "host":
            return inside.tracked_bytes, inside.books.tracked.granted_bytes
        return _charged(store)


@pytest.fixture(params=["host", "stays", "leaves"])
def place(request: pytest.FixtureRequest, make_store: MakeStore) -> _Place:
    options: dict[str, object] = {"host_bytes": "64MiB"}
    if request.param != "host":
        options |= {"staging_bytes": 4 * _GROUP * NBYTES, "copies": request.getfixturevalue("copies")}
    return _Place(partial(make_store, **options), request.param)


def _scope(store: TierStore, device_bytes: int | str) -> tiered_offload:
    return tiered_offload(store, min_bytes=0, device_bytes=device_bytes)


def _charged(store: TierStore) -> tuple[int, int]:
    resident = inspect(store).device_window.resident
    return resident.used_bytes, resident.granted_bytes


class SaveThree(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        context.save_for_backward(x + 1, x + 2, x + 3)
        return x * 2

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


def test_while_another_holds_the_lock_packs_go_on(place: _Place) -> None:
    store, leaf, most = place.new_store(), new_leaf(), _GROUP // 2 if place.name == "leaves" else 100
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
def test_grant_of_one_thread_is_no_shortage_for_another(make_store: MakeStore, copies: _Copies, where: str) -> None:
    """What it may still track is charged in advance, but is given up where it is needed."""
    limit_bytes = 100 * NBYTES
    if where == "host":
        store = make_store(host_bytes=limit_bytes)
    else:
        store = make_store(host_bytes="64MiB", staging_bytes=4 * _GROUP * NBYTES, copies=copies)
    with _scope(store, limit_bytes):
        loss = sines(10, new_leaf() * 2).sum()  # it has a grant of half of the room
        others: list[torch.Tensor] = []

        def pack() -> None:
            with _scope(store, limit_bytes):
                others.append(sines(85, new_leaf() * 2).sum())

        on_thread(pack)
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
        on_thread(first.backward)
        second = sines(10, leaf * 2).sum()
        second.backward()
    assert leaf.grad is not None
    leaf.grad /= 2
    assert_right(leaf, 10)


def test_closed_store_next_pack_raises_and_nothing_is_charged(place: _Place) -> None:
    store = place.new_store()
    with place.scope(store):
        hidden = sines(10, new_leaf() * 2)
        on_thread(store.close)
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


# --- on an accelerator

_PLACES = pytest.mark.parametrize("device_bytes", ["64MiB", 0], ids=["stays", "leaves"])


@pytest.mark.parametrize("acts", ["flush", "stats", None])
@pytest.mark.parametrize("num_staying", [0, 1, 5, 37])
def test_window_fills_in_the_middle_of_a_grant_no_more_than_a_group_beyond_it(
    store: TierStore, num_staying: int, acts: str | None
) -> None:
    """Then the log follows a plan: what is packed first leaves, and the rest stays."""
    window, num_out = inspect(store).device_window, []
    for step in range(4):
        leaf = new_leaf()
        with _scope(store, num_staying * NBYTES):
            hidden = leaf * 2
            for number in range(60):
                hidden = hidden.sin()
                if acts is not None and number % 3 == 0:
                    getattr(store, acts)()
                most = window.resident.limit_bytes + window.group_bytes + NBYTES
                assert window.resident.used_bytes + window.resident.granted_bytes <= most
        if acts is None and step:
            num_registered = sum(record.num_members for record in inspect(store).records)
            assert num_registered == 60 - num_staying, "what the plan leaves there has no record"
        before = store.stats().offloaded_bytes
        hidden.sum().backward()
        assert_right(leaf, 60)
        num_out.append(before)
        del hidden
    if acts is None:
        left = {later - earlier for earlier, later in pairwise(num_out)}
        assert left == {(60 - num_staying) * NBYTES}, "as many leave in each step"


def test_known_graph_only_what_the_plan_sends_away_has_a_record(store: TierStore) -> None:
    """Whichever pack is the last of a grant."""
    for num_staying in range(30, 45):
        for step in range(2):
            with _scope(store, num_staying * NBYTES):
                loss = sines(60, new_leaf() * 2).sum()
            num_registered = sum(record.num_members for record in inspect(store).records)
            assert num_registered == 60 - num_staying or not step
            loss.backward()
            del loss
            store.flush()


def test_what_others_have_let_go_leaves_with_the_next_pack_whatever_was_granted(store: TierStore) -> None:
    for step in range(3):
        with _scope(store, 40 * NBYTES):
            held = [sines(5, new_leaf() * 2)]
            hidden = sines(65, held[0])  # more than leave
            waiting = [record for record in inspect(store).records if record.state is State.PENDING]
            hidden = sines(2, hidden)  # the first one takes the lock, and would leave a grant
            held.clear()
            hidden = sines(1, hidden)
            if step:
                assert len(waiting) == 1
                assert waiting[0].state is not State.PENDING
            loss = sines(27, hidden).sum()
        loss.backward()
        del loss, hidden


def test_plan_that_the_graph_leaves_in_the_middle_of_a_grant_same_bits(store: TierStore) -> None:
    """Other sizes, or nothing more, from somewhere on. The plan is dropped when the grant ends."""
    for number, narrow in [(60, 60), (60, 60), (60, 33), (60, 33), (40, 40), (60, 20), (60, 60)]:
        leaf = new_leaf()
        with _scope(store, 20 * NBYTES):
            hidden = sines(narrow, leaf * 2)
            loss = sines(number - narrow, hidden[:, : SIDE // 2].clone()).sum() if narrow < number else hidden.sum()
        loss.backward()
        expected = new_leaf()
        hidden = sines(narrow, expected * 2)
        (sines(number - narrow, hidden[:, : SIDE // 2].clone()) if narrow < number else hidden).sum().backward()
        assert torch.equal(leaf.grad, expected.grad)
        del loss, hidden
        window = inspect(store).device_window
        assert (window.resident.used_bytes, window.resident.granted_bytes) == (0, 0)


@_PLACES
def test_stream_changed_between_packs_each_is_copied_from_its_own(
    store: TierStore, copies: _Copies, device_bytes: int | str
) -> None:
    leaf = new_leaf()
    with _scope(store, device_bytes):
        hidden = sines(21, leaf * 2)
        copies.now = 1
        loss = sines(20, hidden).sum()
        copies.now = 2
        del hidden
    if device_bytes:
        assert {_name(tracked.stream) for tracked in inspect(store).tracked} == {(0, 0), (0, 1)}
    inspect(store).residency.keep_on_device(0)  # all leaves
    store.flush()
    assert copies.copied_from == {(0, 0): 21, (0, 1): 20}
    loss.backward()
    assert_right(leaf, 41)


@_PLACES
def test_two_devices_in_one_graph_each_tensor_is_on_its_own(store: TierStore, device_bytes: int | str) -> None:
    def loss_of(leaf: torch.Tensor) -> torch.Tensor:
        wide = narrow = leaf * 2
        narrow = narrow.reshape(-1, 1).clone()
        for _ in range(5):
            wide, narrow = sines(4, wide), sines(3, narrow)
        return wide.sum() + narrow.sum()

    leaf, expected = new_leaf(), new_leaf()
    for _ in range(3):  # the last one follows a plan
        leaf.grad = expected.grad = None
        with _scope(store, device_bytes):
            loss = loss_of(leaf)
        if device_bytes:
            assert Counter(tracked.device.index for tracked in inspect(store).tracked) == {0: 20, 1: 15}
            assert all(_name(tracked.stream) == (tracked.device.index, 0) for tracked in inspect(store).tracked)
        store.flush()
        assert {record.device.index for record in inspect(store).records} <= {0, 1}
        loss.backward()
        loss_of(expected).backward()
        assert torch.equal(leaf.grad, expected.grad)
        del loss


@_PLACES
def test_tensors_in_host_memory_beside_those_of_a_device_stay_there(store: TierStore, device_bytes: int | str) -> None:
    """Neither goes by the other's grant."""

    def loss_of(leaf: torch.Tensor) -> torch.Tensor:
        wide = leaf * 2
        narrow = wide.reshape(-1, 2).clone()
        for _ in range(5):
            wide, narrow = sines(4, wide), sines(3, narrow)
        return wide.sum() + narrow.sum()

    leaf, expected = new_leaf(), new_leaf()
    for _ in range(3):
        leaf.grad = expected.grad = None
        with _scope(store, device_bytes):
            loss = loss_of(leaf)
            on_host = [tracked for tracked in inspect(store).tracked if tracked.device is None]
            registered = [record.num_members for record in inspect(store).records if record.device is None]
            assert len(on_host) + sum(registered) == 15
            assert inspect(store).tracked_bytes == len(on_host) * NBYTES
            assert all(tracked.stream is None for tracked in on_host)
        loss.backward()
        loss_of(expected).backward()
        assert torch.equal(leaf.grad, expected.grad)
        del loss, on_host


@_PLACES
def test_edit_in_place_of_what_was_packed_without_the_lock_is_found(store: TierStore, device_bytes: int | str) -> None:
    with _scope(store, device_bytes):
        hidden = sines(10, new_leaf() * 2)
        loss = hidden.sin().sum()
        hidden.detach().add_(1)
        del hidden
    with pytest.raises(ModifiedInPlaceError):
        loss.backward()
    forget_after_error()


def test_room_that_is_granted_and_not_used_is_not_reported(store: TierStore) -> None:
    devices = inspect(store).devices
    with _scope(store, "64MiB"):
        loss = sines(10, new_leaf() * 2).sum()
        inspect(store)  # enters them
        loss = sines(2, loss.expand(SIDE, SIDE) * 2).sum()
        assert devices.window.resident.granted_bytes > 2**20
        assert devices.held_bytes <= 12 * NBYTES
    assert store.stats().device_bytes == 12 * NBYTES


def test_view_of_what_has_a_record_shares_that_whatever_is_granted(store: TierStore) -> None:
    with _scope(store, "64MiB"):
        hidden = sines(3, new_leaf() * 2)
        loss = hidden.sin().sum() + sines(2, new_leaf() * 2).sum()
        store.stats()  # registers what is settled
        loss = loss + sines(5, new_leaf() * 2).sum()  # with a grant
        num_tracked = len(inspect(store).tracked)
        loss = loss + sines(3, new_leaf() * 2).sum()  # with another
        loss = loss + hidden.cos().sum()
        assert len(inspect(store).tracked) == num_tracked + 3
        del hidden
    loss.backward()


def test_large_tensor_that_is_to_leave_leaves_alone_whatever_is_granted(store: TierStore) -> None:
    """More than half of a batch is at once a record of its own."""
    for _ in range(5):  # the store's own thread ends a grant when it comes in between
        leaf = torch.full((5 * NBYTES // 4,), 0.5, requires_grad=True)  # a batch holds six of them, a group three
        with _scope(store, 0):
            hidden = sines(2, leaf * 2)  # the first is registered, the second leaves a grant of the rest of a batch
            large = torch.cat([hidden] * 4).sin()
            assert len(inspect(store).records) == 2
            loss = large.sum() + hidden.sum()
        loss.backward()
        del loss, hidden, large
        store.flush()


def test_three_threads_with_grants_of_one_device_no_more_stays_than_may(store: TierStore) -> None:
    window, limit_bytes = inspect(store).device_window, 100 * NBYTES
    together = threading.Barrier(3)
    leaves = [new_leaf() for _ in range(3)]

    def pack(leaf: torch.Tensor) -> None:
        with _scope(store, limit_bytes):
            together.wait(60)
            hidden = sines(3, leaf * 2)
            together.wait(60)
            hidden = sines(40, hidden)
            together.wait(60)
            inspect(store)  # enters them
            assert window.resident.used_bytes + window.resident.granted_bytes <= limit_bytes + window.group_bytes
            together.wait(60)
        hidden.sum().backward()

    in_threads(*(partial(pack, leaf) for leaf in leaves))
    for leaf in leaves:
        assert_right(leaf, 43)


def test_what_the_newest_node_packed_does_not_leave(store: TierStore) -> None:
    with _scope(store, "64MiB"):
        loss = SaveThree.apply(SaveThree.apply(sines(5, new_leaf() * 2)))
        inspect(store).residency.keep_on_device(0)
        assert len(inspect(store).tracked) == 3
        hidden = sines(1, loss)
        assert inspect(store).tracked == []
    hidden.sum().backward()
