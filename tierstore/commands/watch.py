"""Looks at a daemon again and again, in front of somebody."""

from __future__ import annotations

import itertools
import signal
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

from ..errors import TierStoreError
from ..sidecar.inspection import inspect_daemon
from .views import Rates, decode_report, lost_view, rates_between, top_view

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..daemon.report import DaemonReport

__all__ = ["watch_daemon"]


def watch_daemon(address: str, interval_seconds: float, num_looks: int | None) -> bool:
    """Show the daemon until Ctrl-C or SIGTERM, or so many times; blocks. Whether the last look found one.

    On a terminal it is shown on a screen of its own; elsewhere the last look is printed at the end. Main thread only.
    """
    console = Console(highlight=False)
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave the terminal as it was
    watch = _Watch(address)
    try:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            for number in itertools.count(1):
                live.update(watch.look(), refresh=console.is_terminal)
                if number == num_looks:
                    break
                time.sleep(interval_seconds)
        if not console.is_terminal:
            console.line()
    except KeyboardInterrupt:
        return True
    finally:
        signal.signal(signal.SIGTERM, previous)
    return watch.found


class _Watch:
    """What was seen last.

    Attributes:
        found: whether the last look found a daemon.
    """

    def __init__(self, address: str) -> None:
        self.found = False
        self._address = address
        self._last: DaemonReport | None = None

    def look(self) -> RenderableType:
        """Ask the daemon; blocks for some seconds at most. Never fails: what went wrong is shown."""
        try:
            report = decode_report(inspect_daemon(self._address), self._address)
        except TierStoreError as error:
            self.found = False
            return lost_view(str(error), self._last)
        rates: Rates | None = rates_between(self._last, report)
        self._last = report
        self.found = True
        return top_view(report, rates)
