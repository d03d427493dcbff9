"""A daemon's report as metrics for Prometheus. Imported only if there is a page for them.

Sessions' series (`tierstore_…`) end with the session; the daemon's totals (`tierstore_daemon_…`) outlive them. The
lines are written here, since thousands of objects of the library take seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from operator import attrgetter

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from tierstore.plain_text import plain

from .report import DaemonReport, Spread, Stays

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Figures = Sequence[tuple[str, str, str]]
"""Metrics of a thing: the name, the field of the thing (None there: it has none), and words."""

_OF_DAEMON: _Figures = (
    ("tierstore_uptime_seconds", "uptime_seconds", "Since the daemon was started"),
    ("tierstore_daemon_disk_bytes", "disk.disk_bytes", "Bytes on disk that all live records take"),
    ("tierstore_daemon_records", "disk.num_records", "Live records of all sessions"),
    ("tierstore_allocated_bytes", "disk.allocated_bytes", "Bytes taken from the file system"),
    ("tierstore_disk_budget_bytes", "disk.budget_bytes", "The most that records may take"),
    ("tierstore_write_allowance_bytes", "disk.write_allowance_bytes", "Bytes that the daily limit lets be written now"),
    ("tierstore_sessions", "num_sessions", "Sessions, including those without a client"),
    ("tierstore_sessions_opened_total", "num_sessions_opened", "Sessions opened"),
    ("tierstore_daemon_internal_errors_total", "internal_errors", "Internal errors, each of which is in the log"),
)
_OF_DRIVE: _Figures = (
    ("tierstore_drive_disk_bytes", "disk_bytes", "Bytes on the drive that records take"),
    ("tierstore_drive_allocated_bytes", "allocated_bytes", "Bytes taken from the drive's file system"),
    ("tierstore_drive_budget_bytes", "budget_bytes", "The most that records may take on the drive"),
    ("tierstore_drive_records", "num_records", "Records on the drive"),
    ("tierstore_drive_resting", "is_resting", "1 if it was full or has failed, so others are preferred now; else 0"),
    ("tierstore_drive_write_allowance_bytes", "write_allowance_bytes", "Bytes that the daily limit lets be written"),
    ("tierstore_drive_write_day_bytes", "write_day_bytes", "The daily limit of bytes that are written to the drive"),
    ("tierstore_drive_write_bytes_per_second", "write_bytes_per_second", "Measured; only with several drives"),
    ("tierstore_drive_written_bytes_total", "written_bytes", "Bytes written to the drive"),
    ("tierstore_drive_read_bytes_total", "read_bytes", "Bytes read from the drive"),
)
_OF_WAY: _Figures = (
    ("tierstore_jobs_queued", "queued", "Jobs that wait for the drive"),
    ("tierstore_jobs_running", "running", "Jobs at the drive"),
)
_SPREADS: _Figures = (
    ("tierstore_job_seconds", "seconds", "Time that jobs ran"),
    ("tierstore_job_wait_seconds", "wait_seconds", "Time that jobs were queued"),
    ("tierstore_job_bytes", "num_bytes", "Bytes that jobs were about"),
)
_OF_SESSION: _Figures = (
    ("tierstore_disk_bytes", "disk_bytes", "Bytes on disk that the session's records take"),
    ("tierstore_quota_bytes", "quota_bytes", "The most that they may take"),
    ("tierstore_records", "num_records", "Records of the session"),
    ("tierstore_slab_bytes", "slab_bytes", "Bytes of memory that the client shares with the daemon"),
    ("tierstore_session_jobs", "num_jobs", "Jobs of the session, queued or at the drive"),
    ("tierstore_queued_bytes", "queued_bytes", "Bytes of the session's writes, queued or at the drive"),
    ("tierstore_held_bytes", "held_bytes", "Bytes of its writes that wait for its quota of queued bytes"),
    ("tierstore_session_connected", "is_connected", "1 if the client is there, 0 if it is lost"),
    ("tierstore_queued_quota_bytes", "queued_quota_bytes", "The most that may be queued"),
)
_TOTALS = {
    "spilled_bytes": "Bytes stored, as the clients gave them",
    "written_bytes": "Bytes on disk for what was stored",
    "restored_bytes": "Bytes given back to clients",
    "read_bytes": "Bytes read from disk for what was given back",
    "discarded_records": "Records freed",
    "full": "Writes that found no room: quota, budget or file system",
    "corrupt_records": "Records whose bytes were found damaged",
    "io_errors": "Jobs that failed at the device",
}


def metrics_text(report: DaemonReport) -> bytes:
    """The page `/metrics`: the report, and the kernel's figures of this process. On any thread; takes a while."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    return "".join(_lines_of(report)).encode() + generate_latest(registry)


def _lines_of(report: DaemonReport) -> Iterator[str]:
    about = {"program": report.program, "path": report.path, "socket": report.socket, "io_mode": report.disk.io_mode}
    yield from _family("tierstore_daemon_info", "Which daemon this is", [(_labels(about), 1)])
    yield from _of_each(_OF_DAEMON, [report], [""])
    num_waiting = sum(not each.is_connected for each in report.sessions)
    yield from _family("tierstore_sessions_waiting", "Sessions whose clients are lost", [("", num_waiting)])
    totals = [
        (f"tierstore_daemon_{name}_total", f"totals.{name}", f"{_TOTALS[name]}, all sessions") for name in _TOTALS
    ]
    yield from _of_each(totals, [report], [""])
    choices = [
        (_labels({"kind": kind, "codec": codec}), count)
        for kind, counts in report.codec_choices.items()
        for codec, count in counts.items()
    ]
    yield from _family("tierstore_encoded_records_total", "Records stored, by codec", choices)
    drives = report.drives or ()
    yield from _of_each(_OF_DRIVE, drives, [_labels({"drive": each.path}) for each in drives])
    ways, directions = (report.jobs.reads, report.jobs.writes), ('{direction="read"}', '{direction="write"}')
    yield from _of_each(_OF_WAY, ways, directions)
    for name, field, words in _SPREADS:
        yield f"# HELP {name} {words}\n# TYPE {name} histogram\n"
        for way, labels in zip(ways, directions, strict=True):
            yield from _histogram(name, labels, getattr(way, field))
    words = "Total seconds that requests of all sessions spent in each place (label stay)"
    yield from _family("tierstore_daemon_request_seconds_total", words, _stays(report.stays, ""))
    of_sessions = [
        _labels({"session": each.session, "client": each.client, "rank": each.rank}) for each in report.sessions
    ]
    totals = [(f"tierstore_{name}_total", f"totals.{name}", words) for name, words in _TOTALS.items()]
    yield from _of_each([*_OF_SESSION, *totals], report.sessions, of_sessions)
    stays = (_stays(each.stays, f"{its[1:-1]},") for each, its in zip(report.sessions, of_sessions, strict=True))
    words = "Total seconds that the session's requests spent in each place (label stay)"
    yield from _family("tierstore_request_seconds_total", words, chain.from_iterable(stays))


def _family(name: str, words: str, samples: Iterable[tuple[str, float]]) -> Iterator[str]:
    yield f"# HELP {name} {words}\n# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}\n"
    for labels, value in samples:
        yield f"{name}{labels} {value:d}\n" if isinstance(value, bool) else f"{name}{labels} {value}\n"


def _of_each(figures: _Figures, things: Sequence[object], labels: Sequence[str]) -> Iterator[str]:
    for name, field, words in figures:
        values = zip(labels, map(attrgetter(field), things), strict=True)
        yield from _family(name, words, [(its, value) for its, value in values if value is not None])


def _histogram(name: str, labels: str, spread: Spread) -> Iterator[str]:
    """Each bucket also counts the values in the buckets below it."""
    counts = list(accumulate(spread.counts))
    for bound, count in zip((*map(repr, spread.bounds), "+Inf"), counts, strict=True):
        yield f'{name}_bucket{labels[:-1]},le="{bound}"}} {count}\n'
    yield f"{name}_sum{labels} {spread.total}\n{name}_count{labels} {counts[-1]}\n"


def _stays(stays: Stays, others: str) -> Iterator[tuple[str, float]]:
    for field in Stays.__struct_fields__:
        direction, stay = field.split("_", 1)  # such as read_at_drive
        yield f'{{{others}direction="{direction}",stay="{stay}"}}', getattr(stays, field)


def _labels(values: Mapping[str, object]) -> str:
    """Somebody may look at texts of others in a terminal, so they are plain. The format escapes the ends of lines."""
    parts = []
    for name, value in values.items():
        text = plain("" if value is None else str(value), kept="\n")
        escaped = text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
        parts.append(f'{name}="{escaped}"')
    return "{" + ",".join(parts) + "}"
