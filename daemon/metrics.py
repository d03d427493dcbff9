"""A daemon's report as metrics for Prometheus. Imported only if there is a page for them.

The names of sessions' series begin with `tierstore_`. The daemon's totals outlive sessions; their names begin with
`tierstore_daemon_`. A session's series are labelled by its number, client and rank, and end with the session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tierstore.plain_text import plain

from .report import DaemonReport, DriveState, SessionState, Spread, Totals

__all__ = ["CONTENT_TYPE", "ReportCollector", "metrics_text"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

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
_GAUGES: tuple[tuple[str, str, Callable[[SessionState], int | None]], ...] = (
    ("disk_bytes", "Bytes on disk that the session's records take", lambda each: each.disk_bytes),
    ("quota_bytes", "The most that they may take", lambda each: each.quota_bytes),
    ("records", "Records of the session", lambda each: each.num_records),
    ("slab_bytes", "Bytes of memory that the client shares with the daemon", lambda each: each.slab_bytes),
    ("session_jobs", "Jobs of the session, queued or at the drive", lambda each: each.num_jobs),
    ("queued_bytes", "Bytes of the session's writes, queued or at the drive", lambda each: each.queued_bytes),
    ("held_bytes", "Bytes of its writes that wait for its quota of queued bytes", lambda each: each.held_bytes),
    ("session_connected", "1 if the client is there, 0 if it is lost", lambda each: int(each.is_connected)),
    ("queued_quota_bytes", "The most that may be queued", lambda each: each.queued_quota_bytes),
)
"""Name, words and value of each gauge of a session; None: the session has none."""
_STAYS = {
    "read_queued": ("read", "queued"),
    "read_at_drive": ("read", "at_drive"),
    "write_held": ("write", "held"),
    "write_queued": ("write", "queued"),
    "write_at_drive": ("write", "at_drive"),
}
"""The direction and the place of each field of `Stays`."""


class ReportCollector(Collector):
    """Makes metrics of a report."""

    def __init__(self, report: DaemonReport) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        report = self._report
        yield from _of_daemon(report)
        yield from _of_drives(report.drives or ())
        yield from _of_jobs(report)

    def describe(self) -> Iterable[Metric]:
        """Name none: no other collector has metrics of these names."""
        return ()


def metrics_text(report: DaemonReport) -> bytes:
    """The page `/metrics`: the report, and the kernel's figures of this process. On any thread; takes a while."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ReportCollector(report))
    ProcessCollector(registry=registry)
    return generate_latest(registry) + "".join(_text_of_sessions(report.sessions)).encode()


def _label(text: str) -> str:
    """Text of others as a label: somebody may look at the page in a terminal. The format escapes the ends of lines."""
    return plain(text, kept="\n")


def _of_daemon(report: DaemonReport) -> Iterator[Metric]:
    disk = report.disk
    state = {
        "program": report.program,
        "path": _label(report.path),
        "socket": _label(report.socket),
        "io_mode": disk.io_mode,
    }
    yield InfoMetricFamily("tierstore_daemon", "Which daemon this is", value=state)
    for name, words, value in (
        ("uptime_seconds", "Since the daemon was started", report.uptime_seconds),
        ("daemon_disk_bytes", "Bytes on disk that all live records take", disk.disk_bytes),
        ("daemon_records", "Live records of all sessions", disk.num_records),
        ("allocated_bytes", "Bytes taken from the file system", disk.allocated_bytes),
        ("disk_budget_bytes", "The most that records may take", disk.budget_bytes),
        ("sessions", "Sessions, including those without a client", report.num_sessions),
        ("sessions_waiting", "Sessions whose clients are lost", sum(not each.is_connected for each in report.sessions)),
    ):
        yield GaugeMetricFamily(f"tierstore_{name}", words, value=value)
    if disk.write_allowance_bytes is not None:
        words = "Bytes that the daily limit lets be written now"
        yield GaugeMetricFamily("tierstore_write_allowance_bytes", words, value=disk.write_allowance_bytes)
    yield CounterMetricFamily("tierstore_sessions_opened", "Sessions opened", value=report.num_sessions_opened)
    words = "Internal errors of the daemon; the log has each"
    yield CounterMetricFamily("tierstore_daemon_internal_errors", words, value=report.internal_errors)
    for name, words in _TOTALS.items():
        yield CounterMetricFamily(f"tierstore_daemon_{name}", f"{words}, all sessions", value=_of(report.totals, name))
    codecs = CounterMetricFamily("tierstore_encoded_records", "Records stored, by codec", labels=("kind", "codec"))
    for kind, counts in report.codec_choices.items():
        for codec, count in counts.items():
            codecs.add_metric((_label(kind), codec), count)
    yield codecs


def _of_drives(drives: Iterable[DriveState]) -> Iterator[Metric]:
    gauges = {
        name: GaugeMetricFamily(f"tierstore_drive_{name}", words, labels=("drive",))
        for name, words in (
            ("disk_bytes", "Bytes on the drive that records take"),
            ("allocated_bytes", "Bytes taken from the drive's file system"),
            ("budget_bytes", "The most that records may take on the drive"),
            ("records", "Records on the drive"),
            ("resting", "1 if other drives are preferred for now, because it was full or has failed; else 0"),
            ("write_allowance_bytes", "Bytes that the daily limit lets be written to the drive now"),
            ("write_day_bytes", "The daily limit of bytes that are written to the drive"),
            ("write_bytes_per_second", "Measured while there was something to write; only with several drives"),
        )
    }
    written = CounterMetricFamily("tierstore_drive_written_bytes", "Bytes written to the drive", labels=("drive",))
    read = CounterMetricFamily("tierstore_drive_read_bytes", "Bytes read from the drive", labels=("drive",))
    for each in drives:
        labels = (_label(each.path),)
        for name, value in (
            ("disk_bytes", each.disk_bytes),
            ("allocated_bytes", each.allocated_bytes),
            ("budget_bytes", each.budget_bytes),
            ("records", each.num_records),
            ("resting", int(each.is_resting)),
            ("write_allowance_bytes", each.write_allowance_bytes),
            ("write_day_bytes", each.write_day_bytes),
            ("write_bytes_per_second", each.write_bytes_per_second),
        ):
            if value is not None:
                gauges[name].add_metric(labels, value)
        written.add_metric(labels, each.written_bytes)
        read.add_metric(labels, each.read_bytes)
    yield from gauges.values()
    yield from (written, read)


def _of_jobs(report: DaemonReport) -> Iterator[Metric]:
    ways = {"read": report.jobs.reads, "write": report.jobs.writes}
    queued = GaugeMetricFamily("tierstore_jobs_queued", "Jobs that wait for the drive", labels=("direction",))
    running = GaugeMetricFamily("tierstore_jobs_running", "Jobs at the drive", labels=("direction",))
    seconds = HistogramMetricFamily("tierstore_job_seconds", "Time that jobs ran", labels=("direction",))
    waits = HistogramMetricFamily("tierstore_job_wait_seconds", "Time that jobs were queued", labels=("direction",))
    sizes = HistogramMetricFamily("tierstore_job_bytes", "Bytes that jobs were about", labels=("direction",))
    for direction, way in ways.items():
        queued.add_metric((direction,), way.queued)
        running.add_metric((direction,), way.running)
        for family, spread in ((seconds, way.seconds), (waits, way.wait_seconds), (sizes, way.num_bytes)):
            family.add_metric((direction,), _buckets(spread), spread.total)
    words = "Total seconds that requests of all sessions spent in each place (label stay)"
    stays = CounterMetricFamily("tierstore_daemon_request_seconds", words, labels=("direction", "stay"))
    for name, where in _STAYS.items():
        stays.add_metric(where, getattr(report.stays, name))
    return iter((queued, running, seconds, waits, sizes, stays))


def _text_of_sessions(sessions: Sequence[SessionState]) -> Iterator[str]:
    """A line for each value of each session, in the text format: thousands of objects of the library take seconds."""
    labels = [_labels_of(each) for each in sessions]
    for name, words, value in _GAUGES:
        yield f"# HELP tierstore_{name} {words}\n# TYPE tierstore_{name} gauge\n"
        for session, its in zip(sessions, labels, strict=True):
            if (number := value(session)) is not None:
                yield f"tierstore_{name}{{{its}}} {number}\n"
    name, words = "request_seconds_total", "Total seconds that the session's requests spent in each place (label stay)"
    yield f"# HELP tierstore_{name} {words}\n# TYPE tierstore_{name} counter\n"
    for session, its in zip(sessions, labels, strict=True):
        for field, (direction, stay) in _STAYS.items():
            yield f'tierstore_{name}{{{its},direction="{direction}",stay="{stay}"}} {getattr(session.stays, field)}\n'
    for field, words in _TOTALS.items():
        yield f"# HELP tierstore_{field}_total {words}\n# TYPE tierstore_{field}_total counter\n"
        for session, its in zip(sessions, labels, strict=True):
            yield f"tierstore_{field}_total{{{its}}} {getattr(session.totals, field)}\n"


def _labels_of(session: SessionState) -> str:
    client = _label(session.client).replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    rank = "" if session.rank is None else session.rank
    return f'session="{session.session}",client="{client}",rank="{rank}"'


def _of(totals: Totals, name: str) -> int:
    value: int = getattr(totals, name)
    return value


def _buckets(spread: Spread) -> list[tuple[str, float]]:
    """The buckets as Prometheus wants them: each also counts the values in the buckets below it."""
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*map(repr, spread.bounds), "+Inf"), spread.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
