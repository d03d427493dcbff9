"""Clients that speak the protocol by hand, and what a daemon reports of its sessions."""

import http.client
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from tests.daemon import wire
from tests.daemon.conftest import DaemonProcess
from tierstore.commands.views import decode_report
from tierstore.daemon.report import DaemonReport
from tierstore.sidecar.inspection import inspect_daemon
from tierstore.sidecar.window import SharedSlab

__all__ = [
    "LONG_SECONDS",
    "PageSays",
    "RawClient",
    "ask",
    "client_of",
    "crowd_at",
    "page_of",
    "report_of",
    "sessions_of",
]

T = TypeVar("T")
LONG_SECONDS = 120.0
"""On a busy machine too a client says Hello within this."""


class RawClient:
    """Says whatever it likes, blocking."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(LONG_SECONDS)
        self.socket.connect(str(daemon.socket))
        self._reader = wire.FrameReader(wire.DaemonMessage, "the daemon")
        self._received: list[wire.ClientMessage | wire.DaemonMessage] = []

    def send(self, *messages: wire.ClientMessage, descriptors: tuple[int, ...] = ()) -> None:
        """In as few frames as the daemon takes; descriptors go with a message that is alone."""
        most_bytes = wire.MAX_CLIENT_FRAME_BYTES
        for frame in wire.frames_of([wire.encoded(each, most_bytes) for each in messages], most_bytes):
            socket.send_fds(self.socket, [frame], list(descriptors))

    def receive(self) -> wire.ClientMessage | wire.DaemonMessage | None:
        """The next message; None: the daemon has closed the connection."""
        while not self._received:
            try:
                data = self.socket.recv(65536)
            except ConnectionResetError:
                return None
            if not data:
                return None
            for messages in self._reader.feed(data):
                self._received += messages
        return self._received.pop(0)

    def expect(self, kind: type[T]) -> T:
        """The next message, which is of this kind."""
        message = self.receive()
        assert isinstance(message, kind), message
        return message

    def greet(self) -> wire.Welcome:
        self.send(wire.Hello((wire.VERSION,), "test"))
        return self.expect(wire.Welcome)

    def open(self, *slabs: SharedSlab) -> wire.Opened:
        """Begin a session, and share slabs."""
        self.greet()
        self.send(wire.Open("test", None, os.getpid()))
        opened = self.expect(wire.Opened)
        for slab in slabs:
            self.share(slab)
        return opened

    def resume(self, opened: wire.Opened) -> None:
        self.greet()
        self.send(wire.Resume(opened.session, opened.token))
        self.expect(wire.Resumed)

    def share(self, slab: SharedSlab) -> None:
        self.send(wire.Slab(slab.number, slab.num_bytes), descriptors=(slab.descriptor,))

    def end(self) -> None:
        """End the session."""
        self.send(wire.Close())
        self.expect(wire.Closed)

    def is_refused(self, *words: str) -> bool:
        """Whether the daemon says why not, in these words among others, and closes."""
        refusal = self.expect(wire.Refused)
        assert all(word in refusal.reason for word in words), refusal.reason
        return self.receive() is None

    def is_cut_off(self) -> bool:
        """Whether the daemon closes the connection, with or without a word."""
        while (message := self.receive()) is not None:
            assert isinstance(message, wire.Refused), message
        return True


class PageSays(NamedTuple):
    """The answer of a daemon's page."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


def ask(page: str, path: str, host: str | None = None, method: str = "GET") -> PageSays:
    """Ask the page at this host and port; `host`: what is said to be its name."""
    connection = http.client.HTTPConnection(page, timeout=LONG_SECONDS)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return PageSays(answer.status, dict(answer.headers), answer.read())
    finally:
        connection.close()


@contextmanager
def client_of(daemon: DaemonProcess) -> Iterator[RawClient]:
    client = RawClient(daemon)
    try:
        yield client
    finally:
        client.socket.close()


def report_of(daemon: DaemonProcess) -> DaemonReport:
    return decode_report(inspect_daemon(daemon.socket, seconds=30), str(daemon.socket))


def page_of(daemon: DaemonProcess) -> str:
    """Host and port of the page that it serves."""
    address = report_of(daemon).metrics
    assert address is not None
    return address


def sessions_of(daemon: DaemonProcess) -> dict[str, int]:
    """The bytes on disk of each client whose session the daemon keeps."""
    return {each.client: each.disk_bytes for each in report_of(daemon).sessions}


@contextmanager
def crowd_at(address: Path) -> Iterator[None]:
    """As many connections as fit into the queue of those who are not accepted."""
    with ExitStack() as crowd:
        while True:
            client = crowd.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            try:
                client.connect(str(address))
            except BlockingIOError:
                break
        yield
