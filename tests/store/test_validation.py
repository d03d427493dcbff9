"""Books that are not whole are noticed as soon as the lock is let go of: each rule of `validation.py`, broken once."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import MakeStore
from tests.device.fake import FakeDevice
from tests.existing import set_existing
from tests.hooks.programs import half_leaf, sine_chain
from tests.inspect_store import InsideStore, inspect
from tests.waiting import until
from tierstore import Handle, StorageIOError, StoreClosedError, TierStore, tiered_offload
from tierstore.ledger.state import State
from tierstore.ledger.validation import InvalidBooksError

NBYTES = 40_000

Break = Callable[[Any], AbstractContextManager[object]]


@pytest.fixture(autouse=True)
def _validated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTORE_VALIDATE", "1")


@contextmanager
def changed(owner: object, name: str, to: Any) -> Iterator[None]:
    before = getattr(owner, name)
    set_existing(owner, **{name: to})
    yield
    set_existing(owner, **{name: before})


def more(owner: object, name: str, by: int = 1) -> AbstractContextManager[None]:
    return changed(owner, name, getattr(owner, name) + by)


@contextmanager
def done(change: Callable[[], object], undo: Callable[[], object]) -> Iterator[None]:
    change()
    yield
    undo()


def notices(inside: InsideStore, broken: AbstractContextManager[object], words: str) -> pytest.ExceptionInfo[Any]:
    """In a block of this thread. The worker would notice it, too, so it must not have the lock meanwhile."""
    lock: Any = inside.lock
    with lock:
        pass
    lock.acquire()  # unlike a block, this validates nothing
    try:
        with broken, pytest.raises(InvalidBooksError, match=words) as raised, lock:
            pass
    finally:
        lock.release()
    with lock:
        pass
    return raised


def _put(store: TierStore, number: int) -> Handle:
    return store.put(torch.full((NBYTES // 4,), float(number)))


@pytest.fixture
def books(make_store: MakeStore) -> Any:
    """Of a store with a record in each state of rest, whose handles live."""
    store = make_store(host_bytes=3 * NBYTES, staging_bytes=2 * NBYTES)
    handles = [_put(store, number) for number in range(6)]
    store.flush()
    on_disk = [handle for handle in handles if handle.record.state is State.DISK]
    assert len(on_disk) >= 2
    store.get(on_disk[0])
    inside = inspect(store)
    of_state = {handle.record.state: handle.record for handle in handles}
    assert of_state.keys() == {State.HOST, State.CLEAN, State.DISK}
    return SimpleNamespace(
        store=store,
        inside=inside,
        handles=handles,
        all=inside.books,
        host=of_state[State.HOST],
        clean=of_state[State.CLEAN],
        disk=of_state[State.DISK],
        windows=inside.books.windows,
        eviction=inside.books.eviction,
        jobs=inside.books.jobs,
    )


RECORDS: dict[str, tuple[Break, str]] = {
    "a charge is forgotten": (lambda it: more(it.windows.host, "used_bytes", -1), "bytes charged to host"),
    "staging is charged once more": (lambda it: more(it.windows.staging, "used_bytes"), "bytes charged to staging"),
    "a slot is outstanding that is not": (lambda it: more(it.windows.outstanding, "used_bytes"), "outstanding bytes"),
    "more is in staging than is tracked": (
        lambda it: done(lambda: _charge_tracked(it.windows, 1), lambda: _charge_tracked(it.windows, -1)),
        "staging is charged with more than is tracked",
    ),
    "a record has another charge than its bytes": (lambda it: more(it.host, "nbytes"), "has the wrong charge"),
    "a record is charged to the wrong window": (
        lambda it: done(
            lambda: it.windows.charge(it.host, it.windows.staging), lambda: it.windows.charge(it.host, it.windows.host)
        ),
        "takes room of staging",
    ),
    "what is on disk is left in a queue": (
        lambda it: done(lambda: it.eviction.add_dirty(it.disk), lambda: it.eviction.remove(it.disk)),
        "is in dirty",
    ),
    "what is in memory is in no queue": (
        lambda it: done(lambda: it.eviction.remove(it.host), lambda: it.eviction.add_dirty(it.host)),
        "is in no queue",
    ),
    "it is in two": (
        lambda it: done(lambda: it.eviction.add_asked(it.host), lambda: it.eviction._asked.pop(it.host.key)),
        "is in dirty and asked",
    ),
    "what was restored can never leave": (
        lambda it: done(lambda: it.eviction.remove(it.clean), lambda: it.eviction.add_clean(it.clean)),
        "can never leave",
    ),
    "it is queued under another key": (
        lambda it: done(lambda: it.eviction._dirty.update({-1: it.host}), lambda: it.eviction._dirty.pop(-1)),
        "is queued in dirty as -1",
    ),
    "a queue has what is not registered": (
        lambda it: done(lambda: it.all.records.pop(it.host.key), lambda: it.all.records.update({it.host.key: it.host})),
        "is in dirty, but not registered",
    ),
    "a record is blocked twice": (
        lambda it: done(lambda: it.all.blocked.extend([it.host] * 2), it.all.blocked.clear),
        "records that are blocked once",
    ),
    "its state was changed in passing": (lambda it: changed(it.host, "state", State.CLEAN), "is in dirty"),
    "bytes on disk have a slot": (lambda it: changed(it.disk, "slot", object()), "has a slot"),
    "no job works on what it holds": (lambda it: changed(it.disk, "held", object()), "no job runs"),
    "it failed for no reason": (lambda it: changed(it.disk, "state", State.FAILED), "has failed without a cause"),
    "it is freed while somebody has it": (
        lambda it: changed(it.disk, "state", State.FREED),
        "is freed, but its handle lives",
    ),
    "it is closed before the store": (lambda it: changed(it.disk, "state", State.CLOSED), "is closed before the store"),
    "it waits for more threads than there are": (lambda it: more(it.all, "num_getting"), "1 threads wait for 0"),
    "less than no thread packs": (lambda it: more(it.all, "num_packing", -1), "less than no thread"),
    "pending bytes are left": (lambda it: more(it.all.pending, "num_bytes"), "pending bytes"),
    "pending bytes are others'": (lambda it: more(it.all.pending, "shared_bytes"), "pending bytes that others hold"),
    "bytes on disk are left": (lambda it: more(it.all, "disk_bytes"), "bytes on disk"),
    "their peak was lower": (lambda it: changed(it.all, "disk_bytes_peak", 0), "the peak of the bytes on disk"),
    "a write is counted that is none": (lambda it: more(it.jobs, "num_writes"), "jobs that run: 1"),
    "a read is not counted": (lambda it: more(it.jobs, "num_reads", -1), "0 reads run, but -1 are counted"),
    "a discard is not counted": (
        lambda it: done(lambda: it.jobs._discards.append(1), it.jobs._discards.clear),
        "more is to be discarded",
    ),
    "small writes have bytes left": (lambda it: more(it.jobs, "_small_bytes"), "bytes of small writes"),
    "a counter goes below 0": (lambda it: changed(it.all.counters, "packed_bytes", -1), "counter packed_bytes is -1"),
    "nobody was told": (lambda it: changed(it.jobs, "has_news", True), "was not told"),
    "a record that is gone is to be fetched": (
        lambda it: done(
            lambda: it.all.explicit_prefetch.waiting.update({-1: it.host}), it.all.explicit_prefetch.waiting.clear
        ),
        "to be fetched explicitly, but not registered",
    ),
    "tracked bytes are left": (lambda it: more(it.all.tracked, "num_bytes"), "tracked bytes"),
    "a grant is not given back": (lambda it: more(it.all.tracked, "granted_bytes"), "granted bytes"),
}


def _charge_tracked(windows: Any, nbytes: int) -> None:
    set_existing(windows, tracked_bytes=windows.tracked_bytes + nbytes)
    set_existing(windows.staging, used_bytes=windows.staging.used_bytes + nbytes)


@pytest.mark.parametrize("name", RECORDS)
def test_broken_rule_of_a_record_is_noticed(books: Any, name: str) -> None:
    broken, words = RECORDS[name]
    notices(books.inside, broken(books), words)


def _log_of(inside: InsideStore) -> Any:
    (remains,) = inside.books.tracked._begun
    return remains()


TRACKED: dict[str, tuple[Break, str]] = {
    "bytes": (
        lambda log: done(lambda: log.num_tracked.update({(0, 7): 1}), lambda: log.num_tracked.pop((0, 7))),
        "log",
    ),
    "a tensor of no storage": (
        lambda log: changed(log, "tracked_storages", dict(list(log.tracked_storages.items())[1:])),
        "counts other tensors than it tracks",
    ),
    "a lost pack": (lambda log: more(log, "num_packs"), "has lost a pack"),
    "what is to leave": (lambda log: more(log, "leaving_bytes"), "bytes of log .* that wait to leave"),
    "a grant that nobody knows": (lambda log: changed(log, "grant", object()), "has a grant that nobody knows"),
}


@pytest.mark.parametrize("name", TRACKED)
def test_broken_rule_of_a_log_is_noticed(make_store: MakeStore, name: str) -> None:
    store = make_store(host_bytes="64MiB")
    with tiered_offload(store, min_bytes=0):
        loss = sine_chain(half_leaf(), 9)
    inside = inspect(store)
    broken, words = TRACKED[name]
    notices(inside, broken(_log_of(inside)), words)
    loss.backward()


def test_lost_member_of_a_group_is_noticed(make_store: MakeStore) -> None:
    store = make_store(host_bytes=0, staging_bytes="256KiB")
    with tiered_offload(store, min_bytes=0):
        loss = sine_chain(half_leaf(), 9)
    store.flush()
    inside = inspect(store)
    (group,) = (record for record in inside.records if record.num_members > 1)
    notices(inside, more(group, "num_members"), f"has {group.num_members} members")
    loss.backward()


DEVICE: dict[str, tuple[Break, str]] = {
    "what stays": (lambda it: more(it.device_window.resident, "used_bytes"), "bytes that stay on devices"),
    "what is granted": (lambda it: more(it.device_window.resident, "granted_bytes"), "bytes granted on devices"),
    "what flies": (lambda it: more(it.device_window.in_flight, "used_bytes"), "bytes being copied out"),
    "what came back": (lambda it: more(it.device_window.reloaded, "used_bytes"), "bytes copied back"),
    "what comes back ahead": (lambda it: more(it.devices, "_num_ahead"), "records copied back ahead"),
    "for what there was no room": (
        lambda it: done(lambda: it.devices.too_large.add(-1), it.devices.too_large.clear),
        "a record that is gone",
    ),
    "what nobody counts": (
        lambda it: changed(it.records[0], "claims", []),
        "has memory on its device that nobody counts",
    ),
    "what is no queue's": (
        lambda it: done(
            lambda: it.device_window._leaving.update({it.records[0].key: it.records[0]}),
            it.device_window._leaving.clear,
        ),
        "is in leaving its device and dirty",
    ),
}


@pytest.mark.parametrize("name", DEVICE)
def test_broken_rule_of_a_device_is_noticed(make_store: MakeStore, name: str) -> None:
    copies = FakeDevice()
    store = make_store(host_bytes="64MiB", copies=copies)
    with tiered_offload(store, min_bytes=0, device_bytes=0):
        loss = sine_chain(half_leaf(), 9)
    copies.synchronize()
    store.stats()
    inside = inspect(store)
    broken, words = DEVICE[name]
    notices(inside, broken(inside), words)
    loss.backward()


def test_error_names_the_record_and_tells_its_story(books: Any) -> None:
    words = f"handle {books.disk.key} .DISK, {NBYTES} bytes, no window"
    told = str(notices(books.inside, changed(books.disk, "slot", object()), words).value)
    moves = ["PENDING → HOST", "HOST → QUEUED", "QUEUED → WRITING", "WRITING → CLEAN", "CLEAN → DISK"]
    lines = told.splitlines()[2:]
    assert [line.strip().split(" by ")[0] for line in lines] == moves
    assert lines[0].endswith("by Down._try_admit, in Saving.store")
    assert lines[3].endswith("by Ledger._end_write, in Residency.exchange")


def test_long_story_is_told_from_its_latest_moves(books: Any) -> None:
    handle = next(handle for handle in books.handles if handle.record is books.disk)
    others = [other for other in books.handles if other is not handle]
    for _ in range(9):
        books.store.get(handle)
        for other in others:
            books.store.get(other)
    assert len(books.disk.story) == 12
    assert books.disk.story[-1].after is books.disk.state


def test_thread_that_waits_finds_them_broken_first(books: Any) -> None:
    go_on = books.inside.stall()
    with more(books.windows.host, "used_bytes"), pytest.raises(InvalidBooksError, match="bytes charged to host"):
        books.inside.wait_for_room()
    go_on.set()


def test_broken_by_the_worker_the_store_is_closed_and_says_why(make_store: MakeStore) -> None:
    store = make_store()
    inside = inspect(store)
    go_on = inside.stall()
    handle = _put(store, 0)
    set_existing(inside.books, disk_bytes=1)
    go_on.set()
    until(lambda: inside.closed is not None)
    with pytest.raises(StoreClosedError, match="bytes on disk"):
        store.get(handle)
    with pytest.raises(StorageIOError, match="bytes on disk"):
        store.close()


def test_books_of_a_closed_store_are_whole_and_empty(books: Any) -> None:
    books.store.close()
    with books.inside.lock:
        pass
    notices(books.inside, more(books.windows.host, "used_bytes"), "bytes charged to host: 1, but it should be 0")


@pytest.mark.parametrize("value", ["", "0"])
def test_unless_it_is_asked_for_nothing_is_validated_or_told(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("TIERSTORE_VALIDATE", value)
    store = make_store(host_bytes="64MiB")
    inside, handle = inspect(store), _put(store, 0)
    assert type(inside.lock) is type(threading.RLock())
    assert not hasattr(handle.record, "story")
    with more(inside.books.windows.host, "used_bytes"), inside.lock:
        pass
    with more(handle.record, "nbytes"), pytest.raises(InvalidBooksError, match="its story was not kept"):
        inside.ledger.validate()
