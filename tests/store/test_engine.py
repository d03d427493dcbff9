"""The engine by itself, over a real disk tier: what is submitted is moved, in the right order, until it ends."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from tests.inspect_store import inspect_engine
from tierstore.base.threads import IoThreads, start_thread
from tierstore.disk.local import LocalDisk
from tierstore.disk.tier import Kind, Stored
from tierstore.ledger.state import State
from tierstore.residency.transfers import BytesToWrite
from tierstore.store.engine import Engine, OpenDisk

NBYTES = 50_000


class Books:
    """Stands for the residency of an engine: wants everything, and writes down what it is told."""

    def __init__(self) -> None:
        self.contents: dict[int, bytes] = {}
        self.restored: dict[int, bytearray] = {}
        self.outcomes: dict[tuple[str, int], object] = {}
        self.told = threading.Condition()
        self.endings: list[BaseException | None] = []

    def begin_spill(self, record: Any) -> BytesToWrite:
        return BytesToWrite(memoryview(self.contents[record.key]), Kind("uint8", 1), record.ready)

    def end_spill(self, record: Any, outcome: Stored | Exception) -> None:
        self._note("spill", record.key, outcome)

    def begin_restore(self, record: Any) -> memoryview:
        return memoryview(self.restored.setdefault(record.key, bytearray(NBYTES)))

    def end_restore(self, record: Any, outcome: int | Exception) -> None:
        self._note("restore", record.key, outcome)

    def end_discard(self, num_records: int) -> None:
        pass

    def engine_ended(self, error: BaseException | None) -> None:
        with self.told:
            self.endings.append(error)
            self.told.notify_all()

    def _note(self, what: str, key: int, outcome: object) -> None:
        with self.told:
            self.outcomes[what, key] = outcome
            self.told.notify_all()

    def wait_for(self, what: str, *keys: int) -> None:
        with self.told:
            assert self.told.wait_for(lambda: all((what, key) in self.outcomes for key in keys), 20), self.outcomes


def _record(key: int, ready: object = None) -> Any:
    return SimpleNamespace(key=key, ready=ready, nbytes=NBYTES, state=State.QUEUED)


@pytest.fixture
def open_disk(store_directory: Path) -> OpenDisk:
    async def open_it(executor: Executor) -> LocalDisk:
        return LocalDisk(
            store_directory, disk_bytes=2**28, inline_bytes=1024, codec="none", checksum=True, executor=executor
        )

    return open_it


@pytest.fixture
def open_engine(open_disk: OpenDisk) -> Iterator[Callable[[], tuple[Engine, Books]]]:
    engines: list[Engine] = []

    def make() -> tuple[Engine, Books]:
        books = Books()
        engines.append(Engine(open_disk, "tierstore-test"))
        engines[-1].serve(books)
        return engines[-1], books

    yield make
    for engine in engines:
        engine.stop(20)


def _fill(books: Books, keys: range, nbytes: int = NBYTES) -> None:
    for key in keys:
        books.contents[key] = bytes([key % 251]) * nbytes


def test_what_is_submitted_before_serve_begins_then(open_disk: OpenDisk) -> None:
    engine, books = Engine(open_disk, "tierstore-test"), Books()
    _fill(books, range(3))
    for key in range(3):
        engine.submit_spill(_record(key))
    assert engine.disk_budget_bytes == 2**28  # the disk tier is open
    engine.serve(books)
    books.wait_for("spill", *range(3))
    engine.stop(20)
    assert books.endings == [None]


def test_stop_before_serve_ends_the_engine(open_disk: OpenDisk) -> None:
    engine = Engine(open_disk, "tierstore-test")
    engine.stop(20)
    assert not engine.is_running


def test_small_records_wait_for_company_or_for_somebody_who_waits(
    open_engine: Callable[[], tuple[Engine, Books]],
) -> None:
    engine, books = open_engine()
    _fill(books, range(5000), 100)
    begun: list[int] = []
    begin = books.begin_spill
    books.begin_spill = lambda record: begun.append(record.key) or begin(record)  # type: ignore[method-assign]
    small = [_record(key) for key in range(5000)]
    for record in small:
        record.nbytes = 100
    for record in small[:10]:
        engine.submit_spill(record)
    engine.submit_spill(_record(4999))
    books.wait_for("spill", 4999)
    assert begun == [4999], "others do not take them along"
    small[3].state = State.HOST  # it was asked for
    engine.hurry()
    books.wait_for("spill", *(key for key in range(10) if key != 3))
    assert 3 not in begun
    for record in small[10:4990]:
        record.state = State.FREED
        engine.submit_spill(record)
        record.state = State.HOST
    assert inspect_engine(engine).num_held_back <= 1024, "those that nobody wants written any more are not kept"
    for record in small[10:4990]:
        record.state = State.QUEUED
        engine.submit_spill(record)
    books.wait_for("spill", *range(10, 3000))
    engine.hurry()
    books.wait_for("spill", *range(10, 4990))


def test_spill_waits_for_the_copy_that_fills_its_slot(open_engine: Callable[[], tuple[Engine, Books]]) -> None:
    engine, books = open_engine()
    memory = bytearray(NBYTES)
    books.contents[1] = memory  # type: ignore[assignment]
    _fill(books, range(2, 3))
    copied = threading.Event()
    engine.submit_spill(_record(1, SimpleNamespace(synchronize=copied.wait)))
    engine.submit_spill(_record(2))
    books.wait_for("spill", 2)
    assert ("spill", 1) not in books.outcomes
    memory[:] = b"c" * NBYTES
    copied.set()
    books.wait_for("spill", 1)
    engine.submit_restore(_record(1), demanded=True)
    books.wait_for("restore", 1)
    assert books.restored[1] == b"c" * NBYTES


def test_stop_is_idempotent_and_tells_the_books_once(open_engine: Callable[[], tuple[Engine, Books]]) -> None:
    engine, books = open_engine()
    engine.request_stop()
    engine.stop(20)
    engine.stop(20)
    engine.request_stop()
    assert not engine.is_running
    assert books.endings == [None]
    engine.submit_spill(_record(1))  # nobody listens; nothing is raised
    engine.submit_restore(_record(1), demanded=True)
    engine.submit_discard(1)


# --- threads ------------------------------------------------------------------------------------------------------


async def test_io_threads_run_jobs_and_deliver_what_they_raise() -> None:
    threads = IoThreads(2, "tierstore-test")
    assert await threads.submit(divmod, 7, 2) == (3, 1)
    assert await threads.submit(lambda *, a: a, a=5) == 5
    with pytest.raises(ZeroDivisionError):
        await threads.submit(divmod, 7, 0)
    leaving = threads.submit(exit)
    await asyncio.wait((leaving,), timeout=20)
    assert isinstance(getattr(leaving.exception(), "__cause__", None), SystemExit)
    assert await asyncio.get_running_loop().run_in_executor(threads, int) == 0
    threads.shutdown()


async def test_io_threads_shut_down_finish_what_is_queued() -> None:
    threads = IoThreads(1, "tierstore-test")
    door = threading.Event()
    first, second = threads.submit(door.wait, 20), threads.submit(int)
    start_thread(door.set, "tierstore-opener")
    threads.shutdown()
    assert (await first, await second) == (True, 0)


def test_io_threads_loop_that_is_gone_does_not_end_them() -> None:
    threads = IoThreads(1, "tierstore-test")
    door, ran = threading.Event(), threading.Event()

    async def leave_jobs_behind() -> None:
        threads.submit(door.wait, 20)
        threads.submit(ran.set)

    uvloop.run(leave_jobs_behind())
    door.set()
    threads.shutdown()
    assert ran.is_set()
