"""What the daemon's page tells: the live page for people, metrics, and whether it lives and is ready. For one loop. The
live page comes with a policy: the browser runs the script of that file alone, and fetches only its figures."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files

import msgspec

from tierstore.plain_text import plain_json

from .page import Page, PageAnswer
from .report import DaemonReport, encode_report
from .reporting import Reports
from .tasks import Stage

_log = logging.getLogger("tierstore.daemon")

_INTERVAL_SECONDS = 1.0
_LEAST_SECONDS = 0.5  # a rate over a shorter time would be taken for the fastest by chance
_NUM_MOMENTS = 300
_DIGITS = 6
_MOST_REPORT_BYTES = 256 * 2**10


class _Curves(msgspec.Struct):
    """Figures over time, the oldest first; those of drives have the drive's number behind a dot: `written_bytes.0`.
    `at`: in seconds since the start. `rates`: growth per second since the moment before. `fastest`: the highest since
    the start."""

    at: deque[float]
    rates: defaultdict[str, deque[float]]
    levels: defaultdict[str, deque[float]]
    fastest: dict[str, float]


class Live:
    """The newest report, told once a second at most, and the curves. It is turned into bytes once at most."""

    def __init__(self, num_moments: int = _NUM_MOMENTS) -> None:
        newest: Callable[[], deque[float]] = partial(deque, maxlen=num_moments)
        self._curves = _Curves(newest(), defaultdict(newest), defaultdict(newest), {})
        self._newest: tuple[float, DaemonReport] | None = None  # when, by the wall clock
        self._encoded: bytes | None = None  # of the newest

    def note(self, report: DaemonReport) -> None:
        """Take in a report. To be called every `_INTERVAL_SECONDS`, or less often."""
        if self._newest is not None:
            seconds = report.uptime_seconds - self._newest[1].uptime_seconds
            if seconds < _LEAST_SECONDS:
                return
            self._note(report, dict(_counts(self._newest[1])), seconds)
        self._newest, self._encoded = (round(time.time(), 3), report), None

    def status(self) -> bytes | None:
        """The newest report and the curves, as JSON that is safe to look at; None: there is no report yet."""
        if self._newest is None:
            return None
        if self._encoded is None:
            at, report = self._newest
            raw = msgspec.Raw(encode_report(report, _MOST_REPORT_BYTES))
            status = {"unix_seconds": at, "report": raw, "curves": self._curves}
            self._encoded = plain_json(msgspec.json.encode(status, enc_hook=list).decode()).encode()
        return self._encoded

    def _note(self, report: DaemonReport, counts_before: dict[str, float], seconds: float) -> None:
        curves = self._curves
        curves.at.append(report.uptime_seconds)
        for name, count in _counts(report):
            rate = round((count - counts_before[name]) / seconds, _DIGITS)
            curves.rates[name].append(rate)
            curves.fastest[name] = max(rate, curves.fastest.get(name, 0.0))
        for number, drive in enumerate(report.drives or ()):
            curves.levels[f"disk_bytes.{number}"].append(drive.disk_bytes)


def _counts(report: DaemonReport) -> Iterator[tuple[str, float]]:
    yield "spilled_bytes", report.totals.spilled_bytes
    yield "restored_bytes", report.totals.restored_bytes
    yield from msgspec.structs.asdict(report.stays).items()
    for number, drive in enumerate(report.drives or ()):
        yield f"written_bytes.{number}", drive.written_bytes
        yield f"read_bytes.{number}", drive.read_bytes


def _page_with_policy() -> tuple[bytes, str]:
    """The page, and its Content-Security-Policy: nothing is allowed but its own style and script, and its figures."""
    page = files(__package__).joinpath("live.html").read_bytes()
    style, script = (_source_of(page, tag) for tag in ("style", "script"))
    allowed = f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; img-src data:"
    return page, f"{allowed}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def _source_of(page: bytes, tag: str) -> str:
    """What allows the one element of that kind by its content."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"


class Watch:
    """Answers on a page that is bound to its port, from `begin` on, until the page is closed. Nothing blocks."""

    def __init__(self, page: Page, stage: Stage) -> None:
        self.address = page.address
        self._page = page
        self._stage = stage
        self._live = Live()
        body, policy = _page_with_policy()
        self._live_page = PageAnswer(200, body, "text/html; charset=utf-8", policy)
        self._reports: Reports | None = None
        self._noting: asyncio.Task[None] | None = None
        self._text: asyncio.Task[bytes] | None = None  # of the metrics, the newest one
        self._text_of: DaemonReport | None = None

    async def begin(self) -> None:
        paths = {"/": self._root, "/status.json": self._status, "/metrics": self._metrics}
        await self._page.serve({**paths, "/healthz": self._health, "/readyz": self._readiness})

    def show(self, reports: Reports) -> None:
        """Tell what the reports say, as long as the daemon is open: at each scrape, and once a second."""
        self._reports = reports
        self._noting = asyncio.ensure_future(self._note(reports))

    def close(self) -> None:
        """Follow the reports no more; idempotent. The page still answers, until it is closed."""
        if self._noting is not None:
            self._noting.cancel()

    async def _note(self, reports: Reports) -> None:
        while True:
            try:
                self._live.note(await reports.get())  # the first one at once: from there on all that moves shows
            except Exception:  # noqa: BLE001 - logged; the next one may succeed
                _log.exception("a bug, please report it")
            await asyncio.sleep(_INTERVAL_SECONDS)

    async def _root(self) -> PageAnswer:
        return self._live_page

    async def _health(self) -> PageAnswer:
        return PageAnswer(200, b"alive\n")

    async def _status(self) -> PageAnswer:
        status = self._live.status()
        if status is None or not self._stage.is_open:
            return self._not_ready()
        return PageAnswer(200, status, "application/json")

    async def _metrics(self) -> PageAnswer:
        from .metrics import CONTENT_TYPE

        if self._reports is None or not self._stage.is_open:
            return self._not_ready()
        report = await self._reports.get()
        if self._text is None or (self._text.done() and self._text_of is not report):
            self._text_of, self._text = report, asyncio.ensure_future(self._write(report, self._reports))
        return PageAnswer(200, await asyncio.shield(self._text), CONTENT_TYPE)

    async def _write(self, report: DaemonReport, reports: Reports) -> bytes:
        from .metrics import metrics_text

        began_at = time.perf_counter()
        text = await asyncio.to_thread(metrics_text, report)  # with thousands of sessions it takes long
        reports.rest_for(time.perf_counter() - began_at)
        return text

    async def _readiness(self) -> PageAnswer:
        if self._stage.is_open and not self._stage.is_ending:
            return PageAnswer(200, b"ready\n")
        return self._not_ready()

    def _not_ready(self) -> PageAnswer:
        return PageAnswer(503, b"ending\n" if self._stage.is_ending else b"starting\n")
