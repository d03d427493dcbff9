"""Accepts connections: who may connect, and how many may wait without a session. For one loop."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
from collections.abc import Set

from tierstore.sidecar.peer import uid_of_peer

from .connection import Connection, Shared

__all__ = ["Acceptor"]

_log = logging.getLogger("tierstore.daemon")

_ACCEPT_AGAIN_SECONDS = 0.1
_MOST_IN_LOBBY = 64
_LOBBY_SHARE = 8  # of the descriptors that the process may have; a connection takes two


class Acceptor:
    """Holds every connection from when it is accepted until it is over.

    Args:
        allowed_uids: users who may connect, beside the daemon's own and root.
        shared: the parts of the daemon that all connections use.
    """

    def __init__(self, allowed_uids: Set[int], shared: Shared) -> None:
        self._allowed_uids = {0, os.getuid()} | allowed_uids
        self._shared = shared
        self._connections: dict[Connection, None] = {}  # the oldest first

    async def accept(self, listener: socket.socket) -> None:
        """Accept connections until this is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
                self._take_in(accepted)
            except OSError as error:  # no descriptor is left: others wait until one is
                _log.warning("no more connections: %s", error)
                await asyncio.sleep(_ACCEPT_AGAIN_SECONDS)

    def stop_listening(self) -> None:
        """Take no more requests from any client; their answers are still sent."""
        for connection in self._connections:
            connection.stop_listening()

    def end_when_sent(self) -> None:
        """Close each connection when all its answers are sent."""
        for connection in list(self._connections):
            connection.end_when_sent()

    def _take_in(self, accepted: socket.socket) -> None:
        try:
            uid = uid_of_peer(accepted)
            connection = Connection(accepted, uid, self._shared, self._forget)
        except OSError:
            accepted.close()
            raise
        self._make_room_in_lobby()
        self._connections[connection] = None
        if uid not in self._allowed_uids:
            connection.refuse(f"user {uid} may not use this daemon (see --allow-uid)", is_final=False)

    def _make_room_in_lobby(self) -> None:
        """Connections without a session may stay, but not keep others out: the oldest makes room for the newest."""
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        lobby = [each for each in self._connections if each.is_in_lobby]
        if len(lobby) >= min(_MOST_IN_LOBBY, descriptors // _LOBBY_SHARE):
            lobby[0].refuse("too many connections without a session, of which this was the oldest", is_final=False)

    def _forget(self, connection: Connection) -> None:
        self._connections.pop(connection, None)
