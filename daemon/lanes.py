"""Who moves bytes now: so many jobs at once each way, fairly between sessions, restores before spills. For one loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from .fair_queue import FairQueue
from .histogram import Histogram

__all__ = ["Lanes", "Way"]

Job = Callable[[], Coroutine[Any, Any, None]]

_SECONDS = tuple(1e-4 * 2**i for i in range(18))  # 0.1 ms to 13 s
_BYTES = tuple(float(4096 * 4**i) for i in range(10))  # 4 KiB to 1 GiB


class _Queued(NamedTuple):
    job: Job
    num_bytes: int
    queued_at: float


class Way:
    """The jobs of one direction.

    Attributes:
        queue: of those that have not begun.
        num_running: of those that have.
        seconds: that jobs ran.
        wait_seconds: that they were queued before.
        num_bytes: that they were about, as the clients see them.
    """

    def __init__(self) -> None:
        self.queue: FairQueue[_Queued] = FairQueue()
        self.num_running = 0
        self.seconds = Histogram(_SECONDS)
        self.wait_seconds = Histogram(_SECONDS)
        self.num_bytes = Histogram(_BYTES)


class Lanes:
    """Starts jobs, as many at once as the drive is kept busy with.

    A write does not begin while a read waits: backward stands still for a read, forward only for a full window.

    Args:
        start: runs a coroutine as a task.
        num_each: how many run at once, each way.

    Attributes:
        reads, writes: what is queued, runs, and was done.
    """

    def __init__(self, start: Callable[[Coroutine[Any, Any, None]], None], num_each: int) -> None:
        self.reads = Way()
        self.writes = Way()
        self._start_task = start
        self._num_each = num_each

    @property
    def num_queued(self) -> int:
        """Jobs that have not begun."""
        return len(self.reads.queue) + len(self.writes.queue)

    def read(self, session: int, num_bytes: int, job: Job) -> None:
        """Queue a job that reads so many bytes for a session."""
        self._push(self.reads, session, num_bytes, job)

    def write(self, session: int, num_bytes: int, job: Job) -> None:
        """Queue a job that writes so many bytes for a session."""
        self._push(self.writes, session, num_bytes, job)

    def forget(self, session: int) -> None:
        """Drop what is kept of a session that has no jobs, and never will have any again."""
        for way in (self.reads, self.writes):
            way.queue.forget(session)

    def _push(self, way: Way, session: int, num_bytes: int, job: Job) -> None:
        way.queue.push(session, num_bytes, _Queued(job, num_bytes, time.perf_counter()))
        self._start()

    def _start(self) -> None:
        while self.reads.queue and self.reads.num_running < self._num_each:
            self._begin(self.reads)
        while self.writes.queue and not self.reads.queue and self.writes.num_running < self._num_each:
            self._begin(self.writes)

    def _begin(self, way: Way) -> None:
        way.num_running += 1
        self._start_task(self._run(way, way.queue.pop()))

    async def _run(self, way: Way, queued: _Queued) -> None:
        began_at = time.perf_counter()
        way.wait_seconds.observe(began_at - queued.queued_at)
        try:
            await queued.job()
        finally:
            way.seconds.observe(time.perf_counter() - began_at)
            way.num_bytes.observe(queued.num_bytes)
            way.num_running -= 1
            self._start()
