"""A connection alone, beside a daemon that is none."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from types import SimpleNamespace

from tierstore import wire
from tierstore.daemon.connection import Connection


class ClosingDaemon:
    """Closes a connection as soon as it asks for a report."""

    def __init__(self) -> None:
        self.limits = SimpleNamespace(handshake_seconds=10.0, slab_bytes=0, grace_seconds=0.0)
        self.program = "test"
        self.log = logging.getLogger("test")
        self.num_asked = 0

    def report_to(self, connection: Connection) -> None:
        self.num_asked += 1
        connection.close()


async def test_what_follows_in_a_frame_is_not_handled_when_the_connection_is_over() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        daemon = ClosingDaemon()
        Connection(ours, os.getuid(), daemon)
        theirs.sendall(wire.frame_of([wire.Hello((wire.VERSION,), "test"), *[wire.Inspect()] * 3]))
        async with asyncio.timeout(20):
            while not daemon.num_asked:
                await asyncio.sleep(0)
        assert daemon.num_asked == 1
