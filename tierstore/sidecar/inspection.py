"""Asks a living daemon for its report, over one short connection. Blocks; needs no loop."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from os import PathLike

from ..errors import DaemonUnavailableError, ProtocolError
from . import messages
from .frames import FrameReader, frame_of
from .peer import check_daemon

_RECEIVE_BYTES = 256 * 2**10
_PAUSE_SECONDS = 0.02


def inspect_daemon(address: str | PathLike[str], *, seconds: float = 5.0, daemon_uid: int | None = None) -> bytes:
    """The report of the daemon that listens at `address`, in JSON. Waits for `seconds` at most, all in all.
    `daemon_uid`: as `check_daemon`'s.

    DaemonUnavailableError: nobody listens there, or it does not answer in time; if it or the system refuses, or it is a
    daemon of a user who is not trusted, the cause is a PermissionError. ProtocolError: it speaks something else."""
    began_at = time.monotonic()
    name = os.path.expanduser(address)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            answers = _heard(connection, f"the daemon at {name}", began_at + seconds)
            _connect(connection, name, began_at + seconds)
            check_daemon(connection, name, daemon_uid)
            hello = messages.Hello((messages.VERSION,), f"tierstore, process {os.getpid()}")
            with suppress(BrokenPipeError, ConnectionResetError):  # it may have refused already; the reason comes next
                connection.sendall(frame_of([hello]))
            for message in answers:
                if isinstance(message, messages.Welcome):
                    connection.sendall(frame_of([messages.Inspect()]))
                elif isinstance(message, messages.Report):
                    return message.state
                elif isinstance(message, messages.Refused):
                    why = messages.with_advice(message.reason) if message.is_final else message.reason
                    raise PermissionError(f"it refuses: {why}")
                else:
                    raise ProtocolError(f"the daemon at {name}", f"{type(message).__name__} that nobody asked for")
            raise ConnectionResetError("it has closed the connection")
    except OSError as error:
        reason = "it does not answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise DaemonUnavailableError(name, time.monotonic() - began_at, reason, "") from error


def _connect(connection: socket.socket, name: str, ends_at: float) -> None:
    """TimeoutError: until `ends_at`, a monotonic time, too many others wait to be accepted (connect(2), EAGAIN)."""
    connection.setblocking(False)
    while True:
        try:
            connection.connect(name)
        except BlockingIOError:
            if time.monotonic() >= ends_at:
                raise TimeoutError from None
            time.sleep(_PAUSE_SECONDS)
        else:
            return


def _heard(
    connection: socket.socket, peer: str, ends_at: float
) -> Iterator[messages.ClientMessage | messages.DaemonMessage]:
    """What the daemon says until it closes the connection. TimeoutError: `ends_at`, a monotonic time, has come."""
    reader = FrameReader(messages.DaemonMessage, peer)
    while (seconds := ends_at - time.monotonic()) > 0:
        connection.settimeout(seconds)
        if not (data := connection.recv(_RECEIVE_BYTES)):
            return
        for received in reader.feed(data):
            yield from received
    raise TimeoutError
