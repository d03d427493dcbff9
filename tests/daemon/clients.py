"""Clients that speak the protocol by hand, and what a daemon reports of its sessions."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from tests.daemon import wire
from tests.daemon.conftest import DaemonProcess
from tierstore.commands.views import decode_report
from tierstore.daemon.report import DaemonReport
from tierstore.sidecar.inspection import inspect_daemon

__all__ = ["LONG_SECONDS", "RawClient", "client_of", "report_of", "sessions_of"]

LONG_SECONDS = 120.0
"""On a busy machine too a client says Hello within this."""


class RawClient:
    """Says whatever it likes, blocking.

    Args:
        daemon: to connect to.
    """

    def __init__(self, daemon: DaemonProcess) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(LONG_SECONDS)
        self.socket.connect(str(daemon.socket))
        self._reader = wire.FrameReader(wire.DaemonMessage, "the daemon")
        self._received: list[wire.ClientMessage | wire.DaemonMessage] = []

    def send(self, *messages: wire.ClientMessage, descriptors: tuple[int, ...] = ()) -> None:
        socket.send_fds(self.socket, [wire.frame_of(messages)], list(descriptors))

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

    def greet(self) -> None:
        self.send(wire.Hello((wire.VERSION,), "test"))
        assert isinstance(self.receive(), wire.Welcome)

    def open(self) -> wire.Opened:
        self.greet()
        self.send(wire.Open("test", None, os.getpid()))
        opened = self.receive()
        assert isinstance(opened, wire.Opened)
        return opened

    def is_refused(self, *words: str) -> bool:
        """Whether the daemon says why not, in these words among others, and closes."""
        refusal = self.receive()
        assert isinstance(refusal, wire.Refused), refusal
        assert all(word in refusal.reason for word in words), refusal.reason
        return self.receive() is None

    def is_cut_off(self) -> bool:
        """Whether the daemon closes the connection, with or without a word."""
        while (message := self.receive()) is not None:
            assert isinstance(message, wire.Refused), message
        return True


@contextmanager
def client_of(daemon: DaemonProcess) -> Iterator[RawClient]:
    client = RawClient(daemon)
    try:
        yield client
    finally:
        client.socket.close()


def report_of(daemon: DaemonProcess) -> DaemonReport:
    return decode_report(inspect_daemon(daemon.socket, seconds=30), str(daemon.socket))


def sessions_of(daemon: DaemonProcess) -> dict[str, int]:
    """The bytes on disk of each client whose session the daemon keeps."""
    return {each.client: each.disk_bytes for each in report_of(daemon).sessions}
