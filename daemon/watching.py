"""What the daemon's page tells: the live page for people, metrics, and whether it lives and is ready. For one loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from .live import INTERVAL_SECONDS, Live, page_with_policy
from .page import Page, PageAnswer, Route
from .report import DaemonReport
from .sparing import Sparing
from .stage import Stage

__all__ = ["Watch"]

_RESTS = 50
"""With thousands of sessions a report takes long: the next one is taken after fifty times as long."""


class Watch:
    """Answers on the page from `begin` on, until the page is closed. Nothing blocks.

    Args:
        page: bound to its port.
        stage: the daemon's.
    """

    def __init__(self, page: Page, stage: Stage) -> None:
        self._page = page
        self._stage = stage
        self._live: Live | None = None
        self._live_page = PageAnswer(200, *_of_live_page())
        self._metrics_text: Sparing | None = None

    @property
    def address(self) -> str:
        """Host and port."""
        return self._page.address

    async def begin(self) -> None:
        """Answer from now on: before the daemon is open the page says that it starts."""
        routes = {
            "/": Route(lambda: self._live_page, is_for_browsers=True),
            "/status.json": Route(self._status, is_for_browsers=True),
            "/metrics": Route(self._metrics),
            "/healthz": Route(lambda: PageAnswer(200, b"alive\n")),
            "/readyz": Route(self._readiness),
        }
        await self._page.serve(routes)

    def show(self, take_report: Callable[[], DaemonReport]) -> None:
        """Tell what `take_report` returns, as long as the daemon is open: at each scrape, and once a second."""
        from .metrics import metrics_text

        self._metrics_text = Sparing(metrics_text(take_report))
        self._live = Live(take_report)
        self._live.note()  # from here on all that moves shows in the curves
        self._note()

    def _note(self) -> None:
        if self._stage.is_ending and not self._stage.is_open:
            return
        began = time.perf_counter()
        try:
            if self._live is not None and self._stage.is_open:
                self._live.note()
        finally:
            seconds = max(INTERVAL_SECONDS, _RESTS * (time.perf_counter() - began))
            asyncio.get_running_loop().call_later(seconds, self._note)

    def _status(self) -> PageAnswer:
        if self._live is None or not self._stage.is_open:
            return self._not_ready()
        return PageAnswer(200, self._live.status(), "application/json")

    def _metrics(self) -> PageAnswer:
        from .metrics import CONTENT_TYPE

        if self._metrics_text is None or not self._stage.is_open:
            return self._not_ready()
        return PageAnswer(200, self._metrics_text.text(), CONTENT_TYPE)

    def _readiness(self) -> PageAnswer:
        if self._stage.is_open and not self._stage.is_ending:
            return PageAnswer(200, b"ready\n")
        return self._not_ready()

    def _not_ready(self) -> PageAnswer:
        return PageAnswer(503, b"ending\n" if self._stage.is_ending else b"starting\n")


def _of_live_page() -> tuple[bytes, str, str]:
    """Body, content type and policy."""
    page, policy = page_with_policy()
    return page, "text/html; charset=utf-8", policy
