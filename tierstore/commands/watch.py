"""Asks a daemon for its report again and again, and shows each answer."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from rich.console import Console
from rich.live import Live

from ..errors import TierStoreError
from ..plain_text import plain_json
from .stat import ask_daemon
from .views import Rates, decode_report, lost_view, rates_between, top_view

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..daemon.report import DaemonReport


class _Update(NamedTuple):
    """What one request to the daemon has found: an error or a report, as the daemon sent it. `report`: the newest,
    which may be of an earlier update; None: there was none yet."""

    error: str | None
    state: bytes | None
    report: DaemonReport | None
    rates: Rates | None

    def view(self) -> RenderableType:
        if self.error is not None or self.report is None:
            return lost_view(self.error or "", self.report)
        return top_view(self.report, self.rates)

    def line(self) -> str:
        rates = None if self.rates is None else self.rates._asdict()
        report = None if self.state is None else msgspec.Raw(self.state)  # also what this version does not know
        return plain_json(msgspec.json.encode({"error": self.error, "report": report, "rates": rates}).decode())


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
    True after a signal.
    """
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the terminal is restored
    found = False
    try:
        with _printed_lines() if as_json else _screen() as show:
            for number, update in enumerate(_updates(address, daemon_uid), 1):
                show(update)
                found = update.error is None
                if number == num_updates:
                    break
                time.sleep(interval_seconds)
    except KeyboardInterrupt:
        return True
    finally:
        signal.signal(signal.SIGTERM, previous)
    return found


def _updates(address: str | None, daemon_uid: int | None) -> Iterator[_Update]:
    """Ask the daemon, each time for some seconds at most. An error is part of the update, never raised."""
    last: DaemonReport | None = None
    while True:
        try:
            found_at, state = ask_daemon(address, daemon_uid)
            report = decode_report(state, found_at)
        except TierStoreError as error:
            yield _Update(str(error), None, last, None)
        else:
            rates, last = rates_between(last, report), report
            yield _Update(None, state, report, rates)


@contextmanager
def _printed_lines() -> Iterator[Callable[[_Update], None]]:
    yield lambda update: print(update.line(), flush=True)


@contextmanager
def _screen() -> Iterator[Callable[[_Update], None]]:
    console = Console(highlight=False)
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        yield lambda update: live.update(update.view(), refresh=console.is_terminal)
    if not console.is_terminal:
        console.line()
