"""Takes reports of the daemon for all who ask: clients, the page, its curves. For one loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from tierstore.disk.drives import LocalTier
from tierstore.disk.tier import DriveUsage
from tierstore.plain_text import unicode_text
from tierstore.sidecar import messages
from tierstore.sidecar.frames import encoded

from .lanes import DriveWay, Lanes, Stay
from .options import ServeSettings
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
from .tasks import Stage, Tasks

if TYPE_CHECKING:
    from .connection import Connection

_RESTS = 10
"""How many times as long as the making. So all who ask without end take a tenth of the time together."""
_MOST_REST_SECONDS = 0.5  # a client that asks for a sign of life waits for it too


class Reports:
    """A report is made when somebody asks, and rests follow. All who ask meanwhile get the same one."""

    def __init__(self, make: Callable[[], DaemonReport], clock: Callable[[], float] = time.perf_counter) -> None:
        self._make = make
        self._clock = clock
        self._next: asyncio.Task[DaemonReport] | None = None
        self._due_at = clock()

    async def get(self) -> DaemonReport:
        """Wait for a rest, of half a second at most, and the making of the next. Raises as `make`."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._make_when_due())
        return await asyncio.shield(self._next)

    def rest_for(self, seconds: float) -> None:
        """Rest for work of so many seconds, which was done with the report or for it."""
        self._due_at = self._clock() + min(_MOST_REST_SECONDS, _RESTS * seconds)

    async def _make_when_due(self) -> DaemonReport:
        await asyncio.sleep(max(0.0, self._due_at - self._clock()))
        self._next = None
        began_at = self._clock()
        try:
            return self._make()
        finally:
            self.rest_for(self._clock() - began_at)


@dataclass(eq=False)
class Reporter:
    """Asks the parts of the daemon what they hold and have done."""

    settings: ServeSettings
    program: str
    metrics_address: str | None
    started_at: float
    stage: Stage
    registry: Registry
    disk: LocalTier
    lanes: Lanes
    tasks: Tasks

    def __post_init__(self) -> None:
        self.reports = Reports(self._take)
        self._asking: set[Connection] = set()
        self._answer_of: tuple[DaemonReport, msgspec.Raw] | None = None  # to the newest, encoded once for all

    def answer(self, asker: Connection) -> None:
        """Answer with the next report; one answer for all questions that are unanswered by then."""
        if asker not in self._asking:
            self._asking.add(asker)
            self.tasks.start(self._answer(asker))

    async def _answer(self, asker: Connection) -> None:
        try:
            report = await self.reports.get()
        finally:
            self._asking.discard(asker)
        if self._answer_of is None or self._answer_of[0] is not report:
            self._answer_of = report, encoded(messages.Report(encode_report(report)))
        asker.answer(self._answer_of[1])

    def _take(self) -> DaemonReport:
        registry, usage, now = self.registry, self.disk.usage(), asyncio.get_running_loop().time()
        sessions, totals = registry.sessions.values(), Counter(registry.ended_totals)
        for session in sessions:
            totals.update(session.totals)
        return DaemonReport(
            program=self.program,
            pid=os.getpid(),
            path=unicode_text(self.settings.place),
            socket=unicode_text(str(self.settings.socket)),
            metrics=self.metrics_address,
            uptime_seconds=round(time.monotonic() - self.started_at, 3),
            is_ending=self.stage.is_ending,
            disk=DiskState(**{name: getattr(usage, name) for name in DiskState.__struct_fields__}),
            jobs=Jobs(_job_times(self.lanes.reads), _job_times(self.lanes.writes)),
            totals=_totals(totals),
            num_sessions=len(sessions),
            num_sessions_opened=registry.num_opened,
            sessions=[self._session_state(session, now) for session in sessions],
            codec_choices={kind: dict(counts) for kind, counts in self.disk.codec_choices().items()},
            internal_errors=self.tasks.num_internal_errors,
            drives=[_drive_state(each) for each in self.disk.drives()],
            stays=_stays(self.lanes.seconds),
        )

    def _session_state(self, session: Session, now: float) -> SessionState:
        lease = session.lease
        lease_seconds = None
        if session.lost_at is not None:
            lease_seconds = round(max(0.0, session.lost_at + self.settings.grace_seconds - now), 3)
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
            stays=_stays(self.lanes.seconds_of(lease.number)),
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
