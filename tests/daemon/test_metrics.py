"""The daemon's page: what Prometheus reads, and what probes are told."""

import signal
import socket
from collections.abc import Iterator

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.daemon import wire
from tests.daemon.clients import ask, client_of, page_of, report_of
from tests.daemon.conftest import DaemonProcess, StartDaemon, tierstore
from tests.waiting import until
from tierstore import TierStore
from tierstore.daemon.lanes import Histogram
from tierstore.daemon.report import Totals
from tierstore.sidecar.window import SharedSlab

MIB = 2**20
SECONDS = 30.0
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> DaemonProcess:
    options = {"session_disk_bytes": "64MiB", "session_queued_bytes": "2MiB", "grace_seconds": 0}
    return start_daemon(metrics="127.0.0.1:0", codec="none", **options)


@pytest.fixture
def page(daemon: DaemonProcess) -> str:
    return page_of(daemon)


def scrape(page: str) -> Samples:
    answer = ask(page, "/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def labels(**values: str) -> frozenset[tuple[str, str]]:
    return frozenset(values.items())


def of_sessions(samples: Samples) -> set[str]:
    return {name for name, its_labels in samples if "session" in dict(its_labels)}


def test_metrics_tell_what_a_session_did(daemon: DaemonProcess, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with TierStore.connect(daemon.socket, host_bytes=0, name='train "it" \\ now\n') as store:
        handles = [store.put(torch.randn(MIB // 4)) for _ in range(4)]
        store.flush()
        for handle in handles:
            store.get(handle)
        samples = scrape(page)
        (session,) = report_of(daemon).sessions
        mine = labels(session=str(session.session), client='train "it" \\ now\n', rank="3")
        for name, value in {
            "tierstore_disk_bytes": 4 * MIB,
            "tierstore_quota_bytes": 64 * MIB,
            "tierstore_records": 4,
            "tierstore_session_connected": 1,
            "tierstore_session_jobs": 0,
            "tierstore_queued_bytes": 0,
            "tierstore_queued_quota_bytes": 2 * MIB,
            "tierstore_held_bytes": 0,
            "tierstore_slab_bytes": session.slab_bytes,
            "tierstore_spilled_bytes_total": 4 * MIB,
            "tierstore_written_bytes_total": 4 * MIB,
            "tierstore_restored_bytes_total": 4 * MIB,
            "tierstore_read_bytes_total": 4 * MIB,
            "tierstore_corrupt_records_total": 0,
            "tierstore_full_total": 0,
        }.items():
            assert samples[name, mine] == value, name
        assert session.slab_bytes > 0
        for name, value in {
            "tierstore_sessions": 1,
            "tierstore_sessions_opened_total": 1,
            "tierstore_sessions_waiting": 0,
            "tierstore_daemon_records": 4,
            "tierstore_daemon_disk_bytes": 4 * MIB,
            "tierstore_daemon_spilled_bytes_total": 4 * MIB,
            "tierstore_disk_budget_bytes": report_of(daemon).disk.budget_bytes,
            "tierstore_allocated_bytes": report_of(daemon).disk.allocated_bytes,
        }.items():
            assert samples[name, labels()] == value, name
        assert samples["tierstore_encoded_records_total", labels(kind="float32", codec="none")] == 4
        assert samples["process_resident_memory_bytes", labels()] > 0


def test_series_of_a_session_vanish_with_it_and_totals_stay(daemon: DaemonProcess, page: str) -> None:
    for num_sessions in (1, 2):
        with TierStore.connect(daemon.socket, host_bytes=0) as store:
            handle = store.put(torch.randn(MIB // 4))
            store.flush()
            assert "tierstore_disk_bytes" in of_sessions(scrape(page))
            del handle
        samples = scrape(page)
        assert of_sessions(samples) == set()
        assert samples["tierstore_sessions", labels()] == 0
        assert samples["tierstore_daemon_disk_bytes", labels()] == 0
        assert samples["tierstore_daemon_spilled_bytes_total", labels()] == num_sessions * MIB
        assert samples["tierstore_daemon_discarded_records_total", labels()] == num_sessions
        report = report_of(daemon)
        assert (report.sessions, report.num_sessions, report.num_sessions_opened) == ([], 0, num_sessions)
        assert report.totals == Totals(num_sessions * MIB, num_sessions * MIB, discarded_records=num_sessions)


BROKEN = """
import os, sys, uvloop
from tierstore.daemon.options import settings_of
from tierstore.daemon.sessions import Session
from tierstore.daemon.server import Daemon

async def free(*_):
    raise ZeroDivisionError("alas")

Session.free = free
Session.has_any_of = lambda self, keys: True
path, socket = sys.argv[1:]
options = {"path": path, "socket": socket, "metrics": "127.0.0.1:0", "grace_seconds": "0"}
uvloop.run(Daemon(settings_of(options, {})).run())
"""


def test_bugs_of_the_daemon_are_counted_and_logged(start_daemon: StartDaemon) -> None:
    """A request that it cannot answer for a bug, and the end of that client's session."""
    daemon = start_daemon(program=BROKEN)
    page = page_of(daemon)
    assert scrape(page)["tierstore_daemon_internal_errors_total", labels()] == 0
    with client_of(daemon) as client:
        client.open()
        client.send(wire.Discard(1, (1,)))
        assert "ZeroDivisionError" in repr(client.receive())
    until(lambda: report_of(daemon).internal_errors == 2)  # the client has not closed its session, so it is ended
    assert scrape(page)["tierstore_daemon_internal_errors_total", labels()] == 2
    assert daemon.log.count("ZeroDivisionError: alas") == 2
    assert "bugs, see the log" in tierstore("stat", f"--socket={daemon.socket}").stdout


def test_jobs_are_counted_by_time_and_size(daemon: DaemonProcess, page: str) -> None:
    with TierStore.connect(daemon.socket, host_bytes=0) as store:
        handles = [store.put(torch.randn(size)) for size in (1024, MIB // 4, MIB)]
        store.flush()
        store.get(handles[-1])
        samples = scrape(page)
    for direction, num_jobs, num_bytes in (("write", 3, 4096 + 5 * MIB), ("read", 1, 4 * MIB)):
        its = labels(direction=direction)
        for name in ("tierstore_job_seconds", "tierstore_job_wait_seconds", "tierstore_job_bytes"):
            assert samples[f"{name}_count", its] == num_jobs
            assert samples[f"{name}_bucket", its | labels(le="+Inf")] == num_jobs
        assert samples["tierstore_job_bytes_sum", its] == num_bytes
        assert samples["tierstore_jobs_queued", its] == 0
        assert samples["tierstore_jobs_running", its] == 0
    assert samples["tierstore_job_bytes_bucket", labels(direction="write", le="4096.0")] == 1
    assert samples["tierstore_job_bytes_bucket", labels(direction="write", le=str(float(MIB)))] == 2
    assert samples["tierstore_job_seconds_sum", labels(direction="write")] > 0


def test_histogram_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([2, 2, 1], 7.5)


def test_probes_are_answered_and_nonsense_is_refused(page: str) -> None:
    for path, status in {"/healthz": 200, "/readyz": 200, "/readyz?verbose": 200, "/nothing": 404}.items():
        assert ask(page, path).status == status
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert ask(page, "/status.json", method=method).status == 405
    code, headers, body = ask(page, "/", method="HEAD")
    assert (code, body, int(headers["Content-Length"]) > 1000) == (200, b"", True)
    host, port = page.split(":")
    for line in (b"", b"GET", b"\xff\xfe\x00", b"GET /metrics", b"GET /metrics SPDY/3"):
        with socket.create_connection((host, int(port)), timeout=SECONDS) as visitor:
            visitor.sendall(line + b"\r\n\r\n")
            assert visitor.recv(65536).startswith(b"HTTP/1.1 400 "), line
    with (
        socket.create_connection((host, int(port)), timeout=SECONDS) as visitor,
        pytest.raises((ConnectionResetError, BrokenPipeError)),
    ):
        visitor.sendall(b"GET /" + b"a" * 32 * MIB)  # more than sockets take in
    assert ask(page, "/healthz").status == 200


@pytest.fixture
def busy_daemon(start_daemon: StartDaemon) -> Iterator[DaemonProcess]:
    """It has seconds of work that it has to finish before it may end."""
    daemon = start_daemon(metrics="127.0.0.1:0", codec="zstd:19")
    slab = SharedSlab(1, 16 * MIB)
    generator = torch.Generator().manual_seed(0)
    slab.memory[:] = torch.randint(0, 16, (16 * MIB,), dtype=torch.uint8, generator=generator).numpy().data
    with client_of(daemon) as client:
        client.open()
        client.send(wire.Slab(1, 16 * MIB), descriptors=(slab.descriptor,))
        client.send(*(wire.Write(number, number, 1, 0, 2 * MIB, "uint8", 1, "") for number in range(128)))
        client.expect(wire.Stored)
        yield daemon
    slab.close()


def test_ready_no_more_while_it_ends(busy_daemon: DaemonProcess) -> None:
    report = report_of(busy_daemon)
    assert report.metrics is not None
    assert report.jobs.writes.running > 0
    assert ask(report.metrics, "/readyz").status == 200
    busy_daemon.process.send_signal(signal.SIGTERM)
    while (answer := ask(report.metrics, "/readyz")).status == 200:
        pass  # until the signal has arrived; the test's time limit ends it otherwise
    assert (answer.status, answer.text) == (503, "ending\n")
    assert ask(report.metrics, "/healthz").status == 200
    assert ask(report.metrics, "/metrics").status == 200
    assert busy_daemon.process.poll() is None
    assert busy_daemon.stop() == 0, "a second signal ends it at once"
