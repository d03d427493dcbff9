"""The engine by itself, over a real disk tier: what is submitted is moved, in the right order, until it ends."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import uvloop

from tests.inspect_store import inspect_engine
from tierstore.base.threads import IoThreads, start_thread
from tierstore.disk.local import LocalDisk
from tierstore.disk.tier import Kind, Stored
from tierstore.errors import StorageIOError
from tierstore.ledger.jobs import Read, Room, Write
from tierstore.residency.transfers import BytesToWrite
from tierstore.store.engine import Engine, OpenDisk

NBYTES = 50_000


class Moves:
    """Stands for the residency of an engine: says what is to be moved, and writes down what it is told."""

    def __init__(self, engine: Engine) -> None:
        self.restored: dict[int, bytearray] = {}
        self.outcomes: dict[Any, object] = {}
        self.told = threading.Condition()
        self.endings: list[BaseException | None] = []
        self.rooms: list[Room] = []
        self.guard = SimpleNamespace(num_waiting=0)
        self._engine = engine
        self._waiting: deque[Any] = deque()
        self._entered: list[Any] = []  # kept, so that no id is used twice

    def write(self, key: int, contents: bytes | bytearray, ready: Any = None) -> Any:
        memory = BytesToWrite(memoryview(contents), Kind("uint8", 1), ready)
        return self._enter(Write(SimpleNamespace(key=key), memory))

    def read(self, key: int) -> Any:
        self.restored[key] = bytearray(NBYTES)
        return self._enter(Read(SimpleNamespace(key=key), memoryview(self.restored[key])))

    def _enter(self, job: Any) -> Any:
        with self.told:
            self._waiting.append(job)
            self._entered.append(job)
        self._engine.wake()
        return job

    def exchange(self, ended: Sequence[tuple[Any, Any]], room: Room) -> Sequence[Any]:
        with self.told:
            self.rooms.append(room)
            self.outcomes |= {id(job): outcome for job, outcome in ended}
            self.told.notify_all()
            return [self._waiting.popleft() for _ in range(min(len(self._waiting), room.writes, room.reads))]

    def engine_ended(self, error: BaseException | None) -> None:
        with self.told:
            self.endings.append(error)
            self.told.notify_all()

    def wait_for(self, *jobs: Any) -> None:
        with self.told:
            assert self.told.wait_for(lambda: all(id(job) in self.outcomes for job in jobs), 20), self.outcomes


@pytest.fixture
def open_disk(store_directory: Path) -> OpenDisk:
    async def open_it(executor: Executor) -> LocalDisk:
        return LocalDisk(
            store_directory, disk_bytes=2**28, inline_bytes=1024, codec="none", checksum=True, executor=executor
        )

    return open_it


@pytest.fixture
def open_engine(open_disk: OpenDisk) -> Iterator[Callable[[], tuple[Engine, Moves]]]:
    engines: list[Engine] = []

    def make() -> tuple[Engine, Moves]:
        engine = Engine(open_disk, "tierstore-test", num_lanes=2)
        engines.append(engine)
        moves = Moves(engine)
        engine.serve(moves)  # type: ignore[arg-type]
        return engine, moves

    yield make
    for engine in engines:
        engine.stop(20)


def test_what_is_to_be_moved_before_serve_is_moved_then(open_disk: OpenDisk) -> None:
    engine = Engine(open_disk, "tierstore-test")
    moves = Moves(engine)
    writes = [moves.write(key, bytes([key]) * NBYTES) for key in range(3)]
    assert engine.disk_budget_bytes == 2**28  # the disk tier is open
    turned = threading.Event()
    inspect_engine(engine).loop.call_soon_threadsafe(turned.set)
    assert turned.wait(20), "it has come to where it waits"
    engine.serve(moves)  # type: ignore[arg-type]
    moves.wait_for(*writes)
    engine.stop(20)
    assert moves.endings == [None]


def test_stop_before_serve_ends_the_engine(open_disk: OpenDisk) -> None:
    engine = Engine(open_disk, "tierstore-test")
    engine.stop(20)
    assert not engine.is_running


def test_worker_has_so_much_room_and_no_more(open_engine: Callable[[], tuple[Engine, Moves]]) -> None:
    engine, moves = open_engine()
    copied = threading.Event()
    late = [moves.write(key, bytes(NBYTES), SimpleNamespace(synchronize=copied.wait)) for key in range(5)]
    with moves.told:
        assert moves.told.wait_for(lambda: Room(0, 2, 1) in moves.rooms or engine.wake(), 20)
    assert not moves.outcomes
    copied.set()
    moves.wait_for(*late)
    assert all(isinstance(outcome, Stored) for outcome in moves.outcomes.values())
    with moves.told:
        assert moves.told.wait_for(lambda: moves.rooms[-1] == Room(2, 2, 1), 20)


def test_spill_waits_for_the_copy_that_fills_its_slot(open_engine: Callable[[], tuple[Engine, Moves]]) -> None:
    _, moves = open_engine()
    memory = bytearray(NBYTES)
    copied = threading.Event()
    late = moves.write(1, memory, SimpleNamespace(synchronize=copied.wait))
    moves.wait_for(moves.write(2, bytes(NBYTES)))
    assert id(late) not in moves.outcomes
    memory[:] = b"c" * NBYTES
    copied.set()
    moves.wait_for(late)
    moves.wait_for(moves.read(1))
    assert moves.restored[1] == b"c" * NBYTES


def test_writes_that_end_one_soon_after_the_other_are_reported_together_unless_somebody_waits(
    open_engine: Callable[[], tuple[Engine, Moves]],
) -> None:
    _, moves = open_engine()
    moves.wait_for(moves.write(0, bytes(NBYTES)))
    num_turns = len(moves.rooms)
    moves.guard.num_waiting = 1
    moves.wait_for(moves.write(1, bytes(NBYTES)))
    assert len(moves.rooms) == num_turns + 2, "one turn began it, and the next told that it had ended"
    moves.guard.num_waiting = 0
    first, second = moves.write(2, bytes(NBYTES)), moves.write(3, bytes(NBYTES))
    moves.wait_for(first, second)
    assert {type(moves.outcomes[id(job)]) for job in (first, second)} == {Stored}


def test_stop_is_idempotent_and_tells_the_residency_once(open_engine: Callable[[], tuple[Engine, Moves]]) -> None:
    engine, moves = open_engine()
    engine.request_stop()
    engine.stop(20)
    engine.stop(20)
    engine.request_stop()
    assert not engine.is_running
    assert moves.endings == [None]
    moves.write(1, bytes(NBYTES))  # nobody listens; nothing is raised


def test_stop_begins_nothing_more_and_waits_for_what_runs(open_engine: Callable[[], tuple[Engine, Moves]]) -> None:
    engine, moves = open_engine()
    copied = threading.Event()
    late = [moves.write(key, bytes(NBYTES), SimpleNamespace(synchronize=copied.wait)) for key in range(3)]
    with moves.told:
        assert moves.told.wait_for(lambda: Room(0, 2, 1) in moves.rooms or engine.wake(), 20)
    engine.request_stop()
    copied.set()
    engine.stop(20)
    assert [id(job) in moves.outcomes for job in late] == [True, True, False]


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


def test_engine_that_fails_lets_what_runs_end(store_directory: Path) -> None:
    written: list[int] = []

    class Noting(LocalDisk):
        async def write(self, key: int, source: memoryview, kind: Kind) -> Stored:
            stored = await super().write(key, source, kind)
            written.append(key)
            return stored

    async def open_noting(executor: Executor) -> LocalDisk:
        return Noting(store_directory, disk_bytes=2**28, inline_bytes=0, codec="none", checksum=True, executor=executor)

    engine = Engine(open_noting, "tierstore-test", num_lanes=2)
    moves, has_failed = Moves(engine), threading.Event()

    def fail(ended: object, room: Room) -> NoReturn:
        has_failed.set()
        raise RuntimeError("a bug")

    engine.serve(moves)  # type: ignore[arg-type]
    moves.write(1, bytes(NBYTES), SimpleNamespace(synchronize=partial(has_failed.wait, 20)))
    with moves.told:
        assert moves.told.wait_for(lambda: any(room.writes == 1 for room in moves.rooms) or engine.wake(), 20)
    moves.exchange = fail  # type: ignore[method-assign, assignment]
    engine.wake()
    with pytest.raises(StorageIOError, match="a bug"):
        engine.stop(20)
    assert written == [1]
