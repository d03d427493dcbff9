"""The daemon's page: the live page for people, metrics for Prometheus, and whether the daemon lives and is ready. It is
a small HTTP server on the daemon's loop, so `/healthz` shows whether that loop still runs. For GET and HEAD alone.

Anybody on this host may ask, but no site that is open in a browser there: one whose name points to this host by now
(DNS rebinding) could read the answers. So every request is refused that names the host otherwise than by an address or
as localhost. A request may leave the name out, as probes in HTTP/1.0 do: no browser does. The live page comes with a
policy: the browser runs the script of that file alone, and fetches only its figures."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import logging
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from importlib.resources import files
from typing import NamedTuple

from tierstore.errors import ConfigError

from .report import Reports, TakenReport
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


Routes = Mapping[str, PageAnswer | Callable[[], Awaitable[PageAnswer]]]
"""The answer at each path, or what makes it: called on the loop, and must not block."""


class Page:
    """Has its port from the beginning, answers from `begin` on; requests in between wait. A request's length and time
    are limited, and so is their number at once: the oldest makes room for the newest. `port`: of an address of the
    loopback device; 0: any that is free. ConfigError: this process cannot have it. `address`: the real one."""

    def __init__(self, host: str, port: int, routes: Routes) -> None:
        self._routes = routes
        self._server: asyncio.Server | None = None
        self._visits: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((host, port))
            self._listener.listen()  # two sockets may be bound to one port until one of them listens
        except OSError as error:
            self._listener.close()
            raise ConfigError("metrics", f"{host}:{port}", f"it cannot be listened on: {error.strerror}") from error
        real_port = self._listener.getsockname()[1]
        self.address = f"[{host}]:{real_port}" if ":" in host else f"{host}:{real_port}"

    async def begin(self) -> None:
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
            route = self._routes[path]
            return route if isinstance(route, PageAnswer) else await route()
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
        address = ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return getattr(address, "scope_id", None) is None  # what follows a "%" may be anything


def _page_with_policy() -> tuple[bytes, str]:
    """The page, and its Content-Security-Policy: nothing is allowed but its own style and script, and its figures."""
    page, allowed = files(__package__).joinpath("live.html").read_bytes(), "default-src 'none'"
    for tag in ("style", "script"):  # the one element of that kind, by its content
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), page, re.DOTALL)
        allowed += f"; {tag}-src 'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
    rest = "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return page, f"{allowed}; {rest}"


class Watch(Page):
    """The page of the daemon. `reports`: set before the daemon is open. Nothing blocks."""

    reports: Reports

    def __init__(self, stage: Stage, host: str, port: int) -> None:
        body, policy = _page_with_policy()
        routes: Routes = {
            "/": PageAnswer(200, body, "text/html; charset=utf-8", policy),
            "/status.json": self._status,
            "/metrics": self._metrics,
            "/healthz": PageAnswer(200, b"alive\n"),
            "/readyz": self._readiness,
        }
        super().__init__(host, port, routes)
        self._stage = stage
        self._text: asyncio.Task[bytes] | None = None  # of the metrics, the newest one
        self._text_of: TakenReport | None = None

    async def _status(self) -> PageAnswer:
        if not self._stage.is_open:
            return self._not_ready()
        taken, began_at = await self.reports.get(), time.perf_counter()
        answer = PageAnswer(200, taken.shown, "application/json")
        self.reports.rest_for(time.perf_counter() - began_at)
        return answer

    async def _metrics(self) -> PageAnswer:
        from .metrics import CONTENT_TYPE

        if not self._stage.is_open:
            return self._not_ready()
        taken = await self.reports.get()
        if self._text is None or (self._text.done() and self._text_of is not taken):
            self._text_of, self._text = taken, asyncio.ensure_future(self._write(taken))
        return PageAnswer(200, await asyncio.shield(self._text), CONTENT_TYPE)

    async def _write(self, taken: TakenReport) -> bytes:
        from .metrics import metrics_text

        began_at = time.perf_counter()
        text = await asyncio.to_thread(metrics_text, taken.report)  # with thousands of sessions it takes long
        self.reports.rest_for(time.perf_counter() - began_at)
        return text

    async def _readiness(self) -> PageAnswer:
        if self._stage.is_open and not self._stage.is_ending:
            return PageAnswer(200, b"ready\n")
        return self._not_ready()

    def _not_ready(self) -> PageAnswer:
        return PageAnswer(503, b"ending\n" if self._stage.is_ending else b"starting\n")
