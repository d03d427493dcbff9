"""Starts jobs at the drive: a fixed number at once each way, fairly between sessions, reads before writes. One loop."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from .fair_queue import FairQueue
from .histogram import Histogram

__all__ = ["JOB_BYTES", "DriveWay", "Job", "Lanes", "Stay"]

Job = Callable[[], Coroutine[Any, Any, None]]
Stay = Literal["read_queued", "read_at_drive", "write_held", "write_queued", "write_at_drive"]
"""Where a request can be: held back by its session's quota of queued bytes, queued for the drive, or at the drive."""

_SECONDS = tuple(1e-4 * 2**i for i in range(18))  # 0.1 ms to 13 s
_BYTES = tuple(float(4096 * 4**i) for i in range(10))  # 4 KiB to 1 GiB

JOB_BYTES = 256 * 2**10
"""Charged for each job in addition to its bytes. One byte was written in 76 to 95 us and read in 57 to 90, a part of
8 MiB in 3.5 to 3.9 ms and 4.3 to 4.8. So one byte costs as much as 0.1 to 0.23 MB of a part. An extent of 256 KiB took
150 to 350 us more than its bytes. (One client with 24 requests outstanding, two cores, a drive of 2.2 GB/s; 3 runs.)"""
_READS_PER_WRITE = 8
"""While reads wait, their share is eight times that of writes. A ninth is enough for a write not to wait for ever."""

_NO_SECONDS: Mapping[Stay, float] = MappingProxyType({})


class _Queued(NamedTuple):
    job: Job
    session: int
    num_bytes: int
    queued_at: float

    @property
    def cost_bytes(self) -> int:
        """How much the job takes of its session's share: a job of one byte is not free."""
        return self.num_bytes + JOB_BYTES


class DriveWay:
    """The jobs of one direction.

    Args:
        queued, at_drive: what the time of its jobs is counted as.

    Attributes:
        queued, at_drive: as given.
        queue: jobs that have not begun.
        num_running: jobs that run.
        seconds: how long jobs ran.
        wait_seconds: how long jobs were queued before they ran.
        num_bytes: the length of the records that jobs moved, as the clients see them.
    """

    def __init__(self, queued: Stay, at_drive: Stay) -> None:
        self.queued, self.at_drive = queued, at_drive
        self.queue: FairQueue[_Queued] = FairQueue()
        self.num_running = 0
        self.seconds = Histogram(_SECONDS)
        self.wait_seconds = Histogram(_SECONDS)
        self.num_bytes = Histogram(_BYTES)


class Lanes:
    """Starts as many jobs at once as keep the drive busy.

    Reads go first: backward stands still for a read, forward only for a full window. A write that begins therefore
    owes the reads a multiple of its cost. While reads wait, no other write begins until reads worth that much have
    begun. So reads that are queued without end still leave writes a share, and no two writes begin in a row.

    Args:
        start: runs a coroutine as a task.
        num_each: how many jobs run at once, each way.

    Attributes:
        reads, writes: the jobs of each direction.
        seconds: how long requests have stayed where, those of all sessions added up.
    """

    def __init__(self, start: Callable[[Coroutine[Any, Any, None]], None], num_each: int) -> None:
        self.reads = DriveWay("read_queued", "read_at_drive")
        self.writes = DriveWay("write_queued", "write_at_drive")
        self.seconds: defaultdict[Stay, float] = defaultdict(float)
        self._seconds_of: dict[int, defaultdict[Stay, float]] = {}  # by session
        self._start_task = start
        self._num_each = num_each
        self._owed_to_reads = 0  # cost that the last write still owes to reads; 0 or less: it is paid

    @property
    def num_queued(self) -> int:
        """Jobs that have not begun."""
        return len(self.reads.queue) + len(self.writes.queue)

    def read(self, session: int, num_bytes: int, job: Job) -> None:
        """Queue a job that reads `num_bytes` for a session."""
        self._push(self.reads, session, num_bytes, job)

    def write(self, session: int, num_bytes: int, job: Job, asked_at: float | None = None) -> None:
        """Queue a job that writes `num_bytes` for a session.

        Args:
            asked_at: when its client asked for it, by `time.perf_counter`, if it was held back since; None: just now.
        """
        self._push(self.writes, session, num_bytes, job)
        if asked_at is not None:
            self._count(session, "write_held", time.perf_counter() - asked_at)

    def seconds_of(self, session: int) -> Mapping[Stay, float]:
        """How long the requests of a session have stayed where, added up."""
        return self._seconds_of.get(session, _NO_SECONDS)

    def forget(self, session: int) -> None:
        """Forget a session that has no jobs and never will have any again."""
        self._seconds_of.pop(session, None)
        for way in (self.reads, self.writes):
            way.queue.forget(session)

    def _push(self, way: DriveWay, session: int, num_bytes: int, job: Job) -> None:
        self._seconds_of.setdefault(session, defaultdict(float))
        queued = _Queued(job, session, num_bytes, time.perf_counter())
        way.queue.push(session, queued.cost_bytes, queued)
        self._start()

    def _start(self) -> None:
        while self.reads.queue and self.reads.num_running < self._num_each:
            self._owed_to_reads -= self._begin(self.reads)
        while self.writes.queue and self.writes.num_running < self._num_each:
            if self.reads.queue and self._owed_to_reads > 0:
                break
            self._owed_to_reads = _READS_PER_WRITE * self._begin(self.writes)

    def _begin(self, way: DriveWay) -> int:
        """Start the next job of a direction; returns its cost."""
        queued = way.queue.pop()
        way.num_running += 1
        self._start_task(self._run(way, queued))
        return queued.cost_bytes

    async def _run(self, way: DriveWay, queued: _Queued) -> None:
        began_at = time.perf_counter()
        way.wait_seconds.observe(began_at - queued.queued_at)
        self._count(queued.session, way.queued, began_at - queued.queued_at)
        try:
            await queued.job()
        finally:
            seconds = time.perf_counter() - began_at
            way.seconds.observe(seconds)
            self._count(queued.session, way.at_drive, seconds)
            way.num_bytes.observe(queued.num_bytes)
            way.num_running -= 1
            self._start()

    def _count(self, session: int, stay: Stay, seconds: float) -> None:
        self.seconds[stay] += seconds
        if (of_session := self._seconds_of.get(session)) is not None:  # it may be forgotten by now
            of_session[stay] += seconds
