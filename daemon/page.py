"""The daemon's page: the live page for people, metrics for Prometheus, and whether the daemon lives and is ready. It is
a small HTTP server on the daemon's loop, so `/healthz` shows whether that loop still runs. For GET and HEAD alone.

Anybody on this host may ask, but no site that is open in a browser there: one whose name points to this host by now
(DNS rebinding) could read the answers. So every request is refused that names the host otherwise than by an address or
as localhost. A request may leave the name out, as probes in HTTP/1.0 do: no browser does. The live page comes with a
policy: the browser runs the script of that file alone, and fetches only its figures.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import logging
import re
import socket
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from typing import NamedTuple, Self

import msgspec

from tierstore.errors import ConfigError
from tierstore.plain_text import plain_json

from .report import DaemonReport, encode_report
from .reporting import Reports
from .tasks import Stage

_log = logging.getLogger("tierstore.daemon")

_MOST_BYTES = 32 * 2**10  # of a request; a browser also sends cookies that other servers of this host have set
_SECONDS = 5.0  # for a request, and for the answer to be taken
_MOST_MAKING_SECONDS = 30.0  # the metrics of thousands of sessions take long
_MOST_VISITS = 32
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Connection": "close",
}


class PageAnswer(NamedTuple):
    """The answer to a request. `policy`: what a browser may do with it, as a Content-Security-Policy."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    policy: str = "default-src 'none'"


Routes = Mapping[str, Callable[[], Awaitable[PageAnswer]]]
"""What answers at each path: called on the loop, and must not block."""


class Page:
    """Listens from `bind` on, answers from `serve` on. Requests in between wait. A request's length and time are
    limited, and so is their number at once: the oldest makes room for the newest. `address`: the real one where port 0
    was asked for."""

    def __init__(self, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._routes: Routes = {}
        self._visits: dict[asyncio.StreamWriter, None] = {}  # the oldest first

    @classmethod
    def bind(cls, host: str, port: int) -> Self:
        """Take the port of an address of the loopback device; 0: any that is free. ConfigError: this process cannot
        have it."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen()  # two sockets may be bound to one port until one of them listens
        except OSError as error:
            listener.close()
            raise ConfigError("metrics", f"{host}:{port}", f"it cannot be listened on: {error.strerror}") from error
        return cls(listener)

    @property
    def num_visits(self) -> int:
        return len(self._visits)

    async def serve(self, routes: Routes) -> None:
        self._routes = routes
        self._server = await asyncio.start_server(self._receive, sock=self._listener, limit=_MOST_BYTES)

    def close(self) -> None:
        """Stop listening, and drop the requests that still wait for an answer; idempotent."""
        if self._server is not None:
            self._server.close()
        self._listener.close()
        for writer in self._visits:
            writer.transport.abort()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._visits[writer] = None
        if len(self._visits) > _MOST_VISITS:
            self._visits.pop(oldest := next(iter(self._visits)))
            oldest.transport.abort()
        try:
            # Silent for too long, gone, or a request that is too long: it gets no answer, or not the rest of one.
            with suppress(TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                method, path, host = _parse(head)
                async with asyncio.timeout(_MOST_MAKING_SECONDS):
                    answer = await self._answer_to(method, path, host)
                async with asyncio.timeout(_SECONDS):
                    writer.transport.set_write_buffer_limits(0)  # to drain is to send all
                    writer.write(_head_of(answer) + (b"" if method == "HEAD" else answer.body))
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        finally:
            self._visits.pop(writer, None)
            writer.transport.abort()

    async def _answer_to(self, method: str, path: str, host: str | None) -> PageAnswer:
        if not method:
            return PageAnswer(400, b"this is no request of HTTP/1\n")
        if method not in ("GET", "HEAD"):
            return PageAnswer(405, b"there is nothing but GET and HEAD\n")
        if host is not None and not _is_address(host):
            return PageAnswer(403, b"name the host by its address or as localhost\n")
        if path not in self._routes:
            return PageAnswer(404, f"there are {', '.join(self._routes)}\n".encode())
        try:
            return await self._routes[path]()
        except Exception:  # noqa: BLE001 - logged, and the visitor is told
            _log.exception("a bug, please report it: %s cannot be answered", path)
            return PageAnswer(500, b"the daemon has failed to make this page; its log says why\n")


def _parse(head: bytes) -> tuple[str, str, str | None]:
    """Method, path and host; the first two are empty if the bytes are no request."""
    first, _, rest = head.decode("latin-1").partition("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return "", "", None
    host = re.search(r"^host:[ \t]*(\S*)[ \t]*$", rest.replace("\r\n", "\n"), re.IGNORECASE | re.MULTILINE)
    return words[0], words[1].partition("?")[0], host[1] if host else None


def _head_of(answer: PageAnswer) -> bytes:
    fields = _HEADERS | {
        "Content-Type": answer.content_type,
        "Content-Length": str(len(answer.body)),
        "Content-Security-Policy": answer.policy,
    }
    lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}", *map(": ".join, fields.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _is_address(host: str) -> bool:
    """Whether a Host field names an address or localhost, and not something that a name server has resolved."""
    name = re.sub(r":\d*$", "", host)
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


_INTERVAL_SECONDS = 1.0
_NUM_MOMENTS = 300
_DIGITS = 6
_MOST_REPORT_BYTES = 256 * 2**10


class _Curves(msgspec.Struct):
    """Figures over time, the oldest first; those of drives have the drive's number behind a dot: `written_bytes.0`.
    `at`: in seconds since the start. `rates`: growth per second since the moment before. `fastest`: the highest since
    the start."""

    at: deque[float]
    rates: defaultdict[str, deque[float]]
    levels: defaultdict[str, deque[float]]
    fastest: dict[str, float]


class Live:
    """The newest report, told once a second at most, and the curves. It is turned into bytes once at most."""

    def __init__(self, num_moments: int = _NUM_MOMENTS) -> None:
        newest: Callable[[], deque[float]] = partial(deque, maxlen=num_moments)
        self._curves = _Curves(newest(), defaultdict(newest), defaultdict(newest), {})
        self._newest: tuple[float, DaemonReport] | None = None  # when, by the wall clock
        self._encoded: bytes | None = None  # of the newest

    def note(self, report: DaemonReport) -> None:
        """Take in a report, `_INTERVAL_SECONDS` after the one before or later: a rate over less would mean little."""
        if self._newest is not None:
            self._note(report, self._newest[1])
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

    def _note(self, report: DaemonReport, before: DaemonReport) -> None:
        curves, counts_before = self._curves, dict(_counts(before))
        seconds = report.uptime_seconds - before.uptime_seconds
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


def _page_with_policy() -> tuple[bytes, str]:
    """The page, and its Content-Security-Policy: nothing is allowed but its own style and script, and its figures."""
    page = files(__package__).joinpath("live.html").read_bytes()
    style, script = (_source_of(page, tag) for tag in ("style", "script"))
    allowed = f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; img-src data:"
    return page, f"{allowed}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def _source_of(page: bytes, tag: str) -> str:
    """What allows the one element of that kind by its content."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"


class Watch:
    """Answers on a page that is bound to its port, from `begin` on, until the page is closed. Nothing blocks."""

    def __init__(self, page: Page, stage: Stage) -> None:
        self.address = page.address
        self._page = page
        self._stage = stage
        self._live = Live()
        body, policy = _page_with_policy()
        self._live_page = PageAnswer(200, body, "text/html; charset=utf-8", policy)
        self._reports: Reports | None = None
        self._noting: asyncio.Task[None] | None = None
        self._text: asyncio.Task[bytes] | None = None  # of the metrics, the newest one
        self._text_of: DaemonReport | None = None

    async def begin(self) -> None:
        paths = {"/": self._root, "/status.json": self._status, "/metrics": self._metrics}
        await self._page.serve({**paths, "/healthz": self._health, "/readyz": self._readiness})

    def show(self, reports: Reports) -> None:
        """Tell what the reports say, as long as the daemon is open: at each scrape, and once a second."""
        self._reports = reports
        self._noting = asyncio.ensure_future(self._note(reports))

    def close(self) -> None:
        """Follow the reports no more; idempotent. The page still answers, until it is closed."""
        if self._noting is not None:
            self._noting.cancel()

    async def _note(self, reports: Reports) -> None:
        while True:
            try:
                self._live.note(await reports.get())  # the first one at once: from there on all that moves shows
            except Exception:  # noqa: BLE001 - logged; the next one may succeed
                _log.exception("a bug, please report it")
            await asyncio.sleep(_INTERVAL_SECONDS)

    async def _root(self) -> PageAnswer:
        return self._live_page

    async def _health(self) -> PageAnswer:
        return PageAnswer(200, b"alive\n")

    async def _status(self) -> PageAnswer:
        status = self._live.status()
        if status is None or not self._stage.is_open:
            return self._not_ready()
        return PageAnswer(200, status, "application/json")

    async def _metrics(self) -> PageAnswer:
        from .metrics import CONTENT_TYPE

        if self._reports is None or not self._stage.is_open:
            return self._not_ready()
        report = await self._reports.get()
        if self._text is None or (self._text.done() and self._text_of is not report):
            self._text_of, self._text = report, asyncio.ensure_future(self._write(report, self._reports))
        return PageAnswer(200, await asyncio.shield(self._text), CONTENT_TYPE)

    async def _write(self, report: DaemonReport, reports: Reports) -> bytes:
        from .metrics import metrics_text

        began_at = time.perf_counter()
        text = await asyncio.to_thread(metrics_text, report)  # with thousands of sessions it takes long
        reports.rest_for(time.perf_counter() - began_at)
        return text

    async def _readiness(self) -> PageAnswer:
        if self._stage.is_open and not self._stage.is_ending:
            return PageAnswer(200, b"ready\n")
        return self._not_ready()

    def _not_ready(self) -> PageAnswer:
        return PageAnswer(503, b"ending\n" if self._stage.is_ending else b"starting\n")
