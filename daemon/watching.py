"""The daemon's page: metrics, and whether it lives and is ready. For one loop."""

from __future__ import annotations

from collections.abc import Callable

from .page import Page, PageAnswer
from .report import DaemonReport
from .stage import Stage

__all__ = ["Watch"]


class Watch:
    """Answers on the page from `begin` on, until the page is closed. Nothing blocks.

    Args:
        page: bound to its port.
        stage: the daemon's.
    """

    def __init__(self, page: Page, stage: Stage) -> None:
        self._page = page
        self._stage = stage
        self._metrics_text: Callable[[], bytes] | None = None

    @property
    def address(self) -> str:
        """Host and port."""
        return self._page.address

    async def begin(self) -> None:
        """Answer from now on: before the daemon is open the page says that it starts."""
        routes: dict[str, Callable[[], PageAnswer]] = {
            "/metrics": self._metrics,
            "/healthz": lambda: PageAnswer(200, b"alive\n"),
            "/readyz": self._readiness,
        }
        await self._page.serve(routes)

    def show(self, take_report: Callable[[], DaemonReport]) -> None:
        """Make metrics of what `take_report` returns at each scrape, as long as the daemon is open."""
        from .metrics import metrics_text

        self._metrics_text = metrics_text(take_report)

    def _metrics(self) -> PageAnswer:
        from .metrics import CONTENT_TYPE

        if self._metrics_text is None or not self._stage.is_open:
            return self._not_ready()
        return PageAnswer(200, self._metrics_text(), CONTENT_TYPE)

    def _readiness(self) -> PageAnswer:
        if self._stage.is_open and not self._stage.is_ending:
            return PageAnswer(200, b"ready\n")
        return self._not_ready()

    def _not_ready(self) -> PageAnswer:
        return PageAnswer(503, b"ending\n" if self._stage.is_ending else b"starting\n")
