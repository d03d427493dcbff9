"""The live page: a file for browsers, and the figures that it shows: the newest report, and curves of the last minutes.

It is told a report once a second at most, whoever watches, and turns it into bytes once at most. The page comes with a
policy: the browser runs the script of that file alone, and fetches nothing but the figures.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files

import msgspec

from tierstore.plain_text import plain_json

from .report import DaemonReport, encode_report

__all__ = ["INTERVAL_SECONDS", "Live", "page_with_policy"]

INTERVAL_SECONDS = 1.0
_LEAST_SECONDS = 0.5  # a rate over a shorter time would be taken for the fastest by chance
_NUM_MOMENTS = 300
_DIGITS = 6
_MOST_REPORT_BYTES = 256 * 2**10


class _Curves(msgspec.Struct):
    """Figures over time, the oldest first. Those of drives have the drive's number behind a dot: `written_bytes.0`.

    `at`: in seconds since the daemon was started. `rates`: growth of each count per second, since the moment before.
    `levels`: what goes up and down. `fastest`: the highest rate of each count since the daemon was started.
    """

    at: deque[float]
    rates: defaultdict[str, deque[float]]
    levels: defaultdict[str, deque[float]]
    fastest: dict[str, float]


class Live:
    """The newest report and the curves. For one loop; nothing blocks."""

    def __init__(self, num_moments: int = _NUM_MOMENTS) -> None:
        newest: Callable[[], deque[float]] = partial(deque, maxlen=num_moments)
        self._curves = _Curves(newest(), defaultdict(newest), defaultdict(newest), {})
        self._newest: tuple[float, DaemonReport] | None = None  # when, by the wall clock
        self._encoded: bytes | None = None  # of the newest

    def note(self, report: DaemonReport) -> None:
        """Take in a report. To be called every `INTERVAL_SECONDS`, or less often."""
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


def page_with_policy() -> tuple[bytes, str]:
    """The page, and its Content-Security-Policy: nothing is allowed but its own style and script, and its figures."""
    page = files(__package__).joinpath("live.html").read_bytes()
    style, script = (_source_of(page, tag) for tag in ("style", "script"))
    rules = {
        "default-src": "'none'",
        "style-src": style,
        "script-src": script,
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return page, "; ".join(f"{rule} {allowed}" for rule, allowed in rules.items())


def _source_of(page: bytes, tag: str) -> str:
    """What allows the one element of that kind by its content."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
