"""The engine: one asyncio loop on one background thread, with the disk tier, the I/O threads and the worker.

Here is how it begins, is woken, and ends. What it does meanwhile is in `worker.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from ..base.defaults import NUM_IN_FLIGHT
from ..base.event_loop import new_event_loop
from ..base.remains import Remains
from ..base.threads import IoThreads, start_thread
from ..errors import ConfigError, StorageIOError
from .worker import Worker

if TYPE_CHECKING:
    from ..disk.tier import DiskTier
    from ..residency.residency import Residency

_NUM_OTHER_THREADS = 2  # for the index and the segments, while the jobs of all records wait for a turn at the device


OpenDisk = Callable[[Executor], Awaitable["DiskTier"]]
"""Opens the disk tier. Awaited on the loop; the executor runs the disk tier's jobs."""


class Engine:
    """Owns the loop's thread, the I/O threads and the disk tier.

    The constructor blocks until the disk tier is open, or raises what opening it raised. Jobs begin with `serve`.
    `wake` and `request_stop` never block and may be called from any thread; `stop` blocks.

    Args:
        open_disk: opens the disk tier, on the loop.
        name: begins the threads' names, and stands in messages.
        num_lanes: the most records in flight at once in each direction.
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
        num_lanes: int = NUM_IN_FLIGHT,
        owner: object = None,
        user: object = None,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._num_lanes = num_lanes
        self._residency: Residency | None = None  # until `serve`
        self._worker: Worker | None = None  # while it serves
        self._awake = False
        self._error: BaseException | None = None
        self._running: asyncio.Task[Any] | None = None  # `_main`
        self._failure: BaseException | None = None  # of a callback
        self._opening: SimpleQueue[DiskTier | BaseException] = SimpleQueue()
        self._stop_wanted = asyncio.Event()
        self._may_begin = asyncio.Event()  # to serve, or to stop
        self._on_death = on_death
        self._loop = new_event_loop()
        schedule: Any = self._loop.call_soon_threadsafe
        self._user = None if user is None else Remains(user, partial(schedule, self._user_died))
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
                self._thread.join()  # it has nothing left to do: a constructor that raises leaves no thread
                raise opened
            return opened
        except BaseException:  # an interrupt too: its traceback may keep the user alive for long
            self.request_stop()
            raise
        finally:
            del opened  # otherwise an error and its traceback would refer to each other

    def serve(self, residency: Residency) -> None:
        """Begin to move what the residency says. It is called on the loop. To be called once."""
        self._residency = residency
        self._call_on_loop(self._may_begin.set)

    @property
    def disk_budget_bytes(self) -> int:
        return self.disk.usage().budget_bytes

    # --- any thread -------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Have the worker look at what is to be moved, soon."""
        # `_woken` clears the flag before it looks: nothing is missed.
        if not self._awake:
            try:
                self._awake = True
                self._loop.call_soon_threadsafe(self._woken)
            except BaseException as error:  # an interrupt, or the stack is exhausted: the next call has to wake it
                if not _is_of_closed_loop(error):
                    self._awake = False
                    raise

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

    def _call_on_loop(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError as error:
            if not _is_of_closed_loop(error):
                raise

    # --- the loop's thread ------------------------------------------------------------------------------------

    def _run(self, open_disk: OpenDisk, owner: object) -> None:
        error: BaseException | None = None
        try:
            num_threads = 2 * self._num_lanes + _NUM_OTHER_THREADS
            self._loop.set_exception_handler(self._callback_failed)
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                try:
                    with IoThreads(num_threads, f"{self._name}-io") as self._io_threads:
                        runner.run(self._main(open_disk))
                finally:
                    self._user = None  # the loop takes no more calls
                    self._on_death = lambda: None  # otherwise a cycle with its owner, which would keep its memory
                    self._loop.set_exception_handler(None)  # likewise
                    self._running = None
        except BaseException as failure:  # noqa: BLE001 - delivered: to the constructor, or to every thread that waits
            error = self._failure or failure
        finally:
            self._error = error
            if self._residency is not None:
                self._residency.engine_ended(error)
            elif error is not None:
                self._opening.put(error)  # read only if the disk tier is not open yet
            del owner

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback has failed. What it was to deliver may be lost, and somebody waits for it: the engine ends."""
        if "handle" not in context:  # it is only about a task that nobody has looked at
            loop.default_exception_handler(context)
            return
        is_first, self._failure = self._failure is None, context.get("exception")
        if is_first and self._running is not None:
            self._running.cancel()

    async def _main(self, open_disk: OpenDisk) -> None:
        self._running = asyncio.current_task()
        disk = await open_disk(self._io_threads)
        self._opening.put(disk)
        try:
            await self._may_begin.wait()
            if self._residency is not None:
                self._worker = Worker(disk, self._residency, self._io_threads, self._num_lanes)
                await self._worker.serve(self._stop_wanted)
        finally:
            self._worker = None
            await disk.close()

    def _user_died(self, _: Remains[object]) -> None:
        self._begin_to_stop()
        self._on_death()

    def _begin_to_stop(self) -> None:
        self._stop_wanted.set()
        self._may_begin.set()

    def _woken(self) -> None:
        self._awake = False
        if self._worker is not None:
            self._worker.take_turn()


def _is_of_closed_loop(error: BaseException) -> bool:
    """Whether the engine has stopped, so that `engine_ended` has ended every wait. A full stack says nothing of it."""
    return isinstance(error, RuntimeError) and not isinstance(error, RecursionError)
