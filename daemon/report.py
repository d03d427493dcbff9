"""The report: a record of what a daemon holds and has done, for `tierstore stat`, `tierstore top`, the page and the
metrics; and who takes it for all who ask, on the daemon's loop.

Fields with disk, written or read in their names count bytes as they are on disk; the others count them as the clients
gave them."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from tierstore.disk.tier import DiskUsage, DriveUsage
from tierstore.plain_text import plain_json, unicode_text
from tierstore.sidecar import messages
from tierstore.sidecar.frames import MAX_FRAME_BYTES, frame_of
from tierstore.sidecar.peer import program_name

if TYPE_CHECKING:
    from .lanes import DriveWay, Stay
    from .registry import Registry
    from .sessions import Session

_ROOM_BYTES = MAX_FRAME_BYTES - 1024  # for a report in one frame


class Totals(msgspec.Struct, frozen=True):
    """Totals since the start of the daemon or of a session; they only grow.

    Attributes:
        spilled_bytes: bytes stored.
        written_bytes: bytes taken on disk for them.
        restored_bytes: bytes given back.
        read_bytes: bytes read from disk for them.
        discarded_records: records freed.
        full: writes that found no room: quota, budget or file system.
        corrupt_records: records whose bytes were found damaged.
        io_errors: jobs that failed at the device.
    """

    spilled_bytes: int = 0
    written_bytes: int = 0
    restored_bytes: int = 0
    read_bytes: int = 0
    discarded_records: int = 0
    full: int = 0
    corrupt_records: int = 0
    io_errors: int = 0


class Stays(msgspec.Struct, frozen=True):
    """How long requests have stayed where, in seconds, added up. A request is counted when it moves on, so the growth
    of a field in a second is how many requests were there on average.

    `read_queued`, `write_queued`: waited for the drive; `read_at_drive`, `write_at_drive`: were there; `write_held`:
    held back by their session's quota of queued bytes."""

    read_queued: float = 0.0
    read_at_drive: float = 0.0
    write_held: float = 0.0
    write_queued: float = 0.0
    write_at_drive: float = 0.0


class Spread(msgspec.Struct, frozen=True):
    """A histogram of observed values.

    Attributes:
        bounds: upper ends of the buckets, ascending.
        counts: one for each bucket, and one for values above the last bound.
        total: sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class JobTimes(msgspec.Struct, frozen=True):
    """The jobs of one direction.

    Attributes:
        queued, running: jobs that wait now, and that run now.
        seconds: how long jobs ran.
        wait_seconds: how long jobs were queued before they ran.
        num_bytes: the length of the records that jobs moved.
    """

    queued: int
    running: int
    seconds: Spread
    wait_seconds: Spread
    num_bytes: Spread


class Jobs(msgspec.Struct, frozen=True):
    """The jobs of both directions."""

    reads: JobTimes
    writes: JobTimes


class SessionState(msgspec.Struct, frozen=True):
    """One session.

    Attributes:
        session: its number.
        client, rank, pid: as the client said.
        uid: its user, as the kernel says.
        is_connected: whether its client is there.
        lease_seconds: time until the session ends unless its client comes back; None: the client is there.
        disk_bytes: bytes that the session takes on disk, running writes included.
        quota_bytes: the limit of `disk_bytes`.
        num_records: records that it holds.
        slab_bytes: memory that the client shares with the daemon.
        num_jobs: jobs, queued or running.
        queued_bytes: bytes of writes that are queued or at the drive.
        queued_quota_bytes: the limit of `queued_bytes`; None: there is none.
        held_bytes: bytes of writes that wait until `queued_bytes` leaves room for them.
        totals, stays: since the session was opened, or the daemon was started.
    """

    session: int
    client: str
    rank: int | None
    pid: int
    uid: int
    is_connected: bool
    lease_seconds: float | None
    disk_bytes: int
    quota_bytes: int
    num_records: int
    slab_bytes: int
    num_jobs: int
    queued_bytes: int
    queued_quota_bytes: int | None
    held_bytes: int
    totals: Totals
    stays: Stays = Stays()


class DaemonReport(msgspec.Struct, frozen=True):
    """A snapshot of a daemon.

    Attributes:
        program: the daemon's name and version.
        pid: its process.
        path, socket: where it stores and listens; several directories are joined with ", ".
        metrics: host and port of its page; None: it has none.
        uptime_seconds: time since it was started.
        is_ending: it takes no more work.
        disk: what the drive holds.
        jobs: the jobs at the drive.
        totals: over all sessions, ended ones included.
        num_sessions: sessions now.
        num_sessions_opened: sessions that this daemon has opened.
        sessions: one entry each; only some of them where not all fit into one answer.
        codec_choices: how often each codec was used, by kind of record; empty where it does not fit into one answer.
        internal_errors: the daemon's own bugs since its start; each is in its log.
        drives: one entry for each directory. None: from a daemon of an earlier version.
        stays: of the requests of all sessions, ended ones included.
    """

    program: str
    pid: int
    path: str
    socket: str
    metrics: str | None
    uptime_seconds: float
    is_ending: bool
    disk: DiskUsage
    jobs: Jobs
    totals: Totals
    num_sessions: int
    num_sessions_opened: int
    sessions: list[SessionState]
    codec_choices: dict[str, dict[str, int]]
    internal_errors: int = 0
    drives: list[DriveUsage] | None = None
    stays: Stays = Stays()


def encode_report(report: DaemonReport) -> bytes:
    """The report as JSON that fits into one frame. If it is longer, codec choices are left out, then sessions."""
    encoded = msgspec.json.encode(report)
    if len(encoded) > _ROOM_BYTES:
        encoded = msgspec.json.encode(report := msgspec.structs.replace(report, codec_choices={}))
    while len(encoded) > _ROOM_BYTES and report.sessions:
        report = msgspec.structs.replace(report, sessions=report.sessions[: len(report.sessions) // 2])
        encoded = msgspec.json.encode(report)
    return encoded


_RESTS = 10
"""How many times as long as the making. So all who ask without end take a tenth of the time together."""
_MOST_REST_SECONDS = 0.5  # a client that asks for a sign of life waits for it too


class TakenReport:
    """A report; encoded once at most for all who get it. `shown`: as JSON that is safe to look at."""

    def __init__(self, report: DaemonReport) -> None:
        self.report = report

    @cached_property
    def encoded(self) -> bytes:
        return encode_report(self.report)

    @cached_property
    def frame(self) -> bytes:
        return frame_of([messages.Report(self.encoded)])

    @cached_property
    def shown(self) -> bytes:
        return plain_json(self.encoded.decode()).encode()


class Reports:
    """A report is made when somebody asks, and rests follow. All who ask meanwhile get the same one."""

    def __init__(self, make: Callable[[], TakenReport], clock: Callable[[], float] = time.perf_counter) -> None:
        self._make = make
        self._clock = clock
        self._next: asyncio.Task[TakenReport] | None = None
        self._due_at = clock()

    async def get(self) -> TakenReport:
        """Wait for a rest, of half a second at most, and the making of the next. Raises as `make`."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._make_when_due())
        return await asyncio.shield(self._next)

    def rest_for(self, seconds: float) -> None:
        """Rest for work of so many seconds, which was done with the report or for it."""
        self._due_at = max(self._due_at, self._clock() + min(_MOST_REST_SECONDS, _RESTS * seconds))

    async def _make_when_due(self) -> TakenReport:
        await asyncio.sleep(max(0.0, self._due_at - self._clock()))
        self._next = None
        began_at = self._clock()
        try:
            return self._make()
        finally:
            self.rest_for(self._clock() - began_at)


class Reporter:
    """Asks the parts of the daemon what they hold and have done. `program`: who the daemon is, for clients."""

    def __init__(self, registry: Registry, metrics_address: str | None) -> None:
        self.program = program_name()
        self.reports = Reports(self._take)
        self._registry = registry
        self._metrics_address = metrics_address
        self._started_at = time.monotonic()
        self._asking: set[Callable[[bytes], None]] = set()

    def answer_by(self, answer: Callable[[bytes], None]) -> None:
        """Answer with the next report; one answer for all questions that are unanswered by then."""
        if answer not in self._asking:
            self._asking.add(answer)
            self._registry.tasks.start(self._answer(answer))

    async def _answer(self, answer: Callable[[bytes], None]) -> None:
        try:
            taken = await self.reports.get()
        finally:
            self._asking.discard(answer)
        answer(taken.frame)

    def _take(self) -> TakenReport:
        registry, disk, now = self._registry, self._registry.disk, asyncio.get_running_loop().time()
        settings, lanes = registry.settings, registry.lanes
        sessions, totals = registry.sessions.values(), Counter(registry.ended_totals)
        for session in sessions:
            totals.update(session.totals)
        report = DaemonReport(
            program=self.program,
            pid=os.getpid(),
            path=unicode_text(settings.place),
            socket=unicode_text(str(settings.socket)),
            metrics=self._metrics_address,
            uptime_seconds=round(time.monotonic() - self._started_at, 3),
            is_ending=registry.stage.is_ending,
            disk=disk.usage(),
            jobs=Jobs(_job_times(lanes.reads), _job_times(lanes.writes)),
            totals=_totals(totals),
            num_sessions=len(sessions),
            num_sessions_opened=registry.num_opened,
            sessions=[self._session_state(session, now) for session in sessions],
            codec_choices={kind: dict(counts) for kind, counts in disk.codec_choices().items()},
            internal_errors=registry.tasks.num_internal_errors,
            drives=[replace(each, path=unicode_text(each.path)) for each in disk.drives()],
            stays=_stays(lanes.seconds),
        )
        return TakenReport(report)

    def _session_state(self, session: Session, now: float) -> SessionState:
        lease, lease_seconds = session.lease, None
        if session.connection is None:
            lease_seconds = 0.0 if session.expiry is None else round(max(0.0, session.expiry.when() - now), 3)
        return SessionState(
            session=lease.number,
            client=lease.name,
            rank=lease.rank,
            pid=lease.pid,
            uid=lease.uid,
            is_connected=session.connection is not None,
            lease_seconds=lease_seconds,
            disk_bytes=session.disk_bytes,
            quota_bytes=session.quota_bytes,
            num_records=len(session.records),
            slab_bytes=0 if session.connection is None else session.connection.slab_bytes,
            num_jobs=session.num_jobs,
            queued_bytes=session.writes.queued_bytes,
            queued_quota_bytes=session.writes.most_bytes,
            held_bytes=session.writes.held_bytes,
            totals=_totals(session.totals),
            stays=_stays(self._registry.lanes.seconds_of(lease.number)),
        )


def _totals(counts: Counter[str]) -> Totals:
    return Totals(**{name: counts[name] for name in Totals.__struct_fields__})


def _stays(seconds: Mapping[Stay, float]) -> Stays:
    return Stays(**{name: round(each, 6) for name, each in seconds.items()})


def _job_times(way: DriveWay) -> JobTimes:
    spreads = (
        Spread(each.bounds, tuple(each.counts), each.total) for each in (way.seconds, way.wait_seconds, way.num_bytes)
    )
    return JobTimes(len(way.queue), way.running.total(), *spreads)
