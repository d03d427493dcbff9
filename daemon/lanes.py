"""Starts jobs at the drive: a fixed number at once each way, fairly between sessions, reads before writes. One loop.

NOTE [Fair turns] Start-time fair queueing: all owners that wait get the same share of the service, measured by cost,
however many items they have queued. An owner that was idle gets no credit for that."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Generic, Literal, NamedTuple, TypeVar

T = TypeVar("T")


class _Line(Generic[T]):
    def __init__(self, starts_at: int) -> None:
        self.starts_at = starts_at
        self.items: deque[tuple[int, T]] = deque()


class FairQueue(Generic[T]):
    """Items of several owners, each with a cost. First come first served within an owner."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line[T]] = {}
        self._now = 0
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def push(self, owner: int, cost: int, item: T) -> None:
        line = self._lines.get(owner)
        if line is None:
            line = self._lines[owner] = _Line(self._now)
        elif not line.items:
            line.starts_at = max(line.starts_at, self._now)
        line.items.append((cost, item))
        self._num_items += 1

    def pop(self, may_have_more: Callable[[int], bool] = lambda owner: True) -> T | None:
        """None: none of those who wait may have more."""
        waiting = (owner for owner, line in self._lines.items() if line.items and may_have_more(owner))
        owner = min(waiting, key=lambda each: self._lines[each].starts_at, default=None)
        if owner is None:
            return None
        line = self._lines.pop(owner)
        self._lines[owner] = line  # behind its equals
        cost, item = line.items.popleft()
        self._now = line.starts_at
        line.starts_at += cost
        self._num_items -= 1
        return item

    def forget(self, owner: int) -> None:
        """Of one who has nothing queued."""
        self._lines.pop(owner, None)


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


class _Queued(NamedTuple):
    job: Job
    session: int
    num_bytes: int
    queued_at: float

    @property
    def cost_bytes(self) -> int:
        return self.num_bytes + JOB_BYTES


class Histogram:
    """Counts of what was observed, for each bucket up to its bound, and for all larger values."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class DriveWay:
    """The jobs of one direction, and figures of those done; their time is counted as `queued` and `at_drive`."""

    def __init__(self, queued: Stay, at_drive: Stay, most_of_one: int) -> None:
        self.queued, self.at_drive = queued, at_drive
        self.most_of_one = most_of_one  # jobs at once, of one session
        self.queue: FairQueue[_Queued] = FairQueue()
        self.running: Counter[int] = Counter()  # by session
        self.seconds = Histogram(_SECONDS)
        self.wait_seconds = Histogram(_SECONDS)
        self.num_bytes = Histogram(_BYTES)


class Lanes:
    """Starts as many jobs at once as keep the drive busy, as tasks, by `start`: each way `num_each` of one session, and
    one more of others, so that none waits for jobs of another that take long. `num_writes`: likewise of writes, where
    each takes a core, as at a high level of zstd.

    Reads go first: backward stands still for a read, forward only for a full window. A write that begins owes the reads
    a multiple of its cost; while reads wait, no other write begins until reads worth that much have begun. So reads
    that are queued without end still leave writes a share. `seconds`: how long all requests have stayed where, added
    up."""

    def __init__(
        self, start: Callable[[Coroutine[Any, Any, None]], None], num_each: int, num_writes: int | None = None
    ) -> None:
        self.reads = DriveWay("read_queued", "read_at_drive", num_each)
        self.writes = DriveWay("write_queued", "write_at_drive", num_each if num_writes is None else num_writes)
        self.seconds: defaultdict[Stay, float] = defaultdict(float)
        self._seconds_of: dict[int, defaultdict[Stay, float]] = {}  # by session
        self._start_task = start
        self._num_each = num_each
        self._owed_to_reads = 0  # cost that the last write still owes to reads; 0 or less: it is paid

    def read(self, session: int, num_bytes: int, job: Job) -> None:
        self._push(self.reads, session, num_bytes, job)

    def write(self, session: int, num_bytes: int, job: Job, asked_at: float | None = None) -> None:
        """`asked_at`: when its client asked (`time.perf_counter`), if it was held back."""
        self._push(self.writes, session, num_bytes, job)
        if asked_at is not None:
            self._count(session, "write_held", time.perf_counter() - asked_at)

    def seconds_of(self, session: int) -> Mapping[Stay, float]:
        return self._seconds_of.get(session, {})

    def forget(self, session: int) -> None:
        """Of a session that has no jobs and never will have any again."""
        self._seconds_of.pop(session, None)
        for way in (self.reads, self.writes):
            way.queue.forget(session)

    def _push(self, way: DriveWay, session: int, num_bytes: int, job: Job) -> None:
        self._seconds_of.setdefault(session, defaultdict(float))
        queued = _Queued(job, session, num_bytes, time.perf_counter())
        way.queue.push(session, queued.cost_bytes, queued)
        self._start()

    def _start(self) -> None:
        while self._has_room(self.reads) and (cost_bytes := self._begin(self.reads)):
            self._owed_to_reads -= cost_bytes
        while self._has_room(self.writes) and not (self.reads.queue and self._owed_to_reads > 0):
            if not (cost_bytes := self._begin(self.writes)):
                break
            self._owed_to_reads = _READS_PER_WRITE * cost_bytes

    def _has_room(self, way: DriveWay) -> bool:
        return way.running.total() <= self._num_each

    def _begin(self, way: DriveWay) -> int:
        """The cost of the job that has begun; 0: none may."""
        queued = way.queue.pop(lambda session: way.running[session] < way.most_of_one)
        if queued is None:
            return 0
        way.running[queued.session] += 1
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
            way.running[queued.session] -= 1
            way.running += Counter()  # without those that have none left
            self._start()

    def _count(self, session: int, stay: Stay, seconds: float) -> None:
        self.seconds[stay] += seconds
        if (of_session := self._seconds_of.get(session)) is not None:  # it may be forgotten by now
            of_session[stay] += seconds
