"""A session: one client's records, what is done with them, its jobs, and the lease that lets it come back. One loop."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from tierstore.disk.drives import LocalTier
from tierstore.disk.tier import Kind
from tierstore.errors import CorruptDataError, ProtocolError, QuotaExceededError, StorageIOError, StoreFullError
from tierstore.sidecar import messages

if TYPE_CHECKING:
    from .connection import Connection


class _HeldBack(NamedTuple):
    num_bytes: int
    start: Callable[[], None]


class WriteQueue:
    """Writes of one session: those that are queued or at the drive (`queued_bytes`), and those that are held back. At
    most `most_bytes` are queued or at the drive (None: no limit), but a longer write goes alone."""

    def __init__(self, most_bytes: int | None) -> None:
        self.most_bytes = most_bytes
        self.queued_bytes = 0
        self.held_bytes = 0
        self._held: deque[_HeldBack] = deque()

    def add(self, num_bytes: int, start: Callable[[], None]) -> None:
        """Start a write when those before it leave room for it: now, or in a later `end`."""
        self._held.append(_HeldBack(num_bytes, start))
        self.held_bytes += num_bytes
        self._start()

    def end(self, num_bytes: int) -> None:
        self.queued_bytes -= num_bytes
        self._start()

    def _start(self) -> None:
        while self._held and self._has_room_for(self._held[0].num_bytes):
            first = self._held.popleft()
            self.held_bytes -= first.num_bytes
            self.queued_bytes += first.num_bytes
            first.start()

    def _has_room_for(self, num_bytes: int) -> bool:
        if self.most_bytes is None or not self.queued_bytes:
            return True
        return self.queued_bytes + num_bytes <= self.most_bytes


KEY_BITS = 40
"""Length of a client's keys (`messages.py`). A key of the disk tier has the session's number above these bits."""

COUNTER = 0
"""The number under which the next session's number is kept, so that no number is used again too early. Not a lease."""

NUMBERS = range(1, 1 << 64 - KEY_BITS)
"""The numbers that sessions may have: with a client's key below it, each makes a key of the disk tier of 64 bits."""

_TOKEN_BYTES = 32


class Lease(msgspec.Struct, frozen=True):
    """The part of a session that survives a kill of the daemon: it is kept in the index. `number` is never used again
    while the directory holds anything. `token_hash`: SHA-256 of the secret that resumes the session, which only the
    client has."""

    number: int
    token_hash: bytes
    uid: int
    name: str
    rank: int | None
    pid: int

    def is_resumed_by(self, token: bytes, uid: int) -> bool:
        return hmac.compare_digest(self.token_hash, hashlib.sha256(token).digest()) and self.uid == uid


def new_lease(number: int, uid: int, name: str, rank: int | None, pid: int) -> tuple[Lease, bytes]:
    """Make a lease, and the token that resumes it."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    return Lease(number, hashlib.sha256(token).digest(), uid, name, rank, pid), token


class KeptLeases(NamedTuple):
    """The sessions that an earlier daemon has left, by number. `damaged`: those whose leases make no sense."""

    leases: dict[int, Lease]
    next_number: int
    damaged: list[int]


_T = TypeVar("_T")


def kept_leases(blobs: Mapping[int, bytes]) -> KeptLeases:
    """Read the leases and the counter from the bytes that were kept under each number."""
    found = {number: _decoded(blob, Lease) for number, blob in blobs.items() if number != COUNTER}
    leases = {
        number: lease
        for number, lease in found.items()
        if lease is not None and lease.number == number and number in NUMBERS
    }
    damaged = sorted(found.keys() - leases.keys())
    counter = _decoded(blobs[COUNTER], int) if COUNTER in blobs else None
    first_unused = max((number for number in found if number in NUMBERS), default=0) + 1
    if counter is None or not first_unused <= counter <= NUMBERS.stop:
        counter = first_unused
    return KeptLeases(leases, counter, damaged)


def _decoded(blob: bytes, kind: type[_T]) -> _T | None:
    try:
        return msgspec.msgpack.decode(blob, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class KeptRecord(msgspec.Struct, frozen=True, gc=False):
    """A stored record, with the disk tier's receipt; `num_bytes`: its length. One flat object, which the garbage
    collector leaves alone."""

    num_bytes: int
    stored_bytes: int
    codec: str
    kind: str
    checksum: int | None


class Session:
    """One client's records, and the jobs that run for it. `was_taken_up`: an earlier daemon opened it, and may have
    stored records whose entries are lost since.

    Attributes:
        records, being_written: by the client's keys; the keys of writes that are queued or run.
        disk_bytes: bytes taken on disk by records; those being written count with their full length.
        lost_at, expiry: when its connection ended, by the loop; the end of the grace period. None: it has one.
        is_ended: the session is over; jobs that still run for it must leave nothing behind.
    """

    def __init__(
        self, lease: Lease, quota_bytes: int, most_queued_bytes: int | None, *, was_taken_up: bool = False
    ) -> None:
        self.lease = lease
        self.was_taken_up = was_taken_up
        self.quota_bytes = quota_bytes
        self.records: dict[int, KeptRecord] = {}
        self.being_written: set[int] = set()
        self.disk_bytes = 0
        self.writes = WriteQueue(most_queued_bytes)
        self.lost_at: float | None = None
        self.is_ended = False
        self.connection: Connection | None = None
        self.expiry: asyncio.TimerHandle | None = None
        self.totals: Counter[str] = Counter()
        self._jobs: Counter[int] = Counter()  # by key
        self.num_jobs = 0
        self._idle: dict[int | None, asyncio.Event] = {}  # by key, only those that are waited for; None: all keys

    @property
    def peer(self) -> str:
        lease = self.lease
        return f"session {lease.number} ({lease.name!r}, process {lease.pid}, user {lease.uid})"

    def about(self) -> dict[str, object]:
        lease = self.lease
        return {"session": lease.number, "client": lease.name, "rank": lease.rank, "pid": lease.pid, "uid": lease.uid}

    def disk_key(self, key: int) -> int:
        return self.lease.number << KEY_BITS | key

    def take_up(self, key: int, record: KeptRecord) -> None:
        self.records[key] = record
        self.disk_bytes += record.stored_bytes

    def reserve(self, num_bytes: int) -> None:
        """Count a write that is about to begin, or raise QuotaExceededError; nothing is counted then."""
        if self.disk_bytes + num_bytes > self.quota_bytes:
            raise QuotaExceededError(
                num_bytes,
                self.disk_bytes,
                self.quota_bytes,
                reason="the session's quota is used up",
                session=self.lease.name,
            )
        self.disk_bytes += num_bytes

    def settle(self, reserved_bytes: int, taken_bytes: int) -> None:
        self.disk_bytes += taken_bytes - reserved_bytes

    def begin_job(self, key: int) -> None:
        self._jobs[key] += 1
        self.num_jobs += 1

    def end_job(self, key: int) -> None:
        self._jobs[key] -= 1
        self.num_jobs -= 1
        if not self._jobs[key]:
            del self._jobs[key]
            self._wake(key)
        if not self.num_jobs:
            self._wake(None)

    async def wait_for(self, keys: frozenset[int] | None) -> None:
        """Return when no job for these keys is queued or runs. None: for any key."""
        if keys is None:
            while self.num_jobs:
                await self._until_idle(None)
            return
        while busy := keys & self._jobs.keys():  # a loop, because a job may begin before this is woken
            for key in busy:
                if key in self._jobs:
                    await self._until_idle(key)

    async def _until_idle(self, key: int | None) -> None:
        await self._idle.setdefault(key, asyncio.Event()).wait()

    def _wake(self, key: int | None) -> None:
        if (idle := self._idle.pop(key, None)) is not None:
            idle.set()


_DISCARD_AT_ONCE = 4096


class Records:
    """The records of all sessions, on one disk tier: takes a message, returns the answer to the client. Lives on the
    daemon's loop; does not block it."""

    def __init__(self, disk: LocalTier) -> None:
        self.disk = disk

    async def write(
        self, session: Session, message: messages.Write, memory: memoryview
    ) -> messages.Stored | messages.Full | messages.Failed:
        """Store the bytes in `memory`, unless that was done before."""
        try:
            record = session.records.get(message.key)  # rule 5 of messages.py: it may be sent twice
            if record is None:
                record = await self._store(session, message, memory)
            return messages.Stored(message.request, record.stored_bytes, record.codec, record.kind, record.checksum)
        except StoreFullError as error:
            session.totals["full"] += 1
            is_quota = isinstance(error, QuotaExceededError)
            figures = (error.disk_bytes, error.disk_budget_bytes)
            return messages.Full(message.request, is_quota, *figures, messages.fitting(error.reason))
        except StorageIOError as error:
            session.totals["io_errors"] += 1
            return _failed(message.request, error)

    async def read(
        self, session: Session, message: messages.Read, memory: memoryview
    ) -> messages.Loaded | messages.Bad | messages.Failed:
        """Fill `memory` with a record. ProtocolError: it was never stored."""
        record = session.records.get(message.key)
        if record is None and session.was_taken_up:  # it was stored: its entry was dropped as damaged, or was cleared
            session.totals["corrupt_records"] += 1
            return messages.Bad(message.request, "the index", f"a record of {message.num_bytes} bytes", "none")
        if record is None or record.num_bytes != message.num_bytes:
            raise ProtocolError(
                session.peer,
                f"it asks for {message.num_bytes} bytes of record {message.key}, which it has not stored",
            )
        try:
            loaded = await self.disk.read(session.disk_key(message.key), memory)
            session.totals["restored_bytes"] += message.num_bytes
            session.totals["read_bytes"] += loaded.read_bytes
            return messages.Loaded(message.request, loaded.read_bytes)
        except CorruptDataError as error:
            session.totals["corrupt_records"] += 1
            words = (messages.fitting(each) for each in (error.place, error.expected, error.found))
            return messages.Bad(message.request, *words)
        except StorageIOError as error:
            session.totals["io_errors"] += 1
            return _failed(message.request, error)

    async def free(self, session: Session, keys: tuple[int, ...]) -> None:
        """Free records of a session; keys that it does not have are no error."""
        for first in range(0, len(keys), _DISCARD_AT_ONCE):
            some = [key for key in dict.fromkeys(keys[first : first + _DISCARD_AT_ONCE]) if key in session.records]
            if not some:
                continue
            for key in some:
                session.disk_bytes -= session.records.pop(key).stored_bytes
            await self.disk.discard([session.disk_key(key) for key in some])
            session.totals["discarded_records"] += len(some)

    async def _store(self, session: Session, message: messages.Write, memory: memoryview) -> KeptRecord:
        num_bytes = message.num_bytes
        session.reserve(num_bytes)
        taken_bytes = 0
        try:
            kind = Kind(message.dtype, message.itemsize_bytes, message.origin)
            stored = await self.disk.write(session.disk_key(message.key), memory, kind)
            taken_bytes = stored.stored_bytes
        finally:
            session.settle(num_bytes, taken_bytes)
        record = KeptRecord(num_bytes, stored.stored_bytes, stored.codec, stored.kind, stored.checksum)
        session.records[message.key] = record
        session.totals["spilled_bytes"] += num_bytes
        session.totals["written_bytes"] += taken_bytes
        return record


def _failed(request: int, error: StorageIOError) -> messages.Failed:
    return messages.Failed(
        request, messages.fitting_word(error.operation), messages.fitting(error.place), messages.fitting(error.reason)
    )
