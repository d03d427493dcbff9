"""The live page: a file for browsers, and the figures that it shows.

It is told a report once a second at most, whoever watches, and turns it into bytes once at most. So it costs the
daemon's loop the same whether nobody asks or everybody does. The page comes with a policy: the browser runs the script
of that file alone, and fetches nothing but the figures.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Iterator
from importlib.resources import files
from typing import NamedTuple

import msgspec

from tierstore.plain_text import plain_json

from .history import Curves, History
from .report import DaemonReport, encode_report

__all__ = ["INTERVAL_SECONDS", "Live", "page_with_policy"]

INTERVAL_SECONDS = 1.0
_LEAST_SECONDS = 0.5  # a rate over a shorter time would be taken for the fastest by chance
_NUM_MOMENTS = 300
_MOST_REPORT_BYTES = 256 * 2**10


class _Dated(NamedTuple):
    unix_seconds: float
    report: DaemonReport


class _Status(msgspec.Struct, frozen=True):
    """What the page fetches.

    Attributes:
        unix_seconds: when the report was taken.
        report: as `tierstore stat --json` prints it; with very many sessions only some of them.
        curves: of the last minutes; times are seconds since the daemon was started. Counts and levels of drives have
            the drive's number behind a dot: `written_bytes.0`.
    """

    unix_seconds: float
    report: msgspec.Raw
    curves: Curves


class Live:
    """The newest report and the curves. For one loop; nothing blocks."""

    def __init__(self) -> None:
        self._history = History(_NUM_MOMENTS)
        self._newest: _Dated | None = None
        self._encoded: bytes | None = None  # of the newest

    def note(self, report: DaemonReport) -> None:
        """Take in a report. To be called every `INTERVAL_SECONDS`, or less often."""
        before = self._newest
        if before is not None and report.uptime_seconds - before.report.uptime_seconds < _LEAST_SECONDS:
            return
        self._history.note(report.uptime_seconds, dict(_counts(report)), dict(_levels(report)))
        self._newest, self._encoded = _Dated(time.time(), report), None

    def status(self) -> bytes | None:
        """The newest report and the curves, as JSON that is safe to look at; None: there is no report yet."""
        if self._newest is None:
            return None
        if self._encoded is None:
            raw = msgspec.Raw(encode_report(self._newest.report, _MOST_REPORT_BYTES))
            status = _Status(round(self._newest.unix_seconds, 3), raw, self._history.curves())
            self._encoded = plain_json(msgspec.json.encode(status).decode()).encode()
        return self._encoded


def _counts(report: DaemonReport) -> Iterator[tuple[str, float]]:
    totals = report.totals
    yield "spilled_bytes", totals.spilled_bytes
    yield "restored_bytes", totals.restored_bytes
    yield from msgspec.structs.asdict(report.stays).items()
    for number, drive in enumerate(report.drives or ()):
        yield f"written_bytes.{number}", drive.written_bytes
        yield f"read_bytes.{number}", drive.read_bytes


def _levels(report: DaemonReport) -> Iterator[tuple[str, float]]:
    for number, drive in enumerate(report.drives or ()):
        yield f"disk_bytes.{number}", drive.disk_bytes


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
