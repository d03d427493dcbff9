"""A peer for the client's end of a session: it says whatever a test wants, and leaves when it wants."""

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from tests.daemon import wire
from tierstore.sidecar.remote import RemoteDisk

__all__ = ["OPENED", "WELCOME", "Guest", "Peer", "opened_disk"]

WELCOME = wire.Welcome(wire.VERSION, "peer", 2**30, 60.0)
OPENED = wire.Opened(7, b"t" * 32, 1, 7 << 40, 2**40, "by nobody")


class Guest:
    """One connection of the link's, as the peer has it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frames = wire.FrameReader(wire.ClientMessage, "the link")
        self._heard: list[Any] = []

    async def hear(self) -> Any:
        """The next message; None: the link has closed the connection."""
        while not self._heard:
            data = await self._reader.read(65536)
            if not data:
                return None
            for messages in self._frames.feed(data):
                self._heard += messages
        return self._heard.pop(0)

    async def expect(self, kind: type) -> Any:
        message = await self.hear()
        assert isinstance(message, kind), message
        return message

    async def say(self, *messages: wire.DaemonMessage) -> None:
        self._writer.write(wire.frame_of(messages))
        await self._writer.drain()

    async def welcome(self, kind: type, *answers: wire.DaemonMessage) -> None:
        """Up to the answer to `Open` or `Resume`."""
        await self.expect(wire.Hello)
        await self.say(WELCOME)
        await self.expect(kind)
        await self.say(*answers)

    def leave(self) -> None:
        self._writer.close()


class Peer:
    """Listens, and is no daemon."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._guests: asyncio.Queue[Guest] = asyncio.Queue()
        self._all: list[Guest] = []

    @property
    def newest(self) -> Guest:
        return self._all[-1]

    async def guest(self) -> Guest:
        return await self._guests.get()

    def take_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._all.append(Guest(reader, writer))
        self._guests.put_nowait(self._all[-1])

    def close(self) -> None:
        for guest in self._all:
            guest.leave()


@asynccontextmanager
async def opened_disk(peer: Peer, reconnect_seconds: float = 20.0) -> AsyncIterator[tuple[RemoteDisk, Guest]]:
    """A disk tier with a session, and the peer's end of it; closed at the end, as the newest guest is told."""
    with ThreadPoolExecutor(2) as executor:
        opening = asyncio.ensure_future(
            RemoteDisk.open(
                peer.address,
                name="test",
                rank=None,
                pid=os.getpid(),
                window_bytes=65536,
                reconnect_seconds=reconnect_seconds,
                executor=executor,
            )
        )
        guest = await peer.guest()
        await guest.welcome(wire.Open, OPENED)
        disk = await opening
        await guest.expect(wire.Slab)
        yield disk, guest
        closing = asyncio.ensure_future(disk.close())
        await peer.newest.expect(wire.Close)
        await peer.newest.say(wire.Closed())
        await closing
