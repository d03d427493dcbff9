"""A connection alone, beside parts of a daemon that are none."""

import asyncio
import os
import socket
from types import SimpleNamespace

from tests.daemon import wire
from tierstore.daemon.connection import Connection


class ClosingReporter:
    """Closes a connection as soon as it asks for a report."""

    def __init__(self) -> None:
        self.num_asked = 0

    def answer(self, connection: Connection) -> None:
        self.num_asked += 1
        connection.close()


async def test_what_follows_in_a_frame_is_not_handled_when_the_connection_is_over() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reporter = ClosingReporter()
        limits = SimpleNamespace(handshake_seconds=10.0, slab_bytes=0, grace_seconds=0.0)
        shared = SimpleNamespace(limits=limits, program="test", reporter=reporter)
        Connection(ours, os.getuid(), shared, lambda _: None)
        theirs.sendall(wire.frame_of([wire.Hello((wire.VERSION,), "test"), *[wire.Inspect()] * 3]))
        async with asyncio.timeout(20):
            while not reporter.num_asked:
                await asyncio.sleep(0)
        assert reporter.num_asked == 1
