"""The live page: what the daemon serves to browsers, and what visitors cannot do to it."""

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.daemon.clients import ask, page_of, report_of
from tests.daemon.conftest import DaemonProcess, StartDaemon
from tierstore import TierStore
from tierstore.commands.views import decode_report
from tierstore.daemon import page as page_module
from tierstore.daemon.page import Page, PageAnswer, Watch
from tierstore.daemon.report import DaemonReport, Jobs, JobTimes, Reports, Spread, TakenReport, Totals
from tierstore.daemon.tasks import Stage
from tierstore.disk.tier import DiskUsage

MIB = 2**20
SECONDS = 30.0


@pytest.fixture
def daemon(start_daemon: StartDaemon, tmp_path: Path) -> DaemonProcess:
    (tmp_path / "first").mkdir()
    first = ["--path", str(tmp_path / "first")]
    return start_daemon(arguments=first, metrics="127.0.0.1:0", codec="none", max_write_bytes_per_day="1GiB")


@pytest.fixture
def address(daemon: DaemonProcess) -> str:
    return page_of(daemon)


def status_of(page: str) -> bytes:
    answer = ask(page, "/status.json")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    return answer.body


def made_up_report() -> TakenReport:
    spread = Spread((1.0,), (0, 0), 0.0)
    times = JobTimes(0, 0, spread, spread, spread)
    disk = DiskUsage(0, 0, 2**30, 0, "O_DIRECT")
    words = ("tierstore", 1, "/nvme", "/run/t.sock", None)
    return TakenReport(DaemonReport(*words, 1.0, False, disk, Jobs(times, times), Totals(), 0, 0, [], {}))


@pytest.fixture
async def watched() -> AsyncIterator[str]:
    watch = Watch(stage := Stage(), "127.0.0.1", 0)
    await watch.begin()
    stage.is_open = True
    watch.reports = Reports(made_up_report)
    yield watch.address
    watch.close()
    await asyncio.sleep(0)


async def test_page_names_nothing_elsewhere_and_its_policy_allows_its_own_script_alone(watched: str) -> None:
    code, headers, body = await asyncio.to_thread(ask, watched, "/")
    assert (code, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in headers["Content-Security-Policy"]
    for tag in ("style", "script"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), body, re.DOTALL)
        assert policy[f"{tag}-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
    assert set(re.findall(rb"\w+://[\w./]+", body)) == {b"http://www.w3.org/2000/svg"}, "the name of a format alone"
    assert b"innerHTML" not in body
    assert b"insertAdjacentHTML" not in body
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"


async def test_site_whose_name_was_made_to_point_here_is_refused(watched: str) -> None:
    for path in ("/", "/status.json", "/metrics", "/healthz", "/readyz", "/nothing"):
        for host in (
            "evil.example",
            "localhost.evil.example:9464",
            "127.0.0.1.evil.example",
            "[::1%evil]",
            "::1%e",
            "",
        ):
            assert (await asyncio.to_thread(ask, watched, path, host)).status == 403, (path, host)
        for host in ("127.0.0.1:9464", "localhost:9464", "[::1]:9464", "LOCALHOST"):
            expected = 404 if path == "/nothing" else 200
            assert (await asyncio.to_thread(ask, watched, path, host)).status == expected, (path, host)


async def test_status_says_that_the_daemon_starts_or_ends() -> None:
    watch = Watch(stage := Stage(), "127.0.0.1", 0)
    await watch.begin()
    assert (await asyncio.to_thread(ask, watch.address, "/")).status == 200
    for words in ("starting", "ending"):
        answer = await asyncio.to_thread(ask, watch.address, "/status.json")
        assert (answer.status, answer.text) == (503, f"{words}\n")
        stage.ending.set()
    watch.close()


def test_status_is_the_report(daemon: DaemonProcess, address: str, tmp_path: Path) -> None:
    with TierStore.connect(daemon.socket, host_bytes=0, name="<b>train</b>") as store:
        handles = [store.put(torch.randn(MIB)) for _ in range(8)]
        store.flush()
        for handle in handles:
            store.get(handle)
        report = decode_report(status_of(address), "the page")
        (session,) = report.sessions
        now = report_of(daemon)
        assert (session.client, session.disk_bytes) == ("<b>train</b>", 32 * MIB)
        assert report.totals == now.totals
        drives = now.drives or []
        assert [drive.path for drive in drives] == [str(tmp_path / "first"), str(tmp_path / "drive")]
        assert sum(drive.disk_bytes for drive in drives) == now.disk.disk_bytes == 32 * MIB
        assert sum(drive.written_bytes for drive in drives) == 32 * MIB
        assert sum(drive.read_bytes for drive in drives) == 32 * MIB
        assert all((drive.write_bytes_per_second or 0) > 0 for drive in drives if drive.written_bytes)
        assert [drive.write_day_bytes for drive in drives] == [2**30, 2**30]
        assert now.stays.write_at_drive > 0
        assert now.stays.read_at_drive > 0
        assert now.sessions[0].stays == now.stays
        del handles, handle


def test_reads_and_writes_that_wait_are_counted_where_they_wait(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(codec="none", session_queued_bytes=0)
    with TierStore.connect(daemon.socket, host_bytes=0) as store:
        handles = [store.put(torch.randn(MIB)) for _ in range(8)]
        store.flush()
        held = report_of(daemon).stays
        assert held.write_held > 0, "one goes after the other"
        assert held.read_queued == held.read_at_drive == 0
        for handle in handles:
            store.get(handle)
        stays = report_of(daemon).stays
        assert stays.read_at_drive > 0
        assert stays.write_held == held.write_held
        del handles, handle
    assert report_of(daemon).stays.write_held == held.write_held, "the daemon remembers it of sessions that have ended"


async def test_all_who_ask_before_it_begins_share_one_and_the_rest_is_ten_times_as_long() -> None:
    """Nobody gets one that was begun before the question, and asking without end takes a tenth of the time."""
    now, made = [100.0], list[int]()

    def make() -> int:
        made.append(len(made))
        now[0] += 0.001
        if not made[-1]:
            raise ZeroDivisionError
        return made[-1]

    shared: Any = Reports(make, clock=lambda: now[0])  # type: ignore[arg-type]
    for expected in (ZeroDivisionError, int):
        found = await asyncio.gather(*(shared.get() for _ in range(100)), return_exceptions=True)
        assert {type(each) for each in found} == {expected}
        assert shared._due_at == pytest.approx(now[0] + 0.01)
    assert made == [0, 1]
    shared.rest_for(60)
    assert shared._due_at == pytest.approx(now[0] + 0.5), "the rest is bounded"


async def test_page_that_cannot_be_made_is_said_to_be_so() -> None:
    async def fail() -> PageAnswer:
        raise ZeroDivisionError

    page = Page("127.0.0.1", 0, {"/": fail})
    await page.begin()
    assert (await asyncio.to_thread(ask, page.address, "/")).status == 500
    page.close()


async def test_visitor_that_has_said_all_and_closes_its_half_is_answered(watched: str) -> None:
    """As `nc -N` does, while the metrics are still being written; a request in HTTP/1.0 need not name the host."""
    reader, writer = await asyncio.open_connection(*watched.split(":"))
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    writer.write_eof()
    async with asyncio.timeout(SECONDS):
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()
    await writer.wait_closed()


LONG = 32 * MIB  # more than sockets take in


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async def long() -> PageAnswer:
        return PageAnswer(200, b"x" * LONG)

    page = Page("127.0.0.1", 0, {"/": long})
    await page.begin()
    yield page
    page.close()


async def read_all(page: Page) -> bytes:
    reader, writer = await asyncio.open_connection(*page.address.split(":"))
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    async with asyncio.timeout(SECONDS):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """What the page still says until it ends the connection."""
    async with asyncio.timeout(SECONDS):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


async def test_visitor_that_does_not_take_its_answer_is_dropped_and_others_are_served(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "_SECONDS", 0.3)
    slow, writer = await asyncio.open_connection(*page.address.split(":"), limit=4096)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    await slow.readexactly(1)  # it is being answered; a reader takes no more than twice its limit ahead
    monkeypatch.setattr(page_module, "_SECONDS", SECONDS)
    assert len(await read_all(page)) > LONG
    async with asyncio.timeout(SECONDS):
        while len(page._visits):
            await asyncio.sleep(0)
    assert len(await rest_of(slow)) < LONG
    writer.close()


async def test_oldest_visitor_makes_room_for_the_newest(page: Page) -> None:
    silent = [await asyncio.open_connection(*page.address.split(":")) for _ in range(100)]
    assert len(await read_all(page)) > LONG
    assert len(page._visits) < 40
    for reader, writer in silent[:60]:
        assert await rest_of(reader) == b""
        writer.close()
    for _, writer in silent[60:]:
        writer.close()
