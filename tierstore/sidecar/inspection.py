"""Asks a living daemon for its report, over one short connection. Blocks; needs no loop."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from contextlib import suppress
from os import PathLike
from typing import TypeVar

from ..errors import DaemonUnavailableError, ProtocolError
from . import messages
from .frames import FrameReader, frame_of
from .peer import check_daemon

T = TypeVar("T")

_RECEIVE_BYTES = 256 * 2**10


def inspect_daemon(address: str | PathLike[str], *, seconds: float = 5.0, daemon_uid: int | None = None) -> bytes:
    """The report of the daemon that listens at `address`, in JSON. Waits for `seconds` at most, all in all.
    `daemon_uid`: as `check_daemon`'s.

    DaemonUnavailableError: nobody listens there, or it does not answer in time; if it or the system refuses, or it is a
    daemon of a user who is not trusted, the cause is a PermissionError. ProtocolError: it speaks something else.
    """
    began_at = time.monotonic()
    name = os.fspath(address)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            talk = _Talk(connection, name, began_at + seconds)
            connection.settimeout(seconds)
            connection.connect(name)
            check_daemon(connection, name, daemon_uid)
            with suppress(BrokenPipeError, ConnectionResetError):  # it may have refused already; the reason comes next
                talk.say(messages.Hello((messages.VERSION,), f"tierstore, process {os.getpid()}"))
            talk.hear(messages.Welcome)
            talk.say(messages.Inspect())
            return talk.hear(messages.Report).state
    except OSError as error:
        reason = "it does not answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise DaemonUnavailableError(name, time.monotonic() - began_at, reason, "") from error


class _Talk:
    """A connection that ends at `ends_at`, by the monotonic clock."""

    def __init__(self, connection: socket.socket, peer: str, ends_at: float) -> None:
        self._connection = connection
        self._peer = f"the daemon at {peer}"
        self._ends_at = ends_at
        self._reader = FrameReader(messages.DaemonMessage, self._peer)
        self._heard: deque[messages.ClientMessage | messages.DaemonMessage] = deque()

    def say(self, message: messages.ClientMessage) -> None:
        self._limit()
        self._connection.sendall(frame_of([message]))

    def hear(self, kind: type[T]) -> T:
        while not self._heard:
            self._limit()
            data = self._connection.recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError("it has closed the connection")
            for received in self._reader.feed(data):
                self._heard.extend(received)
        message = self._heard.popleft()
        if isinstance(message, messages.Refused):
            raise PermissionError(f"it refuses: {message.reason}")
        if not isinstance(message, kind):
            raise ProtocolError(self._peer, f"{type(message).__name__} instead of {kind.__name__}")
        return message

    def _limit(self) -> None:
        remaining_seconds = self._ends_at - time.monotonic()
        if remaining_seconds <= 0:
            raise TimeoutError
        self._connection.settimeout(remaining_seconds)
