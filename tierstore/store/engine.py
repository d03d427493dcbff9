"""The engine: one asyncio loop on one background thread, which moves bytes between host memory and the disk tier.

The engine decides nothing. Records come in through `submit_*`, from any thread. Each lane takes the next record, asks
the residency for its memory, awaits the disk tier, and reports back; it skips a record that need not be
moved any more. Each record is one job. Restores have lanes of their own, so that a read never waits behind a queue
of writes, and demanded reads overtake prefetched ones.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from ..base.defaults import NUM_RESTORES, NUM_SPILLS
from ..base.event_loop import new_event_loop
from ..base.remains import Remains
from ..base.threads import IoThreads, start_thread
from ..errors import ConfigError, StorageIOError
from ..ledger.state import State
from ..ledger.windows import SMALL_BYTES
from ..residency.handle import Record

if TYPE_CHECKING:
    from ..disk.tier import DiskTier, Loaded, Stored
    from ..residency.residency import Residency

_NUM_OTHER_THREADS = 2  # for the index and the segments, while the jobs of all lanes wait for a turn at the device

_MOST_HELD_BYTES = 2**20
_MOST_HELD = 1024
"""Small records are held back until they reach this number or this many bytes, or somebody waits. By then most of what
a small graph saves was asked for again, or is gone. Held records stay in staging, which counts them anyway."""

DEMAND, PREFETCH = 0, 1


OpenDisk = Callable[[Executor], Awaitable["DiskTier"]]
"""Opens the disk tier. Awaited on the loop; the executor runs the disk tier's jobs."""

_Queue = asyncio.PriorityQueue[tuple[int, int, "Record | None"]]
_LAST = 1 << 30  # the urgency of the item that ends a lane: after all others


def _do_nothing() -> None: ...


class Engine:
    """Owns the loop's thread, the I/O threads and the disk tier.

    The constructor blocks until the disk tier is open, or raises what opening it raised. Jobs begin with `serve`.
    `submit_*` and `request_stop` never block and may be called from any thread; `stop` blocks.

    Args:
        open_disk: opens the disk tier, on the loop.
        name: begins the threads' names, and stands in messages.
        num_spills, num_restores: the most records in flight at once in each direction.
        owner: an object that the thread keeps alive until it has ended.
        user: when this object dies, the engine is asked to end: see NOTE [No finalizers] in `remains.py`. This holds
            before the thread is started, so an interrupt of the constructor leaves no thread behind.
        on_death: called on the loop when `user` has died.

    Raises:
        OSError, ConfigError: the loop or not all threads can be started. Errors of `open_disk` come as they are.
            Nothing is left behind.
    """

    def __init__(
        self,
        open_disk: OpenDisk,
        name: str,
        *,
        num_spills: int = NUM_SPILLS,
        num_restores: int = NUM_RESTORES,
        owner: object = None,
        user: object = None,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._num_spills, self._num_restores = num_spills, num_restores
        self._transfers: Residency | None = None  # until `serve`
        self._inbox: deque[tuple[_Queue, tuple[int, int, Record]]] = deque()
        self._held: list[tuple[int, Record]] = []
        self._held_bytes = 0
        self._discards: deque[int] = deque()
        self._numbers = itertools.count()
        self._awake = False
        self._error: BaseException | None = None
        self._running: asyncio.Task[Any] | None = None  # `_main`
        self._failure: BaseException | None = None  # of a callback
        self._opening: SimpleQueue[DiskTier | BaseException] = SimpleQueue()
        self._spills: _Queue = asyncio.PriorityQueue()
        self._restores: _Queue = asyncio.PriorityQueue()
        self._discard_wanted = asyncio.Event()
        self._stop_wanted = asyncio.Event()
        self._may_begin = asyncio.Event()  # to serve, or to stop
        self._on_death = on_death
        self._loop = new_event_loop()
        self._user = None if user is None else self._remains_of(user)
        try:
            self._thread = start_thread(lambda: self._run(open_disk, owner), f"{name}-loop")
        except (OSError, ConfigError):
            self._user = None  # before the loop takes no more calls
            self._loop.close()
            raise
        self.disk = self._wait_until_open()

    def _wait_until_open(self) -> DiskTier:
        # `SimpleQueue.get` is one call of C. An interrupt inside a lock in Python could leave it locked for the engine.
        opened = None
        try:
            opened = self._opening.get()
            if isinstance(opened, BaseException):
                raise opened
            return opened
        except BaseException:  # an interrupt too: its traceback may keep the user alive for long
            self.request_stop()
            raise
        finally:
            del opened  # otherwise an error and its traceback would refer to each other

    def serve(self, transfers: Residency) -> None:
        """Begin the jobs that are submitted. `transfers`: the residency, called on the loop. To be called once."""
        self._transfers = transfers
        self._call_on_loop(self._may_begin.set)

    @property
    def disk_budget_bytes(self) -> int:
        return self.disk.usage().budget_bytes

    # --- any thread -------------------------------------------------------------------------------------------

    def submit_spill(self, record: Record) -> None:
        """A small record waits until there are more of them, or until `hurry`."""
        if record.nbytes > SMALL_BYTES:
            self._submit(self._spills, record, PREFETCH)
            return
        self._held.append((next(self._numbers), record))
        self._held_bytes += record.nbytes
        if self._held_bytes > _MOST_HELD_BYTES or len(self._held) >= _MOST_HELD:
            self._held = [each for each in self._held if each[1].state is State.QUEUED]
            self._held_bytes = sum(record.nbytes for _, record in self._held)
            if self._held_bytes > _MOST_HELD_BYTES // 2 or len(self._held) >= _MOST_HELD // 2:
                self.hurry()

    def hurry(self) -> None:
        if self._held:
            held, self._held, self._held_bytes = self._held, [], 0
            for number, record in held:
                if record.state is State.QUEUED:
                    self._inbox.append((self._spills, (PREFETCH, number, record)))
            self._wake()

    def submit_restore(self, record: Record, *, demanded: bool) -> None:
        self._submit(self._restores, record, DEMAND if demanded else PREFETCH)

    def submit_discard(self, key: int) -> None:
        self._discards.append(key)
        self._wake()

    def confirms(self, key: int, memory: memoryview) -> bool:
        return self.disk.confirms(key, memory)

    def request_stop(self) -> None:
        """Ask the engine to end: what runs is finished, what is queued is abandoned. Returns at once."""
        self._call_on_loop(self._begin_to_stop)

    def stop(self, deadline_seconds: float) -> None:
        """End the engine and free what the disk tier holds. Idempotent.

        Raises:
            StorageIOError: a job did not end in time; its thread is left behind and ends with the process. Or the
                engine had failed; the cause is chained, and only the first call raises. Either way the data is lost.
        """
        self.request_stop()
        self._thread.join(deadline_seconds)
        if self._thread.is_alive():
            raise StorageIOError(
                "close",
                self._name,
                f"I/O did not end within {deadline_seconds:g} s",
                "what was stored is abandoned",
            )
        error, self._error = self._error, None
        if error is not None:
            raise StorageIOError("close", self._name, repr(error), "what was stored is lost") from error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def _remains_of(self, user: object) -> Remains[object]:
        schedule: Any = self._loop.call_soon_threadsafe
        return Remains(user, partial(schedule, self._user_died))

    def _submit(self, queue: _Queue, record: Record, urgency: int) -> None:
        self._inbox.append((queue, (urgency, next(self._numbers), record)))
        self._wake()

    def _wake(self) -> None:
        # Items are appended before the flag is read; `_deliver` clears the flag before it empties: nothing is missed.
        if not self._awake:
            try:
                self._awake = True
                self._call_on_loop(self._deliver)
            except BaseException:  # an interrupt, or the stack is exhausted: the next call has to wake it
                self._awake = False
                raise

    def _call_on_loop(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RecursionError:  # it says nothing of the loop
            raise
        except RuntimeError:
            pass  # the loop is closed: the engine has stopped, and `engine_ended` has ended every wait

    # --- the loop's thread ------------------------------------------------------------------------------------

    def _run(self, open_disk: OpenDisk, owner: object) -> None:
        error: BaseException | None = None
        try:
            num_threads = self._num_spills + self._num_restores + _NUM_OTHER_THREADS
            self._loop.set_exception_handler(self._callback_failed)
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                try:
                    with IoThreads(num_threads, f"{self._name}-io") as self._io_threads:
                        runner.run(self._main(open_disk))
                finally:
                    self._user = None  # the loop takes no more calls
                    self._on_death = _do_nothing  # otherwise a cycle with its owner, which would keep its memory
                    self._loop.set_exception_handler(None)  # likewise
                    self._running = None
        except BaseException as failure:  # noqa: BLE001 - delivered: to the constructor, or to every thread that waits
            error = self._failure or failure
        finally:
            self._error = error
            if self._transfers is not None:
                self._transfers.engine_ended(error)
            elif error is not None:
                self._opening.put(error)  # read only if the disk tier is not open yet
            del owner

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback has failed. What it was to deliver may be lost, and somebody waits for it: the engine ends."""
        if "handle" not in context:  # it is only about a task that nobody has looked at
            loop.default_exception_handler(context)
            return
        self._failure = context.get("exception")
        if self._running is not None:
            self._running.cancel()

    async def _main(self, open_disk: OpenDisk) -> None:
        self._running = asyncio.current_task()
        disk = await open_disk(self._io_threads)
        self._opening.put(disk)
        try:
            await self._may_begin.wait()
            if self._transfers is not None:
                await self._serve(disk, self._transfers)
        finally:
            await disk.close()

    async def _serve(self, disk: DiskTier, transfers: Residency) -> None:
        async with asyncio.TaskGroup() as lanes:
            for _ in range(self._num_spills):
                lanes.create_task(self._spill_lane(disk, transfers))
            for _ in range(self._num_restores):
                lanes.create_task(self._restore_lane(disk, transfers))
            lanes.create_task(self._discard_lane(disk, transfers))
            await self._stop_wanted.wait()
            self._end_lanes()

    def _user_died(self, _: Remains[object]) -> None:
        self._begin_to_stop()
        self._on_death()

    def _begin_to_stop(self) -> None:
        self._stop_wanted.set()
        self._may_begin.set()

    def _end_lanes(self) -> None:
        for queue, num_lanes in ((self._spills, self._num_spills), (self._restores, self._num_restores)):
            while not queue.empty():
                queue.get_nowait()
            for _ in range(num_lanes):
                queue.put_nowait((_LAST, next(self._numbers), None))
        self._discard_wanted.set()

    def _deliver(self) -> None:
        self._awake = False
        while self._inbox:
            queue, item = self._inbox.popleft()
            queue.put_nowait(item)
        if self._discards:
            self._discard_wanted.set()

    async def _spill_lane(self, disk: DiskTier, transfers: Residency) -> None:
        while (record := (await self._spills.get())[2]) is not None:
            if (spill := transfers.begin_spill(record)) is None:
                continue
            try:
                if spill.ready is not None:
                    await self._loop.run_in_executor(self._io_threads, spill.ready.synchronize)
                outcome: Stored | Exception = await disk.write(record.key, spill.source, spill.kind)
            except Exception as error:  # noqa: BLE001 - delivered: the residency raises it on the thread that trains
                outcome = error
            del spill
            transfers.end_spill(record, outcome)
            del record, outcome  # an idle lane keeps nobody's memory alive

    async def _restore_lane(self, disk: DiskTier, transfers: Residency) -> None:
        while (record := (await self._restores.get())[2]) is not None:
            if (destination := transfers.begin_restore(record)) is None:
                continue
            try:
                outcome: Loaded | Exception = await disk.read(record.key, destination)
            except Exception as error:  # noqa: BLE001 - delivered: the residency raises it on the thread that trains
                outcome = error
            del destination
            transfers.end_restore(record, outcome)
            del record, outcome

    async def _discard_lane(self, disk: DiskTier, transfers: Residency) -> None:
        while not self._stop_wanted.is_set():  # closing the disk tier frees the rest
            await self._discard_wanted.wait()
            self._discard_wanted.clear()
            keys = [self._discards.popleft() for _ in range(len(self._discards))]
            await disk.discard(keys)
            transfers.end_discard(len(keys))
