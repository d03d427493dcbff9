"""The daemon: one disk tier, the sessions on it, and the one way out.

Start here::

    listener ─► Connection (phases, requests) ─► Lanes (whose turn) ─► LocalDisk ─► answers
                      └► Session (lease, records, jobs)

One loop runs all of it; jobs of the disk tier run on its I/O threads. Nothing here knows tensors.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from tierstore import wire
from tierstore.codec import NO_CODEC
from tierstore.config import format_bytes, free_disk_bytes
from tierstore.disk.boundary import translated
from tierstore.disk.home import NamedHome
from tierstore.disk.local import NUM_AT_ONCE, LocalDisk
from tierstore.disk.location import Location
from tierstore.errors import StorageIOError, StoreFullError
from tierstore.threads import IoThreads

from .connection import Connection
from .lanes import Lanes
from .listener import listen, stop_listening, uid_of_peer
from .page import Page
from .report import encode_report, report_of
from .sessions import COUNTER, KEY_BITS, NUMBERS, Lease, Record, Session, kept_leases, new_lease
from .settings import ServeSettings
from .watching import answer_for

__all__ = ["Daemon", "serve"]

_INLINE_BYTES = 128 * 2**10
_DISK_SHARE = 0.8  # of what is free, or taken by the daemon's own files
_NUM_JOBS = NUM_AT_ONCE + 2  # each way: while those are at the device, others take checksums
_DRAIN_SECONDS = 30.0
_ACCEPT_AGAIN_SECONDS = 0.1
_DISCARD_AT_ONCE = 4096
_MOST_IN_LOBBY = 64
_LOBBY_SHARE = 8  # of the descriptors that the process may have; a connection takes two


def serve(settings: ServeSettings) -> None:
    """Run a daemon until it is told to end (SIGTERM, SIGINT). Blocks.

    Raises:
        ConfigError: an option cannot be used, or a living daemon uses the directory or the socket.
        StorageIOError: the drive refused; or the index was found to be damaged, and all that was stored was cleared.
    """
    import uvloop

    uvloop.run(Daemon(settings).run())


class Daemon:
    """What all connections share. Lives on one loop.

    Attributes:
        disk: the tier.
        lanes: whose turn it is at it.
        limits: of a session.
        program: who this is, for clients.
        log: where it logs.
        started_at: by the monotonic clock.
        num_sessions_opened, num_internal_errors: since then.
        ended_totals: what sessions that are no more have done.
        is_open: the disk tier is there, and clients are served.
        metrics_address: of the page for Prometheus; None: there is none.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.limits = settings.limits
        self.program = f"tierstore {_version()}, process {os.getpid()}"
        self.log = logging.getLogger("tierstore.daemon")
        self.disk: LocalDisk
        self.lanes: Lanes
        self.sessions: dict[int, Session] = {}
        self.started_at = time.monotonic()
        self.num_sessions_opened = 0
        self.num_internal_errors = 0
        self.ended_totals: Counter[str] = Counter()
        self.is_open = False
        self.metrics_address: str | None = None
        self._connections: dict[Connection, None] = {}  # the oldest first
        self._asking: dict[Connection, None] = {}  # for a report, in this turn of the loop
        self._connection_of: dict[int, Connection] = {}  # by session
        self._expiries: dict[int, asyncio.TimerHandle] = {}  # by session
        self._next_session = 1
        self._tasks: asyncio.TaskGroup
        self._num_signals = 0
        self._ending = asyncio.Event()
        self._ending_at_once = asyncio.Event()

    async def run(self) -> None:
        """Serve until a signal ends it; what `serve` raises."""
        settings = self.settings
        with ExitStack() as opened:
            page = None if settings.metrics is None else Page.bind(*settings.metrics)  # first: it leaves no trace
            if page is not None:
                opened.callback(page.close)
            with _opened_at(settings.path):
                home = NamedHome(settings.path)
            opened.callback(home.close, keep=True)  # the tier has closed it, if it came to that
            listener = listen(settings.socket, settings.socket_group)
            opened.callback(stop_listening, listener, settings.socket)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self._signalled)
            if page is not None:
                await answer_for(self, page)
            await self._serve(home, listener)

    async def _serve(self, home: NamedHome, listener: socket.socket) -> None:
        with _opened_at(self.settings.path):
            threads = IoThreads(2 * _NUM_JOBS + 2, "tierstore-io")
        try:
            await self._open_disk(home, threads)
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self.lanes = Lanes(self.start, _NUM_JOBS)
                accepting = tasks.create_task(self._accept(listener))
                self.is_open = True
                self.log.info("ready", extra=self._about(home.found))
                await self._ending.wait()
                accepting.cancel()
                await self._drain()
                self.is_open = False
            await self.disk.close(keep=bool(self.sessions) and self.disk.index_damage is None)
            self._complain_of_damage()
        finally:
            threads.shutdown(wait=not self._ending_at_once.is_set())

    async def _open_disk(self, home: NamedHome, threads: Executor) -> None:
        with _opened_at(self.settings.path):
            self.disk = LocalDisk(
                self.settings.path,
                disk_bytes=self._budget_bytes(home),
                inline_bytes=_INLINE_BYTES,
                codec=self.settings.codec,
                checksum=True,
                executor=threads,
                home=home,
                max_write_bytes_per_day=self.settings.max_write_bytes_per_day,
            )
        await self._take_up()
        self._end_if_damaged()

    def _budget_bytes(self, home: NamedHome) -> int:
        """What was asked for; or a share of the drive, which is the same with and without what the home has kept."""
        if self.settings.disk_bytes is not None:
            return self.settings.disk_bytes
        return int((free_disk_bytes(self.settings.path) + home.taken_bytes) * _DISK_SHARE)

    # --- the way out ----------------------------------------------------------------------------------------------

    def _signalled(self) -> None:
        """The first signal drains, the second ends at once."""
        self._num_signals += 1
        self._ending.set()
        if self._num_signals > 1:
            self._ending_at_once.set()

    def _end_if_damaged(self) -> None:
        """An index whose pages are damaged would refuse every new session, and keep what is freed, from now on."""
        damage = self.disk.index_damage
        if damage is not None and not self._ending.is_set():
            self.log.error("the index is damaged (%s): this daemon ends, and what it has stored is cleared", damage)
            self._ending.set()

    def _complain_of_damage(self) -> None:
        damage = self.disk.index_damage
        if damage is not None:
            kept = "what was stored was cleared; start the daemon again"
            raise StorageIOError("write", f"the index under {self.settings.path}", str(damage), kept) from damage

    async def _drain(self) -> None:
        """Take no more, finish and answer what was taken, then close every connection: clients come back later."""
        self.log.info("ending", extra={"sessions": len(self.sessions)})
        for timer in self._expiries.values():
            timer.cancel()
        for connection in self._connections:
            connection.stop_listening()
        quiet = asyncio.gather(*(session.wait_for(None) for session in self.sessions.values()))
        at_once = asyncio.ensure_future(self._ending_at_once.wait())
        done, _ = await asyncio.wait((quiet, at_once), timeout=_DRAIN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        if quiet not in done:
            self.log.warning("ended before everything was written; the clients still have it")
            quiet.cancel()
            # Jobs of the disk tier cannot be stopped; what is committed is found again, as after a kill.
            os._exit(0 if self.disk.index_damage is None else 1)
        for connection in list(self._connections):
            connection.end_when_sent()

    # --- connections ----------------------------------------------------------------------------------------------

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Have it run to its end, whatever becomes of the other things that run.

        Whatever a client waits for is guarded by its connection, which tells it of a bug of ours (`Connection`). What
        is not, is the end of a session whose client is gone.
        """
        self._tasks.create_task(self._contain(work))

    async def _contain(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            self.num_internal_errors += 1
            self.log.exception("a bug, please report it")
        self._end_if_damaged()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
                self._take_in(accepted)
            except OSError as error:  # no descriptor is left: others wait until one is
                self.log.warning("no more connections: %s", error)
                await asyncio.sleep(_ACCEPT_AGAIN_SECONDS)

    def _take_in(self, accepted: socket.socket) -> None:
        try:
            uid = uid_of_peer(accepted)
            connection = Connection(accepted, uid, self)
        except OSError:
            accepted.close()
            raise
        self._make_room_in_lobby()
        self._connections[connection] = None
        if uid not in {0, os.getuid()} | self.settings.allowed_uids:
            connection.refuse(f"user {uid} may not use this daemon (see --allow-uid)", is_final=False)

    def _make_room_in_lobby(self) -> None:
        """Connections without a session may stay, but not keep others out: the oldest makes room for the newest."""
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        lobby = [each for each in self._connections if each.is_in_lobby]
        if len(lobby) >= min(_MOST_IN_LOBBY, descriptors // _LOBBY_SHARE):
            lobby[0].refuse("too many connections without a session, of which this was the oldest", is_final=False)

    def connection_ended(self, connection: Connection) -> None:
        """A connection is over. Its session, if it still has one, is kept for a while."""
        self._connections.pop(connection, None)
        session = connection.session
        if session is not None and self.is_connection_of(session, connection):
            del self._connection_of[session.lease.number]
            self._start_grace(session)

    # --- sessions -------------------------------------------------------------------------------------------------

    async def open_session(self, message: wire.Open, uid: int) -> tuple[Session, bytes]:
        """A new session, known to the index too, and its token.

        Raises:
            StoreFullError, StorageIOError: the index does not take it.
            StorageIOError: there is no number for it; see `_unused_number`.
        """
        lease, token = new_lease(self._unused_number(), uid, message.name, message.rank, message.pid)
        self._next_session = lease.number + 1
        await self.disk.put_lease(COUNTER, msgspec.msgpack.encode(self._next_session))
        await self.disk.put_lease(lease.number, msgspec.msgpack.encode(lease))
        session = self.sessions[lease.number] = self._session_of_lease(lease)
        self.num_sessions_opened += 1
        self.log.info("session opened", extra=session.about())
        return session, token

    def _unused_number(self) -> int:
        """Of a session. The numbers begin again only where nothing is left that bears one: no record, no lease."""
        if self._next_session in NUMBERS:
            return self._next_session
        if self.sessions or not self.disk.is_empty:
            reason = f"all {len(NUMBERS)} numbers of sessions are used: they begin again when no session is left"
            raise StorageIOError("open", "a session", reason, "those that are open go on")
        return NUMBERS.start

    def session_of(self, message: wire.Resume, uid: int) -> Session | None:
        """The session that this token resumes."""
        session = self.sessions.get(message.session)
        if session is None or not session.lease.is_resumed_by(message.token, uid):
            return None
        return session

    def take_over(self, session: Session, connection: Connection) -> None:
        """The client has a new connection: the old one, which it has given up, is not listened to any more."""
        self._stop_grace(session)
        old = self._connection_of.pop(session.lease.number, None)
        self._connection_of[session.lease.number] = connection
        if old is not None:
            old.session = None
            old.close()
            self._connections.pop(old, None)

    def session_entered(self, session: Session, connection: Connection) -> None:
        """The connection has the session now."""
        self._connection_of[session.lease.number] = connection

    def is_connection_of(self, session: Session, connection: Connection) -> bool:
        """Whether the session's client is on this connection, and not on a later one, or on none."""
        return self._connection_of.get(session.lease.number) is connection

    async def end_session(self, session: Session, reason: str) -> None:
        """Free all it stored, after its jobs have ended (rule 6 of wire.py), then forget it."""
        if session.is_ended:
            return
        session.is_ended = True
        self._stop_grace(session)
        self._connection_of.pop(session.lease.number, None)
        await session.wait_for(None)
        await self.free(session, tuple(session.records))
        await self.disk.delete_lease(session.lease.number)
        del self.sessions[session.lease.number]
        self.lanes.forget(session.lease.number)
        self.ended_totals.update(session.totals)
        self.log.info("session ended: %s", reason, extra=session.about())

    async def free(self, session: Session, keys: tuple[int, ...]) -> None:
        """Free records of a session; those that it does not have are no error."""
        for first in range(0, len(keys), _DISCARD_AT_ONCE):
            some = [key for key in dict.fromkeys(keys[first : first + _DISCARD_AT_ONCE]) if key in session.records]
            if not some:
                continue
            for key in some:
                session.disk_bytes -= session.records.pop(key).stored_bytes
            await self.disk.discard([session.disk_key(key) for key in some])
            session.totals["discarded_records"] += len(some)

    def _session_of_lease(self, lease: Lease) -> Session:
        quota_bytes = self.limits.session_disk_bytes
        if quota_bytes is None:
            quota_bytes = self.disk.usage().budget_bytes
        return Session(lease, quota_bytes, self.limits.session_queued_bytes)

    def _start_grace(self, session: Session) -> None:
        loop = asyncio.get_running_loop()
        session.lost_at = loop.time()
        if self.is_ending:  # its lease is kept; the next daemon gives it the whole grace period
            return
        self._expiries[session.lease.number] = loop.call_later(self.limits.grace_seconds, self._expire, session)
        self.log.info("client lost, session kept for %g s", self.limits.grace_seconds, extra=session.about())

    def _stop_grace(self, session: Session) -> None:
        session.lost_at = None
        if (timer := self._expiries.pop(session.lease.number, None)) is not None:
            timer.cancel()

    def _expire(self, session: Session) -> None:
        self.start(self.end_session(session, f"its client did not come back within {self.limits.grace_seconds:g} s"))

    async def _take_up(self) -> None:
        """Sessions of a daemon that was killed, each waiting for its client."""
        found = kept_leases(self.disk.leases)
        self._next_session = found.next_number
        for number in found.damaged:
            self.log.warning("a damaged session was dropped", extra={"session": number})
            await self.disk.delete_lease(number)
        for number, lease in found.leases.items():
            self.sessions[number] = self._session_of_lease(lease)
        nobodys = []
        for disk_key, location in self.disk.found_locations().items():
            session = self.sessions.get(disk_key >> KEY_BITS)
            if session is None:
                nobodys.append(disk_key)
            else:
                session.take_up(disk_key & (1 << KEY_BITS) - 1, _record_at(location))
        await self.disk.discard(nobodys)
        for session in self.sessions.values():
            self._start_grace(session)

    # --- figures --------------------------------------------------------------------------------------------------

    def _about(self, found: str) -> dict[str, object]:
        page = None if self.metrics_address is None else f"http://{self.metrics_address}/metrics"
        where = {"path": str(self.settings.path), "socket": str(self.settings.socket), "metrics": page}
        return where | {"found": found, "sessions": len(self.sessions)}

    @property
    def is_ending(self) -> bool:
        """Whether it takes no more."""
        return self._ending.is_set()

    def slab_bytes_of(self, session: Session) -> int:
        """Of memory that its client shares."""
        connection = self._connection_of.get(session.lease.number)
        return 0 if connection is None else connection.slab_bytes

    def report_to(self, connection: Connection) -> None:
        """Answer it with what is held and was done. Whoever asks in one turn of the loop gets the same report, once."""
        if not self._asking:
            asyncio.get_running_loop().call_soon(self._report)
        self._asking[connection] = None

    def _report(self) -> None:
        asking, self._asking = self._asking, {}
        report = wire.Report(encode_report(report_of(self)))
        for connection in asking:
            connection.answer(report)


@contextmanager
def _opened_at(path: Path) -> Iterator[None]:
    """What the drive refuses at the start is its failure: there is no record yet that a budget could be too small for.

    Raises:
        StorageIOError: the drive is full, or failed; what was there still is.
    """
    kept = "what was stored there still is"
    try:
        with translated("open", str(path), kept):
            yield
    except (StoreFullError, StorageIOError) as error:
        free = f"{format_bytes(free_disk_bytes(path))} are free on its file system"
        raise StorageIOError("open", str(path), f"{error.__cause__}; {free}", kept) from error


def _record_at(location: Location) -> Record:
    checksum = location.checksum if location.codec == NO_CODEC.family else None
    return Record(location.logical_bytes, location.taken_bytes, location.codec, "", checksum)


def _version() -> str:
    try:
        return version("tierstore")
    except PackageNotFoundError:
        return "(not installed)"
