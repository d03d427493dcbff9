"""What the daemon's page tells: the live page for people, metrics, and whether it lives and is ready. For one loop."""

from __future__ import annotations

import asyncio
import logging
import time

from .live import INTERVAL_SECONDS, Live, page_with_policy
from .page import Page, PageAnswer
from .report import DaemonReport
from .reporting import Reports
from .tasks import Stage

__all__ = ["Watch"]

_log = logging.getLogger("tierstore.daemon")


class Watch:
    """Answers on a page that is bound to its port, from `begin` on, until the page is closed. Nothing blocks."""

    def __init__(self, page: Page, stage: Stage) -> None:
        self.address = page.address
        self._page = page
        self._stage = stage
        self._live = Live()
        body, policy = page_with_policy()
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
            await asyncio.sleep(INTERVAL_SECONDS)

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
