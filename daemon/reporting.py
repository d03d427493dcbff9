"""Takes reports of the daemon for all who ask: clients, the page, its curves. For one loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from tierstore.disk.tier import DriveUsage
from tierstore.plain_text import plain_json, unicode_text
from tierstore.sidecar import messages

from .lanes import DriveWay, Stay
from .registry import Registry
from .report import (
    DaemonReport,
    DiskState,
    DriveState,
    Jobs,
    JobTimes,
    SessionState,
    Spread,
    Stays,
    Totals,
    encode_report,
)
from .sessions import Session

if TYPE_CHECKING:
    from .connection import Connection

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
        self._due_at = self._clock() + min(_MOST_REST_SECONDS, _RESTS * seconds)

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

    def __init__(self, registry: Registry, program: str, metrics_address: str | None, started_at: float) -> None:
        self.program = program
        self.reports = Reports(self._take)
        self._registry = registry
        self._metrics_address = metrics_address
        self._started_at = started_at
        self._asking: set[Connection] = set()

    def answer(self, asker: Connection) -> None:
        """Answer with the next report; one answer for all questions that are unanswered by then."""
        if asker not in self._asking:
            self._asking.add(asker)
            self._registry.tasks.start(self._answer(asker))

    async def _answer(self, asker: Connection) -> None:
        try:
            taken = await self.reports.get()
        finally:
            self._asking.discard(asker)
        asker.answer(messages.Report(taken.encoded))

    def _take(self) -> TakenReport:
        registry, disk, now = self._registry, self._registry.records.disk, asyncio.get_running_loop().time()
        settings, lanes, usage = registry.settings, registry.lanes, disk.usage()
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
            disk=DiskState(**{name: getattr(usage, name) for name in DiskState.__struct_fields__}),
            jobs=Jobs(_job_times(lanes.reads), _job_times(lanes.writes)),
            totals=_totals(totals),
            num_sessions=len(sessions),
            num_sessions_opened=registry.num_opened,
            sessions=[self._session_state(session, now) for session in sessions],
            codec_choices={kind: dict(counts) for kind, counts in disk.codec_choices().items()},
            internal_errors=registry.tasks.num_internal_errors,
            drives=[_drive_state(each) for each in disk.drives()],
            stays=_stays(lanes.seconds),
        )
        return TakenReport(report)

    def _session_state(self, session: Session, now: float) -> SessionState:
        lease = session.lease
        lease_seconds = None
        if session.lost_at is not None:
            lease_seconds = round(max(0.0, session.lost_at + self._registry.settings.grace_seconds - now), 3)
        return SessionState(
            session=lease.number,
            client=lease.name,
            rank=lease.rank,
            pid=lease.pid,
            uid=lease.uid,
            is_connected=session.lost_at is None,
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


def _drive_state(drive: DriveUsage) -> DriveState:
    contents = {name: getattr(drive.usage, name) for name in DiskState.__struct_fields__}
    own = set(DriveState.__struct_fields__) - contents.keys() - {"path"}
    return DriveState(**contents, **{name: getattr(drive, name) for name in own}, path=unicode_text(drive.place))


def _job_times(way: DriveWay) -> JobTimes:
    spreads = (
        Spread(each.bounds, tuple(each.counts), each.total) for each in (way.seconds, way.wait_seconds, way.num_bytes)
    )
    return JobTimes(len(way.queue), way.num_running, *spreads)
