"""A small HTTP server for those who watch the daemon: probes, Prometheus, browsers. It runs on the daemon's loop.

So `/healthz` shows whether that loop still runs: if it stands still, the probe times out. A request's length and time
are limited, and so is the number of requests at once: the oldest makes room for the newest, so silent visitors do not
keep others out. Everything is only read, so there is nothing but GET and HEAD.

Anybody on this host may ask, but no site that is open in a browser there. The browser does not let another site read
answers, unless that site's name points to this host by then (DNS rebinding). So routes for browsers are refused if the
request names the host otherwise than by an address or as localhost.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Callable, Mapping
from typing import NamedTuple, Self, cast

from tierstore.errors import ConfigError

__all__ = ["Page", "PageAnswer", "Route"]

_MOST_BYTES = 32 * 2**10  # of a request; a browser also sends cookies that other servers of this host have set
_SECONDS = 5.0  # for all of an exchange
_MOST_EXCHANGES = 32
_REASONS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
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


class Route(NamedTuple):
    """What is found at a path.

    Attributes:
        answer: called on the loop; must not block.
        is_for_browsers: the request must name this host by an address, or as localhost.
    """

    answer: Callable[[], PageAnswer]
    is_for_browsers: bool = False


class _Request(NamedTuple):
    """The part of a request that matters; both `method` and `path` are empty if the bytes are no request."""

    method: str
    path: str
    host: str


Routes = Mapping[str, Route]


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
        self._timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the request."""
        self._transport = cast(asyncio.Transport, transport)
        self._timer = asyncio.get_running_loop().call_later(_SECONDS, self.drop)
        self._exchanges[self] = None
        if len(self._exchanges) > _MOST_EXCHANGES:
            oldest = next(iter(self._exchanges))
            del self._exchanges[oldest]
            oldest.drop()

    def data_received(self, data: bytes) -> None:
        """Answer when the request's head is there in full; a body is ignored."""
        if self._transport.is_closing():
            return
        self._request += data
        if b"\r\n\r\n" in self._request:
            self._answer(self._parse())
        elif len(self._request) > _MOST_BYTES:
            self.drop()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is over: stop its timer and forget it."""
        self._timer.cancel()
        self._exchanges.pop(self, None)

    def drop(self) -> None:
        """End the connection without an answer, or without the rest of one."""
        self._transport.abort()

    def _parse(self) -> _Request:
        first, _, rest = self._request.partition(b"\r\n\r\n")[0].decode("latin-1").partition("\r\n")
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _Request("", "", "")
        host = re.search(r"^host:[ \t]*(\S*)[ \t]*$", rest.replace("\r\n", "\n"), re.IGNORECASE | re.MULTILINE)
        return _Request(words[0], words[1].partition("?")[0], host[1] if host else "")

    def _answer(self, request: _Request) -> None:
        answer = self._answer_to(request)
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

    def _answer_to(self, request: _Request) -> PageAnswer:
        if not request.method:
            return PageAnswer(400, b"this is no request of HTTP/1\n")
        if request.method not in ("GET", "HEAD"):
            return PageAnswer(405, b"there is nothing but GET and HEAD\n")
        route = self._routes.get(request.path)
        if route is None:
            return PageAnswer(404, f"there are {', '.join(self._routes)}\n".encode())
        if route.is_for_browsers and not _is_address(request.host):
            return PageAnswer(403, b"name the host by its address or as localhost\n")
        return route.answer()


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
