"""Asks a daemon for its report again and again, and shows each answer."""

from __future__ import annotations

import signal
import time
from itertools import count
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

from ..errors import TierStoreError
from .stat import ask_daemon
from .views import decode_report, lost_view, rates_between, top_view

if TYPE_CHECKING:
    from ..daemon.report import DaemonReport


def watch_daemon(
    address: str | None, interval_seconds: float, num_updates: int | None, *, daemon_uid: int | None = None
) -> bool:
    """Show the daemon until Ctrl-C or SIGTERM, or `num_updates` times. Blocks. `address`: None: the usual places.

    On a terminal the updates replace each other on a screen of their own. Elsewhere only the last one is printed. Main
    thread only. Returns whether the last update found a daemon; True after a signal.
    """
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the terminal is restored
    console = Console(highlight=False)
    last: DaemonReport | None = None
    try:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            for number in count(1):
                try:
                    found_at, state = ask_daemon(address, daemon_uid)
                    report = decode_report(state, found_at)
                    view, found = top_view(report, rates_between(last, report)), True
                    last = report
                except TierStoreError as error:
                    view, found = lost_view(str(error), last), False
                live.update(view, refresh=console.is_terminal)
                if number == num_updates:
                    break
                time.sleep(interval_seconds)
        if not console.is_terminal:
            console.line()
    except KeyboardInterrupt:
        return True
    finally:
        signal.signal(signal.SIGTERM, previous)
    return found
