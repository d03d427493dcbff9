"""What the daemon's page says, while there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .page import Answer, Page
from .report import report_of

if TYPE_CHECKING:
    from .server import Daemon

__all__ = ["answer_for"]


async def answer_for(daemon: Daemon, page: Page) -> None:
    """Have the page answer from now on, until it is closed. What is not open yet says so."""
    from .metrics import CONTENT_TYPE, metrics_text

    text = metrics_text(lambda: report_of(daemon))
    routes: dict[str, Callable[[], Answer]] = {
        "/metrics": lambda: Answer(200, text(), CONTENT_TYPE) if daemon.is_open else _not_ready(daemon),
        "/healthz": lambda: Answer(200, b"alive\n"),
        "/readyz": lambda: Answer(200, b"ready\n") if daemon.is_open and not daemon.is_ending else _not_ready(daemon),
    }
    await page.serve(routes)
    daemon.metrics_address = page.address


def _not_ready(daemon: Daemon) -> Answer:
    return Answer(503, b"ending\n" if daemon.is_ending else b"starting\n")
