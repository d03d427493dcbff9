"""A small HTTP server for those who watch the daemon: probes, Prometheus, browsers. It runs on the daemon's loop.

So `/healthz` shows whether that loop still runs: if it stands still, the probe times out. A request's length and time
are limited, and so is the number of requests at once: the oldest makes room for the newest, so silent visitors do not
keep others out. Everything is only read, so there is nothing but GET and HEAD.

Anybody on this host may ask, but no site that is open in a browser there. The browser does not let another site read
answers, unless that site's name points to this host by then (DNS rebinding). So every request is refused that names the
host otherwise than by an address or as localhost; no exception is made for probes. A request may leave the name out,
as probes in HTTP/1.0 do: no browser does.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, Self, cast

from tierstore.errors import ConfigError

__all__ = ["Page", "PageAnswer", "Routes"]

_log = logging.getLogger("tierstore.daemon")

_MOST_BYTES = 32 * 2**10  # of a request; a browser also sends cookies that other servers of this host have set
_SECONDS = 5.0  # for a request, and for the answer to be taken
_MOST_MAKING_SECONDS = 30.0  # the metrics of thousands of sessions take long
_MOST_EXCHANGES = 32
_REASONS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class PageAnswer(NamedTuple):
    """The answer to a request. `policy`: what a browser may do with it, as a Content-Security-Policy."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    policy: str = "default-src 'none'"


Routes = Mapping[str, Callable[[], PageAnswer | Awaitable[PageAnswer]]]
"""What answers at each path: called on the loop, and must not block."""


class _Request(NamedTuple):
    """The part of a request that matters; `method` and `path` are empty if the bytes are no request."""

    method: str
    path: str
    host: str | None


class Page:
    """Listens from `bind` on, answers from `serve` on. Requests in between wait.

    Attributes:
        address: host and port, the real one where 0 was asked for.
    """

    def __init__(self, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._exchanges: dict[_Exchange, None] = {}  # the oldest first

    @classmethod
    def bind(cls, host: str, port: int) -> Self:
        """Take the port.

        Args:
            host: an address of the loopback device.
            port: 0: any that is free.

        Raises:
            ConfigError: it is taken, or this process may not take it.
        """
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
    def num_exchanges(self) -> int:
        """Connections that wait for an answer, or for the rest of one."""
        return len(self._exchanges)

    async def serve(self, routes: Routes) -> None:
        """Answer from now on.

        Args:
            routes: by path.
        """
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Exchange(routes, self._exchanges), sock=self._listener)

    def close(self) -> None:
        """Stop listening, and drop the requests that still wait for an answer; idempotent."""
        if self._server is not None:
            self._server.close()
        self._listener.close()
        for exchange in list(self._exchanges):
            exchange.drop()


class _Exchange(asyncio.Protocol):
    """One request and its answer."""

    def __init__(self, routes: Routes, exchanges: dict[_Exchange, None]) -> None:
        self._routes = routes
        self._exchanges = exchanges
        self._request = bytearray()
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: asyncio.Task[None] | None = None  # for the answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the request."""
        self._transport = cast(asyncio.Transport, transport)
        self._set_timer(_SECONDS)
        self._exchanges[self] = None
        if len(self._exchanges) > _MOST_EXCHANGES:
            oldest = next(iter(self._exchanges))
            del self._exchanges[oldest]
            oldest.drop()

    def data_received(self, data: bytes) -> None:
        """Answer when the request's head is there in full; a body is ignored."""
        if self._transport.is_closing() or self._waiting is not None:
            return
        self._request += data
        if b"\r\n\r\n" in self._request:
            request = self._parse()
            answer = self._answer_to(request)
            if isinstance(answer, PageAnswer):
                self._say(request, answer)
            else:
                self._set_timer(_MOST_MAKING_SECONDS)
                self._waiting = asyncio.ensure_future(self._say_later(request, answer))
        elif len(self._request) > _MOST_BYTES:
            self.drop()

    def eof_received(self) -> bool:
        """The visitor says no more. Stay open if there is an answer to wait for."""
        return self._waiting is not None

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is over: stop its timer and forget it."""
        self._set_timer(None)
        if self._waiting is not None:
            self._waiting.cancel()
        self._exchanges.pop(self, None)

    def _set_timer(self, seconds: float | None) -> None:
        """Drop the exchange after this time instead of when it was to be dropped. None: never."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self.drop)

    def drop(self) -> None:
        """End the connection without an answer, or without the rest of one."""
        self._transport.abort()

    def _parse(self) -> _Request:
        first, _, rest = self._request.partition(b"\r\n\r\n")[0].decode("latin-1").partition("\r\n")
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _Request("", "", None)
        host = re.search(r"^host:[ \t]*(\S*)[ \t]*$", rest.replace("\r\n", "\n"), re.IGNORECASE | re.MULTILINE)
        return _Request(words[0], words[1].partition("?")[0], host[1] if host else None)

    async def _say_later(self, request: _Request, pending: Awaitable[PageAnswer]) -> None:
        try:
            answer = await pending
        except Exception:  # noqa: BLE001 - logged, and the visitor is told
            _log.exception("a bug, please report it: %s cannot be answered", request.path)
            answer = PageAnswer(500, b"the daemon has failed to make this page; its log says why\n")
        self._set_timer(_SECONDS)
        self._say(request, answer)

    def _say(self, request: _Request, answer: PageAnswer) -> None:
        fields = {
            "Content-Type": answer.content_type,
            "Content-Length": str(len(answer.body)),
            "Content-Security-Policy": answer.policy,
            **_HEADERS,
            "Connection": "close",
        }
        lines = [
            f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}",
            *(f"{name}: {each}" for name, each in fields.items()),
        ]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        self._transport.write(head if request.method == "HEAD" else head + answer.body)
        self._transport.close()

    def _answer_to(self, request: _Request) -> PageAnswer | Awaitable[PageAnswer]:
        if not request.method:
            return PageAnswer(400, b"this is no request of HTTP/1\n")
        if request.method not in ("GET", "HEAD"):
            return PageAnswer(405, b"there is nothing but GET and HEAD\n")
        if request.host is not None and not _is_address(request.host):
            return PageAnswer(403, b"name the host by its address or as localhost\n")
        route = self._routes.get(request.path)
        if route is None:
            return PageAnswer(404, f"there are {', '.join(self._routes)}\n".encode())
        return route()


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
