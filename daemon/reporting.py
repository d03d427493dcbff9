"""Takes reports of the daemon, and answers the clients that ask for one. For one loop; nothing blocks."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from tierstore.disk.drives import LocalTier
from tierstore.disk.tier import DriveUsage
from tierstore.sidecar import messages

from .histogram import Histogram
from .lanes import DriveWay, Lanes, Stay
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
from .settings import ServeSettings
from .stage import Stage
from .tasks import Tasks

__all__ = ["Asker", "Reporter"]


class Asker(Protocol):
    """A connection whose client has asked for a report."""

    def answer(self, message: messages.DaemonMessage) -> None:
        """Send an answer."""
        ...


class Reporter:
    """Asks the parts of the daemon what they hold and have done.

    Args:
        settings: the daemon's.
        program: its name and version.
        metrics_address: host and port of its page; None: it has none.
        started_at: when it was started, by the monotonic clock.
        stage, registry, disk, lanes, tasks: the parts.
    """

    def __init__(
        self,
        settings: ServeSettings,
        program: str,
        metrics_address: str | None,
        *,
        started_at: float,
        stage: Stage,
        registry: Registry,
        disk: LocalTier,
        lanes: Lanes,
        tasks: Tasks,
    ) -> None:
        self._settings = settings
        self._program = program
        self._metrics_address = metrics_address
        self._stage, self._registry, self._disk, self._lanes, self._tasks = stage, registry, disk, lanes, tasks
        self._started_at = started_at
        self._asking: dict[Asker, None] = {}  # in this turn of the loop

    def answer(self, asker: Asker) -> None:
        """Answer with a report. All who ask in one turn of the loop get the same report, once each."""
        if not self._asking:
            asyncio.get_running_loop().call_soon(self._answer_all)
        self._asking[asker] = None

    def report(self) -> DaemonReport:
        """Take a report now."""
        now = asyncio.get_running_loop().time()
        usage = self._disk.usage()
        registry = self._registry
        return DaemonReport(
            program=self._program,
            pid=os.getpid(),
            path=self._settings.place,
            socket=str(self._settings.socket),
            metrics=self._metrics_address,
            uptime_seconds=round(time.monotonic() - self._started_at, 3),
            is_ending=self._stage.is_ending,
            disk=DiskState(**{name: getattr(usage, name) for name in DiskState.__struct_fields__}),
            jobs=Jobs(_job_times(self._lanes.reads), _job_times(self._lanes.writes)),
            totals=_totals(registry.totals()),
            num_sessions=len(registry.sessions),
            num_sessions_opened=registry.num_opened,
            sessions=[self._session_state(session, now) for session in registry.sessions.values()],
            codec_choices={kind: dict(counts) for kind, counts in self._disk.codec_choices().items()},
            internal_errors=self._tasks.num_internal_errors,
            drives=[_drive_state(each) for each in self._disk.drives()],
            stays=_stays(self._lanes.seconds),
        )

    def _answer_all(self) -> None:
        asking, self._asking = self._asking, {}
        report = messages.Report(encode_report(self.report()))
        for asker in asking:
            asker.answer(report)

    def _session_state(self, session: Session, now: float) -> SessionState:
        lease = session.lease
        lease_seconds = None
        if session.lost_at is not None:
            lease_seconds = round(max(0.0, session.lost_at + self._settings.limits.grace_seconds - now), 3)
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
            slab_bytes=self._registry.slab_bytes_of(session),
            num_jobs=session.num_jobs,
            queued_bytes=session.writes.queued_bytes,
            queued_quota_bytes=session.writes.most_bytes,
            held_bytes=session.writes.held_bytes,
            totals=_totals(session.totals),
            stays=_stays(self._lanes.seconds_of(lease.number)),
        )


def _totals(counts: Counter[str]) -> Totals:
    return Totals(**{name: counts[name] for name in Totals.__struct_fields__})


def _stays(seconds: Mapping[Stay, float]) -> Stays:
    return Stays(**{name: round(each, 6) for name, each in seconds.items()})


def _drive_state(drive: DriveUsage) -> DriveState:
    contents = {name: getattr(drive.usage, name) for name in DiskState.__struct_fields__}
    return DriveState(
        **contents,
        path=drive.place,
        written_bytes=drive.written_bytes,
        read_bytes=drive.read_bytes,
        write_day_bytes=drive.write_day_bytes,
        write_bytes_per_second=drive.write_bytes_per_second,
        is_resting=drive.is_resting,
    )


def _job_times(way: DriveWay) -> JobTimes:
    spreads = (_spread(each) for each in (way.seconds, way.wait_seconds, way.num_bytes))
    return JobTimes(len(way.queue), way.num_running, *spreads)


def _spread(histogram: Histogram) -> Spread:
    return Spread(histogram.bounds, tuple(histogram.counts), histogram.total)
