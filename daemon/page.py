"""A small HTTP server for those who watch the daemon: `/metrics`, `/healthz`, `/readyz`. It runs on the daemon's loop.

So `/healthz` shows whether that loop still runs: if it stands still, the probe times out. A request's length and time
are limited, and so is the number of requests at once.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import NamedTuple, Self, cast

from tierstore.errors import ConfigError

__all__ = ["Page", "PageAnswer"]

_MOST_BYTES = 8192  # of a request
_SECONDS = 5.0  # for all of an exchange
_MOST_EXCHANGES = 32
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class PageAnswer(NamedTuple):
    """The answer to a request."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Routes = Mapping[str, Callable[[], PageAnswer]]


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
        self._exchanges: set[_Exchange] = set()

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

    async def serve(self, routes: Routes) -> None:
        """Answer from now on.

        Args:
            routes: functions by path; each is called on the loop and must not block.
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

    def __init__(self, routes: Routes, exchanges: set[_Exchange]) -> None:
        self._routes = routes
        self._exchanges = exchanges
        self._request = bytearray()
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the request."""
        self._transport = cast(asyncio.Transport, transport)
        self._timer = asyncio.get_running_loop().call_later(_SECONDS, self.drop)
        self._exchanges.add(self)
        if len(self._exchanges) > _MOST_EXCHANGES:
            self.drop()

    def data_received(self, data: bytes) -> None:
        """Answer when the request's head is there in full; a body is ignored."""
        if self._transport.is_closing():
            return
        self._request += data
        if b"\r\n\r\n" in self._request:
            self._answer(*self._parse())
        elif len(self._request) > _MOST_BYTES:
            self.drop()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is over: stop its timer and forget it."""
        self._timer.cancel()
        self._exchanges.discard(self)

    def drop(self) -> None:
        """End the connection without an answer, or without the rest of one."""
        self._transport.abort()

    def _parse(self) -> tuple[str, str]:
        """(method, path); both empty if these bytes are no request."""
        words = self._request.partition(b"\r\n")[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return "", ""
        return words[0], words[1].partition("?")[0]

    def _answer(self, method: str, path: str) -> None:
        if method not in ("GET", "HEAD"):
            answer = PageAnswer(405 if method else 400, b"GET /metrics, /healthz or /readyz\n")
        elif (route := self._routes.get(path)) is None:
            answer = PageAnswer(404, f"there are {', '.join(self._routes)}\n".encode())
        else:
            answer = route()
        head = (
            f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}\r\n"
            f"Content-Type: {answer.content_type}\r\n"
            f"Content-Length: {len(answer.body)}\r\n"
            "Connection: close\r\n\r\n"
        ).encode("latin-1")
        self._transport.write(head if method == "HEAD" else head + answer.body)
        self._transport.close()
