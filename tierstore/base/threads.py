"""The start of every thread of a store, and the I/O threads that run the jobs of the engine's loop."""

from __future__ import annotations

import asyncio
import errno
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from ..errors import ConfigError, StoreBusyError

P = ParamSpec("P")
T = TypeVar("T")

_Job = tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]
_Ended = tuple[asyncio.Future[Any], Any, BaseException | None]


NICE = 5
"""How far the priority of these threads is below that of the process. Training on all cores waits at a barrier for
the core that was interrupted. At this distance, a thread that wakes up rarely interrupts one (`bench/memory_limit.py`).
At 19 these threads would starve, and so would the threads that wait for them (sched(7))."""


class _StoreThread(threading.Thread): ...


def is_thread_of_store() -> bool:
    """Whether a store has started this thread: it must not wait for the end of a store, which could be its own."""
    return isinstance(threading.current_thread(), _StoreThread)


def refuse_to_wait(store: str) -> None:
    """Raise StoreBusyError on a store's own thread: it must not wait for what `store` does, because the bytes or the
    room could have to come from this very thread, or from another store's that waits for it."""
    if is_thread_of_store():
        raise StoreBusyError(store, "on a thread of a store, which must not wait for one")


def refuse_green_threads() -> None:
    """Raise ConfigError if gevent, eventlet or their like have replaced Python's threads or queues by those of
    greenlets. All greenlets run on one thread, so whoever waits there for a store's thread waits for ever."""
    for what, found in (("threading", threading.get_ident), ("queue", queue.SimpleQueue)):
        module = found.__module__
        if module.partition(".")[0] not in sys.stdlib_module_names:
            how = "gevent: patch_all(thread=False, queue=False), eventlet: monkey_patch(thread=False)"
            needs = "a store needs the system's own threads; exclude them from monkey patching"
            raise ConfigError(what, module, f"{needs} ({how}), or use another process")


def start_thread(target: Callable[[], None], name: str, *, nice: int = NICE) -> threading.Thread:
    """Start a daemon thread whose priority is lower than the process's by `nice`, as far as the system allows. OSError:
    it allows the process, its user or its control group no more threads. ConfigError: see `refuse_green_threads`."""
    refuse_green_threads()

    def run() -> None:
        with suppress(OSError):  # a wish: a seccomp profile may forbid it, and so may a starter that is nicer (EACCES)
            of_process = os.getpriority(os.PRIO_PROCESS, os.getpid())  # not that of the thread that starts this one
            os.setpriority(os.PRIO_PROCESS, 0, min(of_process + nice, 19))
        target()

    thread = _StoreThread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # CPython says no more; the system's error was EAGAIN (pthread_create(3))
        reason = (
            "no more threads can be started; see RLIMIT_NPROC (ulimit -u), pids.max of the control group, "
            "limits on memory, for their stacks (ulimit -v, -d), and filters of system calls (clone3)"
        )
        raise OSError(errno.EAGAIN, reason) from error
    return thread


class IoThreads(Executor):
    """A fixed number of threads that run blocking jobs, first come first served, for the coroutines of one loop.
    OSError: not all can be started; those that were have ended. (A `ThreadPoolExecutor` would refuse work at exit, when
    backward may run.)

    The loop gets the results in batches: one wake-up takes all that are ready by then. So `submit` returns a future of
    the loop, whose locks cost nothing; `loop.run_in_executor` takes that as it is."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._ended: deque[_Ended] = deque()
        self._is_loop_told = False
        self._threads: list[threading.Thread] = []
        try:
            for number in range(num_threads):
                self._threads.append(start_thread(self._run, f"{name}-{number}"))
        except OSError:
            self.shutdown()
            raise

    def submit(  # type: ignore[override]
        self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Queue a job. It is skipped if it is cancelled before its turn. On the loop; does not block."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._jobs.put((future, fn, args, kwargs))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads once the jobs queued so far are done (`cancel_futures` has no effect: they are few)."""
        for _ in self._threads:
            self._jobs.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _run(self) -> None:
        job: _Job | None = None
        while True:
            try:
                for job in iter(self._jobs.get, None):  # in calls of C alone: no job is lost
                    self._run_job(*job)
                    job = None  # an idle thread keeps nobody's memory alive
                return
            except BaseException as error:  # noqa: BLE001 - delivered; another thread has it raised, between two lines
                if job is not None:
                    self._end(job[0], None, error)
                    job = None

    def _run_job(
        self, future: asyncio.Future[Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        result, error = None, None
        if not future.cancelled():
            try:
                result = fn(*args, **kwargs)
            except BaseException as caught:  # noqa: BLE001 - delivered to whoever awaits the job
                error = caught
        self._end(future, result, error)

    def _end(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, Exception):  # no coroutine expects it: it is about this thread
            told = RuntimeError(f"{error!r} was raised in {threading.current_thread().name}")
            told.__cause__, error = error, told
        self._ended.append((future, result, error))
        self._tell(future.get_loop())

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        # Append first, then read the flag; `_deliver` clears the flag first, then empties the queue: nothing is missed.
        if not self._is_loop_told:
            self._is_loop_told = True
            try:
                loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                pass  # the loop is closed: nobody waits any more
            except BaseException:  # no memory, or raised by another thread: the next one has to tell it
                self._is_loop_told = False
                raise

    def _deliver(self) -> None:
        self._is_loop_told = False
        try:
            while self._ended:
                future, result, error = self._ended[0]
                if error is None and not future.done():
                    future.set_result(result)
                elif error is not None and not future.done():  # else cancelled, or delivered before
                    future.set_exception(error)
                self._ended.popleft()
        except BaseException:  # raised by another thread, between two lines: the rest comes with the next turn
            self._tell(asyncio.get_running_loop())
            raise
