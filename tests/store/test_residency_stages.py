"""Every stage of a record's way, held still: what asks, drops, changes and closes do just then."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.conftest import MakeStore
from tests.inspect_store import inspect
from tests.store.bench import Bench, HeldDisk
from tests.waiting import until, until_empty
from tierstore import Handle, ModifiedInPlaceError, StorageIOError, StoreClosedError, TierStore
from tierstore.base.defaults import NUM_IN_FLIGHT
from tierstore.disk.local import LocalDisk
from tierstore.disk.tier import Stored
from tierstore.hooks.order import LogOptions, PackLog, open_log
from tierstore.ledger.state import State
from tierstore.residency.handle import Record
from tierstore.tensors.layout import layout_of, memory_at, storage_address

pytestmark = pytest.mark.usefixtures("validated")
NBYTES = 40_000


def _tensor(number: int = 0) -> torch.Tensor:
    return torch.arange(NBYTES // 4, dtype=torch.float32) + number


def _save(store: TierStore, log: PackLog, node: int, *fresh: Record) -> Handle:
    tensor = _tensor(node)
    handle, _ = inspect(store).residency.saving.save(tensor, layout_of(tensor), None, None, log, node, list(fresh))
    return handle


def _log(store: TierStore) -> PackLog:
    return open_log(store, LogOptions(lookahead_bytes=None, orders=None, device_bytes=0))


@pytest.fixture
def bench(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr("tierstore.store.options.LocalDisk", HeldDisk)
    monkeypatch.setattr("tierstore.residency.guard._LOOK_SECONDS", 60.0)  # else news that is lost would only be late
    bench = Bench(make_store)
    yield bench
    bench.end()


@contextmanager
def _begun_to_die(last: list[Handle]) -> Iterator[None]:
    """The list holds the last reference to a handle. Inside, that is dying on another thread; afterwards it is gone."""
    begun, may_end = threading.Event(), threading.Event()
    watch = weakref.ref(last[0], lambda _: (begun.set(), may_end.wait(30)))  # before the store's own: the newest first
    dying = threading.Thread(target=last.clear)
    dying.start()
    assert begun.wait(20)
    yield
    may_end.set()
    dying.join(20)
    assert watch() is None


def _at(bench: Bench, stage: str, **options: object) -> tuple[TierStore, HeldDisk, Handle, threading.Event]:
    """A store with one handle, standing still at a stage; what has the engine's loop go on, where that stands still."""
    store, disk = bench.open(**options)
    go_on = threading.Event()
    if stage == "queued":
        go_on = bench.stall_loop(store)
    elif stage == "writing":
        disk.hold("write")
    handle = store.put(_tensor())
    if stage == "writing":
        disk.await_begin("write", handle)
    elif stage != "queued":
        store.flush()
    if stage == "read queued":
        go_on = bench.stall_loop(store)
        store.prefetch([handle])
    elif stage == "reading":
        disk.hold("read")
        store.prefetch([handle])
        disk.await_begin("read", handle)
    elif stage == "clean":
        store.prefetch([handle])
        until(lambda: handle.record.state is State.CLEAN)
    states = {"queued": State.QUEUED, "writing": State.WRITING, "disk": State.DISK, "clean": State.CLEAN}
    assert handle.record.state is states.get(stage, State.READING)
    return store, disk, handle, go_on


STAGES = ("queued", "writing", "disk", "read queued", "reading", "clean")


@pytest.mark.parametrize("stage", STAGES)
def test_drop_at_every_stage_frees_everything(bench: Bench, stage: str) -> None:
    store, disk, handle, go_on = _at(bench, stage)
    key = handle.record.key
    del handle
    assert store.stats().live_handles == 0
    go_on.set()
    disk.release()
    until_empty(store)
    assert (key in disk.written) == (stage != "queued")
    assert store.stats().cancelled_bytes == (NBYTES if stage == "queued" else 0)
    until(lambda: disk.usage().num_records == 0)
    after = store.put(_tensor(1))
    store.flush()
    assert torch.equal(store.get(after), _tensor(1))


@pytest.mark.parametrize("fails", [False, True])
def test_memory_moved_while_it_is_written_what_was_written_is_not_taken_for_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """As a queue of `torch.multiprocessing` moves it. What was there belongs to others then, who write to it."""
    store, disk = bench.open()
    disk.hold("write")
    tensor = _tensor()
    handle = store.put(tensor)
    disk.await_begin("write", handle)
    left_behind, address = torch._lazy_clone(tensor), storage_address(tensor)  # keeps the memory, for this test to read
    tensor.share_memory_()
    assert storage_address(tensor) != address == storage_address(left_behind)
    memory_at(address, NBYTES, writable=True)[:] = bytes(NBYTES)
    if fails:
        refusal = StorageIOError("write", "the drive", "Bad address", "the bytes are in memory")
        monkeypatch.setattr(LocalDisk, "write", lambda *_: _raise_later(refusal))
    disk.release()
    record = handle.record
    until(lambda: record.state is State.PENDING)
    store.flush()
    del tensor
    gc.collect()
    store.flush()  # it stays where it is
    now = store.stats()
    assert (now.disk_bytes, now.staging_used_bytes, now.host_bytes) == (0, 0, 0)
    assert disk.usage().num_records == 0
    assert torch.equal(store.get(handle), _tensor())
    del handle
    until_empty(store)
    assert store.stats().kept_bytes["alive elsewhere"] == NBYTES


async def _raise_later(error: Exception) -> Stored:
    raise error


def test_read_that_ends_while_the_handle_has_only_begun_to_die_frees_everything(bench: Bench) -> None:
    """There is nothing left to put the bytes into, and nobody has been told yet that the handle is gone."""
    store, disk, handle, _ = _at(bench, "reading")
    record = handle.record
    last = [handle]
    del handle
    with _begun_to_die(last):
        disk.release()
        until(lambda: disk.usage().num_records == 0)
        assert record.state is State.FREED
        assert store.stats().staging_used_bytes == 0
    del record
    until_empty(store)


@pytest.mark.parametrize("stage", STAGES)
def test_close_at_every_stage_frees_everything(bench: Bench, stage: str) -> None:
    store, disk, handle, go_on = _at(bench, stage)
    go_on.set()
    disk.release()
    store.close()
    now = store.stats()
    assert (now.host_bytes, now.staging_used_bytes, now.lent_bytes, now.disk_bytes) == (0, 0, 0, 0)
    with pytest.raises(StoreClosedError):
        store.get(handle)
    del handle
    assert store.stats().live_handles == 0


@pytest.mark.parametrize("stage", STAGES)
def test_get_at_every_stage_returns_the_bytes(bench: Bench, stage: str) -> None:
    store, disk, handle, go_on = _at(bench, stage)
    if stage in ("read queued", "reading"):
        future = bench.on_thread(store, store.get, handle)
        go_on.set()
        disk.release()
        result = future.result(20)
    else:
        result = store.get(handle)
    assert torch.equal(result, _tensor())
    go_on.set()
    disk.release()
    store.flush()
    assert torch.equal(store.get(handle), _tensor())
    assert store.stats().forwarded_bytes == (NBYTES if stage in ("queued", "writing") else 0)


def test_get_overtakes_every_queued_prefetch(bench: Bench) -> None:
    store, disk = bench.open()
    handles = [store.put(_tensor(i)) for i in range(20)]
    store.flush()
    disk.hold("read")
    store.prefetch(handles[:15])
    for handle in handles[:NUM_IN_FLIGHT]:
        disk.await_begin("read", handle)
    wanted = [bench.on_thread(store, store.get, handles[i]) for i in (14, 19)]
    disk.release()
    assert torch.equal(wanted[0].result(20), _tensor(14))
    assert torch.equal(wanted[1].result(20), _tensor(19))
    order = [disk.began.get(timeout=20) for _ in range(2)]
    assert order == [("read", handles[14].record.key), ("read", handles[19].record.key)]
    stats = store.stats()
    assert (stats.prefetch_late, stats.prefetch_misses) == (1, 1)


def test_change_while_a_get_waits_is_found(bench: Bench) -> None:
    store, disk = bench.open()
    tensor = _tensor()
    handle = store.put(tensor)
    store.flush()
    disk.hold("read")
    waiting = bench.on_thread(store, store.get, handle)
    tensor.add_(1)
    disk.release()
    with pytest.raises(ModifiedInPlaceError):
        waiting.result(20)


@pytest.mark.parametrize("stage", ["writing", "disk", "reading", "clean"])
def test_join_once_the_bytes_were_read_is_refused(bench: Bench, stage: str) -> None:
    """What else is saved of the storage would not be on disk."""
    store, _, handle, _ = _at(bench, stage)
    assert not inspect(store).residency.saving.join(handle.record, handle.record.layout, NBYTES)
    assert store.stats().packed_tensors == 1


def test_held_again_while_it_is_kept_in_memory_is_left_alone(bench: Bench) -> None:
    store, _ = bench.open(host_bytes=NBYTES)
    log = _log(store)
    first = _save(store, log, 1)
    inspect(store).residency.saving.settle([first.record])
    assert store.stats().host_bytes == NBYTES
    assert first.record.source is not None
    taken = first.record.source.detach()
    second = _save(store, log, 2)
    inspect(store).residency.saving.settle([second.record])
    store.flush()
    assert (first.record.state, second.record.state) == (State.PENDING, State.HOST)
    assert store.stats().spilled_bytes == 0
    del taken


def test_held_again_while_it_waits_for_room_is_left_alone(bench: Bench) -> None:
    store, disk = bench.open(staging_bytes=NBYTES)
    disk.hold("write")
    log = _log(store)
    first = _save(store, log, 1)
    second = _save(store, log, 2, first.record)
    waiting = bench.on_thread(store, _save, store, log, 3, second.record)
    assert second.record.source is not None
    taken = second.record.source.detach()
    disk.release()
    waiting.result(20)
    store.flush()
    assert (first.record.state, second.record.state) == (State.DISK, State.PENDING)
    del taken
    store.flush()
    assert second.record.state is State.DISK


# --- waiting, and what ends it ------------------------------------------------------------------------------------


def _waiting_in_put(bench: Bench) -> tuple[TierStore, HeldDisk, list[Handle], Future[Any]]:
    store, disk = bench.open(staging_bytes=2 * NBYTES)
    disk.hold("write")
    handles = [store.put(_tensor(0)), store.put(_tensor(1))]
    for handle in handles:
        disk.await_begin("write", handle)
    return store, disk, handles, bench.on_thread(store, store.put, _tensor(2))


def test_news_that_comes_just_as_a_look_ends_is_not_lost(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.residency.guard._LOOK_SECONDS", 0.05)
    store, _ = bench.open(host_bytes=0)
    handle = store.put(_tensor())
    store.flush()
    ledger = store._core.residency.ledger
    end_discard = ledger._end_discard

    def ends_late(num_records: int) -> None:
        time.sleep(1)  # under the lock: the look ends meanwhile, and then the waiter is notified
        end_discard(num_records)

    monkeypatch.setattr(ledger, "_end_discard", ends_late)
    go_on = bench.stall_loop(store)
    del handle
    flushing = bench.on_thread(store, store.flush)
    go_on.set()
    flushing.result(20)


@pytest.mark.parametrize("what", ["put", "flush", "get"])
def test_close_wakes_whoever_waits(bench: Bench, what: str) -> None:
    if what == "get":
        store, disk, handle, _ = _at(bench, "reading")
        futures = [bench.on_thread(store, store.get, handle) for _ in range(3)]
    else:
        store, disk, _handles, future = _waiting_in_put(bench)
        futures = [future] if what == "put" else [future, bench.on_thread(store, store.flush)]
    closing = ThreadPoolExecutor(1).submit(store.close)
    for future in futures:
        with pytest.raises(StoreClosedError):
            future.result(20)
    assert not closing.done(), "close waits for the I/O in progress"
    disk.release()
    closing.result(20)


def test_close_wakes_whoever_waits_before_the_engine_has_ended(bench: Bench) -> None:
    store, disk, handle, go_on = _at(bench, "queued", staging_bytes=NBYTES)
    waiting = bench.on_thread(store, store.put, _tensor(1))
    closing = ThreadPoolExecutor(1).submit(store.close)
    with pytest.raises(StoreClosedError):
        waiting.result(20)
    assert not closing.done()
    go_on.set()
    closing.result(20)
    assert handle.record.key not in disk.written, "what is queued is abandoned"


@pytest.mark.parametrize("how", ["get", "prefetch", "drop"])
def test_flush_ends_when_the_last_queued_write_is_cancelled(bench: Bench, how: str) -> None:
    store, _, handle, go_on = _at(bench, "queued")
    flush = bench.on_thread(store, store.flush)
    if how == "get":
        assert torch.equal(store.get(handle), _tensor())
    elif how == "prefetch":
        store.prefetch([handle])
        until(lambda: handle.record.state is State.QUEUED)  # by the flush, before the engine comes to the first one
    else:
        del handle
    go_on.set()
    flush.result(20)


@pytest.mark.parametrize(
    ("stage", "is_dropped"),
    [("queued", True), ("read queued", True), ("queued", False), ("reading", False)],
    ids=["dropped while queued", "dropped while its read is queued", "cancelled by a get", "read by a get"],
)
def test_put_goes_on_in_the_room_of_the_one_before_it(bench: Bench, stage: str, is_dropped: bool) -> None:
    store, disk, handle, go_on = _at(bench, stage, staging_bytes=NBYTES)
    get = None if is_dropped or stage == "queued" else bench.on_thread(store, store.get, handle)
    put = bench.on_thread(store, store.put, _tensor(5))
    if stage == "queued" and not is_dropped:
        assert torch.equal(store.get(handle), _tensor())
    if is_dropped:
        del handle
    go_on.set()
    disk.release()
    if get is not None:
        assert torch.equal(get.result(20), _tensor())
    assert torch.equal(store.get(put.result(20)), _tensor(5))
    assert store.stats().stall_seconds["pack waits for budget"] > 0


def test_put_goes_on_when_a_handle_has_only_begun_to_die(bench: Bench) -> None:
    """The write is passed over because the handle dies just then, and nobody comes later to tell the put that waits."""
    store, _, handle, go_on = _at(bench, "queued", staging_bytes=NBYTES)
    waiting = bench.on_thread(store, store.put, _tensor(1))
    last = [handle]
    del handle
    with _begun_to_die(last):
        go_on.set()
        other = waiting.result(20)
    assert torch.equal(store.get(other), _tensor(1))
    del other, waiting
    until_empty(store)


def test_flush_ends_when_the_handle_of_the_last_write_has_only_begun_to_die(bench: Bench) -> None:
    store, _, handle, go_on = _at(bench, "queued")
    flush = bench.on_thread(store, store.flush)
    last = [handle]
    del handle
    with _begun_to_die(last):
        go_on.set()
        flush.result(20)


@pytest.mark.parametrize("next_call", ["stats", "get"])
def test_prefetch_goes_on_in_the_room_of_a_queued_handle_that_was_dropped(bench: Bench, next_call: str) -> None:
    store, _ = bench.open(staging_bytes=NBYTES)
    first, without_bytes = store.put(_tensor(1)), store.put(torch.empty(0))
    store.flush()
    go_on = bench.stall_loop(store)
    second = store.put(_tensor(2))
    store.prefetch([first])
    assert (first.record.state, second.record.state) == (State.DISK, State.QUEUED)
    del second
    if next_call == "get":
        store.get(without_bytes)
    else:
        store.stats()
    assert first.record.state is State.READING
    go_on.set()
    assert torch.equal(store.get(first), _tensor(1))


def test_memory_is_not_kept_by_idle_lanes(bench: Bench) -> None:
    store, _ = bench.open()
    storages = []
    for i in range(8):
        tensor = _tensor(i)
        storages.append(weakref.ref(tensor.untyped_storage()))
        handle = store.put(tensor)
        del tensor
        store.flush()
        storages.append(weakref.ref(store.get(handle).untyped_storage()))
    del handle
    until_empty(store)
    until(lambda: not any(storage() for storage in storages))
