"""Starts jobs at the drive: a fixed number at once each way, fairly between users and between the sessions of each,
reads before writes. One loop.

NOTE [Fair turns] Start-time fair queueing: all users that wait get the same share of the service, measured by cost,
however many sessions they have and items these have queued; and so do the sessions of a user. Who was idle gets no
credit for that."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Generic, Literal, NamedTuple, TypeVar

T = TypeVar("T")


class _User:
    """`starts_at`: when its next item starts, in the time of all users; `now`: that of its own sessions."""

    def __init__(self, starts_at: int) -> None:
        self.starts_at = starts_at
        self.now = self.num_items = self.num_lines = 0


class _Line(Generic[T]):
    """Of one session."""

    def __init__(self, user: _User, uid: int) -> None:
        self.user, self.uid = user, uid
        self.starts_at = user.now
        self.items: deque[tuple[int, T]] = deque()


class FairQueue(Generic[T]):
    """Items of several sessions, each with a cost. First come first served within a session."""

    def __init__(self) -> None:
        self._users: dict[int, _User] = {}
        self._lines: dict[int, _Line[T]] = {}
        self._now = 0
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    @property
    def num_users(self) -> int:
        """Those with a session that has had an item and is not forgotten."""
        return len(self._users)

    def push(self, session: int, cost: int, item: T, uid: int = 0) -> None:
        if (line := self._lines.get(session)) is None:
            user = self._users.setdefault(uid, _User(self._now))
            user.num_lines += 1
            line = self._lines[session] = _Line(user, uid)
        user = line.user
        if not user.num_items:
            user.starts_at = max(user.starts_at, self._now)
        if not line.items:
            line.starts_at = max(line.starts_at, user.now)
        line.items.append((cost, item))
        user.num_items += 1
        self._num_items += 1

    def pop(self, may_have_more: Callable[[int, int], bool] = lambda session, uid: True) -> T | None:
        """None: none of those who wait may have more."""
        waiting = (each for each, line in self._lines.items() if line.items and may_have_more(each, line.uid))
        session = min(waiting, key=self._place_of, default=None)
        if session is None:
            return None
        line = self._lines.pop(session)
        self._lines[session] = line  # behind its equals
        cost, item = line.items.popleft()
        user = line.user
        self._now, user.now = user.starts_at, line.starts_at
        user.starts_at += cost
        line.starts_at += cost
        user.num_items -= 1
        self._num_items -= 1
        return item

    def drop(self, session: int) -> list[T]:
        """Take out all that a session has queued."""
        if (line := self._lines.get(session)) is None:
            return []
        items = [item for _, item in line.items]
        line.items.clear()
        line.user.num_items -= len(items)
        self._num_items -= len(items)
        return items

    def remove_session(self, session: int) -> None:
        """Of one that has nothing queued."""
        if (line := self._lines.pop(session, None)) is not None:
            line.user.num_lines -= 1
            if not line.user.num_lines:
                del self._users[line.uid]

    def _place_of(self, session: int) -> tuple[int, int]:
        line = self._lines[session]
        return line.user.starts_at, line.starts_at


Job = Callable[[], Coroutine[Any, Any, None]]
Dropped = Callable[[], None]
"""Called in the place of a job that is not to begin any more."""

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
    dropped: Dropped
    session: int
    uid: int
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
        self.running_of_user: Counter[int] = Counter()
        self.seconds = Histogram(_SECONDS)
        self.wait_seconds = Histogram(_SECONDS)
        self.num_bytes = Histogram(_BYTES)


class Lanes:
    """Starts as many jobs at once as keep the drive busy, as tasks, by `start`: each way `num_each` of one session, one
    more of others, and again one more of other users, so that none waits for jobs of another that take long.
    `num_writes`: likewise of a session's writes, and of a user's where there are others, if each takes a core, as at a
    high level of zstd.

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

    def read(self, session: int, num_bytes: int, job: Job, dropped: Dropped = lambda: None, *, uid: int = 0) -> None:
        self._push(self.reads, _Queued(job, dropped, session, uid, num_bytes, time.perf_counter()))

    def write(
        self,
        session: int,
        num_bytes: int,
        job: Job,
        dropped: Dropped = lambda: None,
        *,
        uid: int = 0,
        asked_at: float | None = None,
    ) -> None:
        """`asked_at`: when its client asked (`time.perf_counter`), if it was held back."""
        self._push(self.writes, _Queued(job, dropped, session, uid, num_bytes, time.perf_counter()))
        if asked_at is not None:
            self._count(session, "write_held", time.perf_counter() - asked_at)

    def drop(self, session: int) -> list[Dropped]:
        """Take out the jobs of a session that have not begun; the caller then calls what it gets, once each."""
        queued = self.reads.queue.drop(session) + self.writes.queue.drop(session)
        self._start()  # writes may have waited for those reads
        return [each.dropped for each in queued]

    def seconds_of(self, session: int) -> Mapping[Stay, float]:
        return self._seconds_of.get(session, {})

    def remove_session(self, session: int) -> None:
        """Of a session that has no jobs and never will have any again."""
        self._seconds_of.pop(session, None)
        for way in (self.reads, self.writes):
            way.queue.remove_session(session)

    def _push(self, way: DriveWay, queued: _Queued) -> None:
        self._seconds_of.setdefault(queued.session, defaultdict(float))
        way.queue.push(queued.session, queued.cost_bytes, queued, queued.uid)
        self._start()

    def _start(self) -> None:
        while self._has_room(self.reads) and (cost_bytes := self._begin(self.reads)):
            self._owed_to_reads -= cost_bytes
        while self._has_room(self.writes) and not (self.reads.queue and self._owed_to_reads > 0):
            if not (cost_bytes := self._begin(self.writes)):
                break
            self._owed_to_reads = _READS_PER_WRITE * cost_bytes

    def _has_room(self, way: DriveWay) -> bool:
        return way.running.total() <= self._num_each + 1

    def _begin(self, way: DriveWay) -> int:
        """The cost of the job that has begun; 0: none may."""
        most_of_user = 1 + (way.most_of_one if way.queue.num_users > 1 else self._num_each)
        queued = way.queue.pop(
            lambda session, uid: way.running[session] < way.most_of_one and way.running_of_user[uid] < most_of_user
        )
        if queued is None:
            return 0
        way.running[queued.session] += 1
        way.running_of_user[queued.uid] += 1
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
            _take_one(way.running, queued.session)
            _take_one(way.running_of_user, queued.uid)
            self._start()

    def _count(self, session: int, stay: Stay, seconds: float) -> None:
        self.seconds[stay] += seconds
        if (of_session := self._seconds_of.get(session)) is not None:  # it may be forgotten by now
            of_session[stay] += seconds


def _take_one(counts: Counter[int], owner: int) -> None:
    counts[owner] -= 1
    if not counts[owner]:
        del counts[owner]
