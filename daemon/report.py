"""The report: a record of what a daemon holds and has done, for `tierstore stat`, `tierstore top` and the metrics.

Fields with disk, written or read in their names count bytes as they are on disk; the others count them as the clients
gave them.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from tierstore.disk.codec.policy import OTHER_KINDS
from tierstore.sidecar.frames import MAX_FRAME_BYTES

_ROOM_BYTES = MAX_FRAME_BYTES - 1024
"""Room for a report in one frame."""
_LEAST_SESSION_BYTES = 400
"""No session takes less in a report: the names of its fields alone take as much."""
_MOST_KINDS = 64
"""Of records, in a report that is too long."""


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


class DiskState(msgspec.Struct, frozen=True):
    """What the drive holds, as in `tierstore.disk.DiskUsage`."""

    disk_bytes: int
    allocated_bytes: int
    budget_bytes: int
    num_records: int
    io_mode: str
    write_allowance_bytes: int | None = None


class DriveState(DiskState, frozen=True, kw_only=True):
    """What one drive holds and has moved, as in `tierstore.disk.tier.DriveUsage`."""

    path: str
    written_bytes: int
    read_bytes: int
    write_day_bytes: int | None = None
    write_bytes_per_second: float | None = None
    is_resting: bool = False


class Stays(msgspec.Struct, frozen=True):
    """How long requests have stayed where, in seconds, added up. A request is counted when it moves on, so the growth
    of a field in a second is how many requests were there on average.

    `read_queued`, `write_queued`: waited for the drive; `read_at_drive`, `write_at_drive`: were there; `write_held`:
    held back by their session's quota of queued bytes.
    """

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
        codec_choices: how often each codec was used, by kind of record. Where not all kinds fit into one answer, the
            kinds used least are summed up as "others".
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
    disk: DiskState
    jobs: Jobs
    totals: Totals
    num_sessions: int
    num_sessions_opened: int
    sessions: list[SessionState]
    codec_choices: dict[str, dict[str, int]]
    internal_errors: int = 0
    drives: list[DriveState] | None = None
    stays: Stays = Stays()


def encode_report(report: DaemonReport) -> bytes:
    """The report as JSON that fits into one frame. If it is longer, kinds are summed up, then sessions left out."""
    most = _ROOM_BYTES // _LEAST_SESSION_BYTES  # so that thousands that have no room are not encoded first
    encoded = msgspec.json.encode(report := msgspec.structs.replace(report, sessions=report.sessions[:most]))
    if len(encoded) > _ROOM_BYTES:
        report = msgspec.structs.replace(report, codec_choices=_fewer_kinds(report.codec_choices))
        encoded = msgspec.json.encode(report)
    while len(encoded) > _ROOM_BYTES and report.sessions:
        report = msgspec.structs.replace(report, sessions=report.sessions[: len(report.sessions) // 2])
        encoded = msgspec.json.encode(report)
    return encoded


def _fewer_kinds(choices: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """The kinds that were used most, and all others summed up."""
    by_use = sorted(choices.keys() - {OTHER_KINDS}, key=lambda kind: sum(choices[kind].values()), reverse=True)
    others = Counter(choices.get(OTHER_KINDS, {}))
    for kind in by_use[_MOST_KINDS:]:
        others.update(choices[kind])
    return {kind: choices[kind] for kind in by_use[:_MOST_KINDS]} | {OTHER_KINDS: dict(others)}
