"""What the daemon's page says, while there is one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from .page import Answer, Page
from .report import report_of

if TYPE_CHECKING:
    from .server import Daemon

__all__ = ["watched"]


@asynccontextmanager
async def watched(daemon: Daemon) -> AsyncIterator[None]:
    """While this lasts, the page that the daemon's settings ask for answers, if they ask for one.

    Raises:
        ConfigError: its port is taken.
    """
    if daemon.settings.metrics is None:
        yield
        return
    from .metrics import CONTENT_TYPE, metrics_text

    page = Page.bind(*daemon.settings.metrics)
    text = metrics_text(lambda: report_of(daemon))
    routes: dict[str, Callable[[], Answer]] = {
        "/metrics": lambda: Answer(200, text(), CONTENT_TYPE) if daemon.is_open else _not_ready(daemon),
        "/healthz": lambda: Answer(200, b"alive\n"),
        "/readyz": lambda: Answer(200, b"ready\n") if daemon.is_open and not daemon.is_ending else _not_ready(daemon),
    }
    try:
        await page.serve(routes)
        daemon.metrics_address = page.address
        yield
    finally:
        page.close()


def _not_ready(daemon: Daemon) -> Answer:
    return Answer(503, b"ending\n" if daemon.is_ending else b"starting\n")
