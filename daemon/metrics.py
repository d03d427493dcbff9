"""A daemon's report as metrics for Prometheus. Imported only if there is a page for them.

The names of sessions' series begin with `tierstore_`. The daemon's totals outlive sessions; their names begin with
`tierstore_daemon_`. A session's series are labelled by its number, client and rank, and end with the session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from .report import DaemonReport, DriveState, SessionState, Spread, Stays, Totals

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
_LABELS = ("session", "client", "rank")
_STAYS = {
    "read_queued": ("read", "queued"),
    "read_at_drive": ("read", "at_drive"),
    "write_held": ("write", "held"),
    "write_queued": ("write", "queued"),
    "write_at_drive": ("write", "at_drive"),
}
"""The direction and the place of each field of `Stays`."""


class ReportCollector(Collector):
    """Makes metrics of what `take_report` returns, at each scrape."""

    def __init__(self, take_report: Callable[[], DaemonReport]) -> None:
        self._take_report = take_report

    def collect(self) -> Iterator[Metric]:
        """All metrics, from a report that is taken now."""
        report = self._take_report()
        yield from _of_daemon(report)
        yield from _of_drives(report.drives or ())
        yield from _of_jobs(report)
        yield from _of_sessions(report.sessions)

    def describe(self) -> Iterable[Metric]:
        """Name no metrics before the first scrape, because they depend on the sessions."""
        return ()


def metrics_text(take_report: Callable[[], DaemonReport]) -> Callable[[], bytes]:
    """Make the function that writes the page `/metrics`: the report, and the kernel's figures of this process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ReportCollector(take_report))
    ProcessCollector(registry=registry)
    return lambda: generate_latest(registry)


def _of_daemon(report: DaemonReport) -> Iterator[Metric]:
    disk = report.disk
    state = {"program": report.program, "path": report.path, "socket": report.socket, "io_mode": disk.io_mode}
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
            codecs.add_metric((kind, codec), count)
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
        labels = (each.path,)
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


def _stays(stays: Stays, family: CounterMetricFamily, labels: tuple[str, ...] = ()) -> None:
    for name, where in _STAYS.items():
        family.add_metric((*labels, *where), getattr(stays, name))


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
    _stays(report.stays, stays)
    return iter((queued, running, seconds, waits, sizes, stays))


def _of_sessions(sessions: Iterable[SessionState]) -> Iterator[Metric]:
    gauges = {
        name: GaugeMetricFamily(f"tierstore_{name}", words, labels=_LABELS)
        for name, words in (
            ("disk_bytes", "Bytes on disk that the session's records take"),
            ("quota_bytes", "The most that they may take"),
            ("records", "Records of the session"),
            ("slab_bytes", "Bytes of memory that the client shares with the daemon"),
            ("session_jobs", "Jobs of the session, queued or at the drive"),
            ("queued_bytes", "Bytes of the session's writes, queued or at the drive"),
            ("held_bytes", "Bytes of its writes that wait for its quota of queued bytes"),
            ("session_connected", "1 if the session's client is there, 0 if it is lost"),
        )
    }
    queued_quota = GaugeMetricFamily("tierstore_queued_quota_bytes", "The most that may be queued", labels=_LABELS)
    counters = {
        name: CounterMetricFamily(f"tierstore_{name}", words, labels=_LABELS) for name, words in _TOTALS.items()
    }
    words = "Total seconds that the session's requests spent in each place (label stay)"
    stays = CounterMetricFamily("tierstore_request_seconds", words, labels=(*_LABELS, "direction", "stay"))
    for each in sessions:
        labels = (str(each.session), each.client, "" if each.rank is None else str(each.rank))
        held = (
            each.disk_bytes,
            each.quota_bytes,
            each.num_records,
            each.slab_bytes,
            each.num_jobs,
            each.queued_bytes,
            each.held_bytes,
            int(each.is_connected),
        )
        for gauge, value in zip(gauges.values(), held, strict=True):
            gauge.add_metric(labels, value)
        if each.queued_quota_bytes is not None:
            queued_quota.add_metric(labels, each.queued_quota_bytes)
        for name, counter in counters.items():
            counter.add_metric(labels, _of(each.totals, name))
        _stays(each.stays, stays, labels)
    yield from gauges.values()
    yield queued_quota
    yield stays
    yield from counters.values()


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
