"""The sessions that a daemon has, and which connection each session's client is on. For one loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque

import msgspec

from tierstore.disk.codec.codec import NO_CODEC
from tierstore.disk.drives import LocalTier
from tierstore.errors import StorageIOError
from tierstore.sidecar import messages

from .lanes import Lanes
from .limits import Unsent, Waiting
from .options import ServeSettings
from .sessions import COUNTER, KEY_BITS, NUMBERS, KeptRecord, Lease, RecordCount, Session, kept_leases, new_lease
from .tasks import Stage, Tasks
from .turns import Client, Turn, Turns

_log = logging.getLogger("tierstore.daemon")


class Registry:
    """Sessions by number, and the parts of the daemon that serve them. Its coroutines wait for commits to the index and
    for jobs; nothing blocks the loop. A session whose client is lost is kept for the grace period; then it ends, and
    what it stored is freed."""

    def __init__(self, disk: LocalTier, lanes: Lanes, tasks: Tasks, stage: Stage, settings: ServeSettings) -> None:
        self.disk = disk
        self.lanes = lanes
        self.tasks = tasks
        self.stage = stage
        self.settings = settings
        self.turns, self.waiting, self.unsent = Turns(), Waiting(), Unsent()
        self.sessions: dict[int, Session] = {}
        self.num_opened = 0
        self.ended_totals: Counter[str] = Counter()
        self._next_session = 1
        self._num_of_user: Counter[int] = Counter()  # sessions, those included that are being opened
        self._records_of_user: dict[int, RecordCount] = {}

    def find(self, message: messages.Resume, uid: int) -> Session | None:
        session = self.sessions.get(message.session)
        return session if session is not None and session.lease.is_resumed_by(message.token, uid) else None

    async def restore(self) -> None:
        """Continue the sessions of an earlier daemon; each waits for its client. Called once, before anything else. On
        StoreFullError or StorageIOError (the index does not take a change) what was there still is."""
        found = kept_leases(self.disk.leases)
        self._next_session = found.next_number
        for number in found.damaged:
            _log.warning("a damaged session was dropped", extra={"session": number})
            await self.disk.delete_lease(number)
        for number, lease in found.leases.items():
            self.sessions[number] = self._session_of_lease(lease, was_restored=True)
            self._num_of_user[lease.uid] += 1
        nobodys = []
        for disk_key, location in self.disk.found_locations().items():
            session = self.sessions.get(disk_key >> KEY_BITS)
            if session is None:
                nobodys.append(disk_key)
            else:
                checksum = location.checksum if location.codec == NO_CODEC.family else None
                kept = KeptRecord(location.logical_bytes, location.taken_bytes, location.codec, "", checksum)
                session.records[disk_key & (1 << KEY_BITS) - 1] = kept
                session.disk_bytes += kept.stored_bytes
                session.num_of_user.now += 1
        await self.disk.discard(nobodys)
        for session in self.sessions.values():
            self._start_grace(session)

    async def open(self, message: messages.Open, uid: int) -> tuple[Session, bytes]:
        """Make a new session, and enter it in the index; returns it and its token. StoreFullError or StorageIOError:
        the index does not take it, or there is no number for it, or its user has too many."""
        if (most := self.settings.max_sessions_per_user) <= (number := self._num_of_user[uid]):
            reason = (
                f"user {uid} has {number} sessions, and --max-sessions-per-user is {most}: close one, or wait until "
                f"those whose clients are gone have ended ({self.settings.grace_seconds:g} s after their loss)"
            )
            raise StorageIOError("open", "a session", reason, "those that are open go on")
        lease, token = new_lease(self._unused_number(), uid, message.name, message.rank, message.pid)
        self._next_session = lease.number + 1
        self._num_of_user[uid] += 1
        try:
            await self.disk.put_lease(COUNTER, msgspec.msgpack.encode(self._next_session))
            await self.disk.put_lease(lease.number, msgspec.msgpack.encode(lease))
        except BaseException:
            self._num_of_user[uid] -= 1
            raise
        session = self.sessions[lease.number] = self._session_of_lease(lease)
        self.num_opened += 1
        _log.info("session opened", extra=session.about())
        return session, token

    def take_over(self, session: Session, connection: Client) -> None:
        """The client resumes the session on a new connection: the old one, which it has given up, ends."""
        self._stop_grace(session)
        old, session.connection = session.connection, connection
        if old is not None:
            self._drop_requests(session)
            old.give_up_session()

    def lose(self, session: Session, connection: Client) -> None:
        """A connection of this session is over. If its client is on no other, the grace period begins."""
        if session.connection is connection:
            session.connection = None
            self._drop_requests(session)
            self._start_grace(session)

    async def end(self, session: Session, reason: str) -> None:
        """Free all that the session stored, after its jobs have ended (rule 6 of messages.py), then forget it."""
        if session.is_ended:
            return
        session.is_ended = True
        self._stop_grace(session)
        session.connection = None
        self._drop_requests(session)
        await session.wait_for(None)
        await session.free(tuple(session.records))
        await self.disk.delete_lease(session.lease.number)
        del self.sessions[session.lease.number]
        self._num_of_user[session.lease.uid] -= 1
        self.lanes.remove_session(session.lease.number)
        self.ended_totals.update(session.totals)
        _log.info("session ended: %s", reason, extra=session.about())

    def _drop_requests(self, session: Session) -> None:
        """Begin none of the requests that the connection of a session has left: it was promised none of them, and asks
        for them again if it comes back. There may be thousands; so they end in turns, as they were heard."""
        left = deque(session.writes.drop() + self.lanes.drop(session.lease.number))

        def take(most: int, ends_at: float) -> int:
            num_before = len(left)
            while left and num_before - len(left) < most and time.perf_counter() < ends_at:
                left.popleft()()
            if left:
                self.turns.ask(turn)
            else:
                self.turns.remove(turn)
            return num_before - len(left)

        turn = Turn(session.lease.uid, take)
        if left:
            self.turns.ask(turn)

    def stop_timers(self) -> None:
        """Cancel all grace periods: the daemon ends, and the next one finds the leases."""
        for session in self.sessions.values():
            if session.expiry is not None:
                session.expiry.cancel()

    async def wait_for_jobs(self) -> None:
        await asyncio.gather(*(session.wait_for(None) for session in self.sessions.values()))

    def _unused_number(self) -> int:
        if self._next_session in NUMBERS:
            return self._next_session
        if self.sessions or not self.disk.is_empty:
            reason = f"all {len(NUMBERS)} numbers of sessions are used: they begin again when no session is left"
            raise StorageIOError("open", "a session", reason, "those that are open go on")
        return NUMBERS.start

    def _session_of_lease(self, lease: Lease, *, was_restored: bool = False) -> Session:
        quota_bytes = self.settings.session_disk_bytes
        if quota_bytes is None:
            quota_bytes = self.disk.usage().budget_bytes
        most_queued_bytes = self.settings.session_queued_bytes
        count = self._records_of_user.setdefault(lease.uid, RecordCount(self.settings.max_records_per_user))
        return Session(lease, quota_bytes, most_queued_bytes, count, self.disk, was_restored=was_restored)

    def _start_grace(self, session: Session) -> None:
        if self.stage.is_ending:  # its lease is kept; the next daemon gives it the whole grace period
            return
        loop = asyncio.get_running_loop()
        seconds = self.settings.grace_seconds
        reason = f"its client did not come back within {seconds:g} s"
        session.expiry = loop.call_later(seconds, lambda: self.tasks.start(self.end(session, reason)))
        _log.info("client lost, session kept for %g s", seconds, extra=session.about())

    def _stop_grace(self, session: Session) -> None:
        if session.expiry is not None:
            session.expiry.cancel()
            session.expiry = None
