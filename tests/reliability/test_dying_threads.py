"""What becomes of a store when something ends one of its threads, or is raised in it: no call waits for ever.

Another thread raises it (PyThreadState_SetAsyncExc), as some time limits do.
"""

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.inspect_store import inspect
from tests.waiting import until
from tierstore import StorageIOError, StoreClosedError, TierStore


class _AskedToEnd(BaseException):
    """What is raised in a thread."""


def _raise_in(name: str) -> list[threading.Thread]:
    """Raise it in each thread whose name begins so. One that waits notices when it has something to do."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(name)]
    assert threads
    for thread in threads:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_AskedToEnd))
    return threads


def _opened(directory: Path) -> TierStore:
    """Each of its writes is encoded, so that the I/O threads have to do with it."""
    return TierStore(directory, host_bytes=0, disk_bytes="64MiB", codec="zstd")


def _ends(call: Callable[[], object]) -> None:
    """The call ends, in whatever way."""
    thread = threading.Thread(target=lambda: _ignoring(call), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it hangs"


def _ignoring(call: Callable[[], object]) -> None:
    try:
        call()
    except BaseException:  # noqa: BLE001 - any error will do
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_error_raised_in_each_io_thread_is_told_to_who_waits_and_the_threads_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # of those that have nothing to do until they end
    content = torch.arange(5000.0)
    store = _opened(tmp_path)
    kept = store.put(content.clone())
    store.flush()
    _raise_in("tierstore-io")

    def use() -> None:
        handles = [store.put(content.clone()) for _ in range(4)]
        store.flush()
        assert all(torch.equal(store.get(handle), content) for handle in handles)

    _ends(use)
    _ends(lambda: store.get(kept))
    _ends(store.close)
    gc.collect()  # closes a file if the error was raised in the job that was to do so
    assert not any(thread.name.startswith("tierstore-io") for thread in threading.enumerate())


def test_stats_do_not_claim_that_a_dead_thread_returns_memory(tmp_path: Path) -> None:
    with TierStore(tmp_path, disk_bytes="64MiB", return_memory="auto") as store:
        if store.stats().memory_return != "auto":
            pytest.skip("this allocator is left alone")
        (thread,) = _raise_in("tierstore-memory")
        thread.join(20)
        assert store.stats().memory_return == "off: its thread ended with _AskedToEnd()"


def test_death_of_the_thread_that_writes_a_trace_is_raised_where_the_trace_ends(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    store = TierStore(drive, disk_bytes="64MiB")

    def trace() -> None:
        with store.trace(tmp_path / "trace.jsonl"):
            (thread,) = _raise_in("tierstore-trace")
            store.flush()
            thread.join(20)

    with pytest.raises(StorageIOError, match="_AskedToEnd"):
        trace()
    store.close()


def test_callback_that_fails_on_the_loop_ends_the_engine_with_its_error(tmp_path: Path) -> None:
    """What it was to deliver is lost. The error was only logged, and whoever waited for that went on waiting."""

    def fail() -> None:
        raise MemoryError

    store = _opened(tmp_path)
    handle = store.put(torch.arange(5000.0))
    store.flush()
    engine = inspect(store).engine
    engine._loop.call_soon_threadsafe(fail)
    until(lambda: not engine.is_running)
    with pytest.raises(StoreClosedError, match="its engine failed") as raised:
        store.get(handle)
    assert isinstance(raised.value.__cause__, MemoryError)
    with pytest.raises(StorageIOError, match="MemoryError"):
        store.close()


def test_thread_of_the_loop_that_dies_without_a_word_ends_every_wait(tmp_path: Path) -> None:
    store = _opened(tmp_path)
    handle = store.put(torch.arange(5000.0))
    store.flush()
    engine = inspect(store).engine

    engine._residency.engine_ended = lambda _: None  # as if memory, or the stack, were exhausted there
    engine._loop.call_soon_threadsafe(engine._begin_to_stop)
    until(lambda: not engine.is_running)
    with pytest.raises(StoreClosedError, match="its engine's thread has died"):
        store.get(handle)
    store.close()
