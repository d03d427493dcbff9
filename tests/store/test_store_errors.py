"""What goes wrong below reaches the thread that trains, once, with its cause; the bytes are where it says."""

import asyncio
import errno
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import MakeStore
from tests.inspect_store import inspect
from tests.testing.fault_matrix import chain_of
from tests.waiting import until
from tierstore import CorruptDataError, StorageIOError, StoreClosedError, StoreFullError, TierStore
from tierstore.disk.local import LocalDisk
from tierstore.disk.tier import Kind, Stored
from tierstore.ledger.state import State
from tierstore.testing import SimulatedCopies


def _tensor(number: int = 0) -> torch.Tensor:
    return torch.arange(10_000, dtype=torch.float32) + number


class FaultyDisk(LocalDisk):
    """The disk tier, with errors on the way in or out, as often as asked for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.write_errors: list[BaseException] = []
        self.read_errors: list[BaseException] = []
        self.discard_errors: list[BaseException] = []
        self.close_errors: list[BaseException] = []
        self.may_close = threading.Event()
        self.may_close.set()
        self.num_reads = 0

    async def write(self, key: int, source: memoryview, kind: Kind) -> Stored:
        if self.write_errors:
            raise self.write_errors.pop(0)
        return await super().write(key, source, kind)

    async def read(self, key: int, destination: memoryview) -> int:
        self.num_reads += 1
        if self.read_errors:
            destination[:] = b"\xa5" * len(destination)
            raise self.read_errors.pop(0)
        return await super().read(key, destination)

    async def discard(self, keys: Any) -> None:
        if self.discard_errors:
            raise self.discard_errors.pop(0)
        await super().discard(keys)

    async def close(self) -> None:
        while not self.may_close.is_set():
            await asyncio.sleep(0.01)
        await super().close()
        if self.close_errors:
            raise self.close_errors.pop(0)


@pytest.fixture(autouse=True)
def _faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.store.options.LocalDisk", FaultyDisk)


@pytest.fixture
def breaking_store(store_directory: Path) -> Iterator[TierStore]:
    """A store whose engine is going to fail; what `close` says of it then is not what the test is about."""
    store = TierStore(store_directory, host_bytes=0, disk_bytes="1GiB", codec="none")
    yield store
    _close_quietly(store)


def _disk_of(store: TierStore) -> FaultyDisk:
    disk = inspect(store).disk
    assert isinstance(disk, FaultyDisk)
    return disk


def _io_error() -> OSError:
    return OSError(errno.EIO, "Input/output error")


ERRORS = [_io_error, lambda: StorageIOError("write", "somewhere", "broken"), lambda: ValueError("a bug of ours")]
ERROR_IDS = ["OSError", "StorageIOError", "ValueError"]


@pytest.mark.parametrize("make_error", ERRORS, ids=ERROR_IDS)
def test_write_failed_reaches_flush_and_keeps_the_bytes(store: TierStore, make_error: Callable[[], Exception]) -> None:
    error = make_error()
    _disk_of(store).write_errors.append(error)
    handle = store.put(_tensor())
    with pytest.raises(type(error)) as caught:
        store.flush()
    assert caught.value is error or caught.value.__cause__ is error
    assert handle.record.state in (State.HOST, State.QUEUED)
    assert torch.equal(store.get(handle), _tensor())
    store.flush()  # told once
    assert torch.equal(store.get(handle), _tensor())


def test_write_failed_reaches_the_next_put(make_store: MakeStore) -> None:
    store = make_store(staging_bytes=40_000)
    _disk_of(store).write_errors.append(_io_error())
    handle = store.put(_tensor())
    with pytest.raises(OSError, match="Input/output"):
        store.put(_tensor(1))
    other = store.put(_tensor(2))
    store.flush()
    assert torch.equal(store.get(handle), _tensor())
    assert torch.equal(store.get(other), _tensor(2))


def test_write_refused_as_full_reaches_put_and_flush_with_its_cause(make_store: MakeStore) -> None:
    store = make_store(staging_bytes=40_000)
    full = StoreFullError(1, 2, 3, reason="No space left on device")
    full.__cause__ = error = OSError(errno.ENOSPC, "No space left on device")
    _disk_of(store).write_errors += [full] * 50
    handle = store.put(_tensor())
    for use in (lambda: store.put(_tensor(1)), store.flush):
        with pytest.raises(StoreFullError, match="disk") as caught:
            use()
        assert error in chain_of(caught.value)
    assert torch.equal(store.get(handle), _tensor())
    _disk_of(store).write_errors.clear()
    others = [store.put(_tensor(i)) for i in range(1, 4)]
    store.flush()
    assert handle.record.state is State.DISK
    for i, stored in enumerate([handle, *others]):
        assert torch.equal(store.get(stored), _tensor(i))


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("kind", [StorageIOError, StoreFullError])
def test_write_failed_error_forgotten_keeps_nothing_of_the_thread_that_trains(
    make_store: MakeStore, kind: type[Exception]
) -> None:
    """Its traceback refers to the frames of forward, and these to the tensors of the step."""
    store = make_store(staging_bytes=40_000)
    _disk_of(store).write_errors += [
        StorageIOError("write", "there", "broken") if kind is StorageIOError else StoreFullError(1, 2, 3)
        for _ in range(50)
    ]
    store_handles = [store.put(_tensor())]
    refs = []

    def forward() -> None:
        tensor = _tensor(1)
        refs.append(weakref.ref(tensor))
        store_handles.extend(store.put(tensor) for _ in range(3))

    try:
        forward()
    except kind:
        pass
    else:
        pytest.fail("nothing was raised")
    store_handles.clear()
    store.stats()
    assert refs[0]() is None


@pytest.mark.parametrize("make_error", ERRORS, ids=ERROR_IDS)
def test_read_failed_reaches_get_and_may_be_tried_again(store: TierStore, make_error: Callable[[], Exception]) -> None:
    handle = store.put(_tensor())
    store.flush()
    error = make_error()
    _disk_of(store).read_errors.append(error)
    with pytest.raises(type(error)) as caught:
        store.get(handle)
    assert caught.value is error or caught.value.__cause__ is error
    assert store.stats().staging_used_bytes == 0
    assert torch.equal(store.get(handle), _tensor())


def test_read_ahead_that_has_failed_is_not_told_to_get(store: TierStore) -> None:
    """It was a hint: nobody had asked for the bytes."""
    handle = store.put(_tensor())
    store.flush()
    _disk_of(store).read_errors.append(_io_error())
    store.prefetch([handle])
    until(lambda: _disk_of(store).num_reads == 1 and handle.record.state is State.DISK)
    assert torch.equal(store.get(handle), _tensor())
    assert _disk_of(store).num_reads == 2


def test_read_of_damaged_bytes_fails_every_get_alike(store: TierStore) -> None:
    handle, other = store.put(_tensor()), store.put(_tensor(1))
    store.flush()
    damage = CorruptDataError(handle.record.key, "segment 0", "1", "2")
    _disk_of(store).read_errors.append(damage)
    errors = []
    for _ in range(3):
        with pytest.raises(CorruptDataError) as caught:
            store.get(handle)
        errors.append(caught.value)
        assert caught.value.__cause__ is damage
        assert (caught.value.key, caught.value.place) == (damage.key, damage.place)
    assert len(set(map(id, errors))) == 3, "one exception raised twice drags its first traceback along"
    assert handle.record.state is State.FAILED
    assert _disk_of(store).num_reads == 1
    store.prefetch([handle])
    assert store.stats().staging_used_bytes == 0
    assert torch.equal(store.get(other), _tensor(1))
    errors.clear()
    del handle, caught  # their tracebacks have frames that refer to it
    assert store.stats().live_handles == 1


def test_discard_failed_ends_the_store_with_the_cause(breaking_store: TierStore) -> None:
    store = breaking_store
    error = _io_error()
    handle, other = store.put(_tensor()), store.put(_tensor(1))
    store.flush()
    _disk_of(store).discard_errors.append(error)
    del handle
    store.stats()
    inspect(store).thread.join(20)
    with pytest.raises(StoreClosedError, match="engine failed") as caught:
        store.get(other)
    assert error in chain_of(caught.value)
    for use in (store.flush, lambda: store.put(_tensor())):
        with pytest.raises(StoreClosedError):
            use()


class _FailsOnTheLoop(SimulatedCopies):
    """Copies that fail on any thread but the main one."""

    def _copy(self, *queued: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("the device has failed")
        return super()._copy(*queued)


def test_change_failed_on_the_loop_closes_the_store_before_the_engine_has_ended(store_directory: Path) -> None:
    with _FailsOnTheLoop() as copies:
        store = TierStore(
            store_directory, host_bytes=0, staging_bytes=40_000, disk_bytes="1GiB", codec="none", copies=copies
        )
        disk = _disk_of(store)
        disk.may_close.clear()
        too_late = threading.Timer(10, disk.may_close.set)
        too_late.start()
        handle = store.put(_tensor())
        with pytest.raises(StoreClosedError, match="the device has failed") as caught:
            store.put(_tensor(1))  # waits for the room that the first one takes; its copy begins on the loop
        assert not disk.may_close.is_set(), "told only when the engine had ended"
        assert isinstance(caught.value.__cause__, RuntimeError)
        disk.may_close.set()
        too_late.cancel()
        _close_quietly(store)
        now = store.stats()
        assert (now.host_bytes, now.staging_used_bytes, now.disk_bytes) == (0, 0, 0)
        del handle


def _close_quietly(store: TierStore) -> None:
    """The engine's own error is raised again; that is not what the test is about."""
    try:
        store.close()
    except BaseException:  # noqa: BLE001 - of whatever kind the test injected
        pass
