"""Asks a daemon for its report again and again, and shows each answer."""

from __future__ import annotations

import signal
import time
from contextlib import nullcontext
from itertools import count
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.live import Live

from ..errors import TierStoreError
from ..plain_text import plain_json
from .stat import ask_daemon
from .views import Rates, decode_report, lost_view, rates_between, top_view

if TYPE_CHECKING:
    from ..daemon.report import DaemonReport


def watch_daemon(
    address: str | None,
    interval_seconds: float,
    num_updates: int | None,
    *,
    daemon_uid: int | None = None,
    as_json: bool = False,
) -> bool:
    """Show the daemon until Ctrl-C or SIGTERM, or `num_updates` times. Blocks. `address`: None: the usual places.

    On a terminal the updates replace each other on a screen of their own. Elsewhere only the last one is printed. As
    JSON each is a line of its own, written at once. Main thread only. Returns whether the last update found a daemon;
    True after a signal."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the terminal is restored
    console = Console(highlight=False)
    last: DaemonReport | None = None
    found = True
    try:
        live = Live(console=console, screen=console.is_terminal, auto_refresh=False)
        with nullcontext() if as_json else live:
            for number in count(1):
                error = state = rates = None
                try:
                    found_at, state = ask_daemon(address, daemon_uid)
                    report = decode_report(state, found_at)
                    rates, last = rates_between(last, report), report
                except TierStoreError as failure:
                    error = str(failure)
                if as_json:
                    _print_line(error, state, rates)
                elif error is not None or last is None:
                    live.update(lost_view(error or "", last), refresh=console.is_terminal)
                else:
                    live.update(top_view(last, rates), refresh=console.is_terminal)
                if number == num_updates:
                    found = error is None
                    break
                time.sleep(interval_seconds)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, previous)
    if not (console.is_terminal or as_json):
        console.line()
    return found


def _print_line(error: str | None, state: bytes | None, rates: Rates | None) -> None:
    report = None if state is None else msgspec.Raw(state)  # also what this version does not know
    line = {"error": error, "report": report, "rates": None if rates is None else rates._asdict()}
    print(plain_json(msgspec.json.encode(line).decode()), flush=True)
