"""A session: one client's records, what is done with them, its jobs, and the lease that lets it come back. One loop."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import msgspec

from tierstore.disk.drives import LocalTier
from tierstore.disk.tier import Kind
from tierstore.errors import CorruptDataError, ProtocolError, QuotaExceededError, StorageIOError, StoreFullError
from tierstore.sidecar import messages

from .turns import Client


class _HeldBack(NamedTuple):
    num_bytes: int
    start: Callable[[], None]
    dropped: Callable[[], None]


class WriteQueue:
    """Writes of one session: those that are queued or at the drive (`queued_bytes`), and those that are held back. At
    most `most_bytes` are queued or at the drive (None: no limit), but a longer write goes alone."""

    def __init__(self, most_bytes: int | None) -> None:
        self.most_bytes = most_bytes
        self.queued_bytes = 0
        self.held_bytes = 0
        self._held: deque[_HeldBack] = deque()

    def add(self, num_bytes: int, start: Callable[[], None], dropped: Callable[[], None] = lambda: None) -> None:
        """Start a write when those before it leave room for it: now, or in a later `end`."""
        self._held.append(_HeldBack(num_bytes, start, dropped))
        self.held_bytes += num_bytes
        self._start()

    def end(self, num_bytes: int) -> None:
        self.queued_bytes -= num_bytes
        self._start()

    def drop(self) -> list[Callable[[], None]]:
        """Take out what is held back. The caller then calls what it gets, once each; each counts as queued until its
        `end`."""
        held, self._held = self._held, deque()
        self.queued_bytes += self.held_bytes
        self.held_bytes = 0
        return [each.dropped for each in held]

    def _start(self) -> None:
        while self._held:
            first, most = self._held[0], self.most_bytes
            if most is not None and self.queued_bytes and self.queued_bytes + first.num_bytes > most:
                return
            self._held.popleft()
            self.held_bytes -= first.num_bytes
            self.queued_bytes += first.num_bytes
            first.start()


KEY_BITS = 40
"""Length of a client's keys (`messages.py`). A key of the disk tier has the session's number above these bits."""

COUNTER = 0
"""The number under which the next session's number is kept, so that no number is used again too early. Not a lease."""

NUMBERS = range(1, 1 << 64 - KEY_BITS)
"""The numbers that sessions may have: with a client's key below it, each makes a key of the disk tier of 64 bits."""

_TOKEN_BYTES = 32
_DISCARD_AT_ONCE = 4096


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


class RecordCount:
    """Records that the sessions of one user have; a write counts from its beginning. Each takes memory of the daemon,
    however small it is."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.now = 0


class Session:
    """One client's records on the disk tier, and the jobs that run for it. It takes a message and returns the answer to
    the client. Lives on the daemon's loop; does not block it. `was_restored`: an earlier daemon opened it, and may have
    stored records whose entries are lost since.

    Attributes:
        records, being_written: by the client's keys; the keys of writes that are queued or run.
        num_of_user: records of all sessions of its user, which share it.
        waiting_bytes: memory taken by requests that are not answered (`limits.py`).
        disk_bytes: bytes taken on disk by records; those being written count with their full length.
        expiry: the end of the grace period; None: it has a connection, or the next daemon gives it one.
        is_ended: the session is over; jobs that still run for it must leave nothing behind.
    """

    def __init__(
        self,
        lease: Lease,
        quota_bytes: int,
        most_queued_bytes: int | None,
        num_of_user: RecordCount,
        disk: LocalTier,
        *,
        was_restored: bool = False,
    ) -> None:
        self.lease = lease
        self._disk = disk
        self._was_restored = was_restored
        self.quota_bytes = quota_bytes
        self.records: dict[int, KeptRecord] = {}
        self.num_of_user = num_of_user
        self.being_written: set[int] = set()
        self.waiting_bytes = 0
        self.disk_bytes = 0
        self.writes = WriteQueue(most_queued_bytes)
        self.is_ended = False
        self.connection: Client | None = None
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

    def has_any_of(self, keys: tuple[int, ...]) -> bool:
        """Whether one of them is a record, or a job for it is queued or runs."""
        return any(key in self.records or key in self._jobs for key in keys)

    async def wait_for(self, keys: frozenset[int] | None) -> None:
        """Return when no job for these keys is queued or runs. None: for any key."""
        if keys is None:
            while self.num_jobs:
                await self._idle.setdefault(None, asyncio.Event()).wait()
            return
        while busy := keys & self._jobs.keys():  # a loop, because a job may begin before this is woken
            await self._idle.setdefault(min(busy), asyncio.Event()).wait()

    async def serve(
        self, message: messages.Write | messages.Read, memory: memoryview
    ) -> messages.Stored | messages.Full | messages.Loaded | messages.Bad | messages.Failed:
        """Store the bytes in `memory`, unless that was done before; or fill it with a record. ProtocolError: it was
        never stored."""
        try:
            if isinstance(message, messages.Read):
                return await self._read(message, memory)
            record = self.records.get(message.key)  # rule 5 of messages.py: it may be sent twice
            if record is None:
                record = await self._store(message, memory)
            return messages.Stored(message.request, record.stored_bytes, record.codec, record.kind, record.checksum)
        except StoreFullError as error:
            self.totals["full"] += 1
            is_quota = isinstance(error, QuotaExceededError)
            figures = (error.disk_bytes, error.disk_budget_bytes)
            return messages.Full(message.request, is_quota, *figures, messages.fitting(error.reason))
        except CorruptDataError as error:
            self.totals["corrupt_records"] += 1
            words = (messages.fitting(each) for each in (error.place, error.expected, error.found))
            return messages.Bad(message.request, *words)
        except StorageIOError as error:
            self.totals["io_errors"] += 1
            words = (messages.fitting(each) for each in (error.place, error.reason))
            return messages.Failed(message.request, messages.fitting(error.operation, messages.MOST_WORD), *words)

    async def free(self, keys: tuple[int, ...]) -> None:
        """Free records; keys that it does not have are no error."""
        for first in range(0, len(keys), _DISCARD_AT_ONCE):
            some = [key for key in dict.fromkeys(keys[first : first + _DISCARD_AT_ONCE]) if key in self.records]
            if not some:
                continue
            for key in some:
                self.disk_bytes -= self.records.pop(key).stored_bytes
            self.num_of_user.now -= len(some)
            await self._disk.discard([self.disk_key(key) for key in some])
            self.totals["discarded_records"] += len(some)

    async def _read(self, message: messages.Read, memory: memoryview) -> messages.Loaded:
        key, num_bytes = message.key, message.num_bytes
        record = self.records.get(key)
        if record is None and self._was_restored:  # it was stored: its entry was dropped as damaged, or was cleared
            raise CorruptDataError(key, "the index", f"a record of {num_bytes} bytes", "none")
        if record is None or record.num_bytes != num_bytes:
            raise ProtocolError(self.peer, f"it asks for {num_bytes} bytes of record {key}, which it has not stored")
        loaded = await self._disk.read(self.disk_key(key), memory)
        self.totals["restored_bytes"] += num_bytes
        self.totals["read_bytes"] += loaded.read_bytes
        return messages.Loaded(message.request, loaded.read_bytes)

    async def _store(self, message: messages.Write, memory: memoryview) -> KeptRecord:
        num_bytes, held_bytes, most = message.num_bytes, self.disk_bytes, self.quota_bytes
        if held_bytes + num_bytes > most:
            reason = "the session's quota is used up"
            raise QuotaExceededError(num_bytes, held_bytes, most, reason=reason, session=self.lease.name)
        if (count := self.num_of_user).now >= count.most:
            reason = f"user {self.lease.uid} has {count.now} records, and --max-records-per-user is {count.most}"
            raise QuotaExceededError(num_bytes, held_bytes, most, reason=reason, session=self.lease.name)
        self.disk_bytes += num_bytes
        count.now += 1
        stored = None
        try:
            kind = Kind(message.dtype, message.itemsize_bytes, message.origin)
            stored = await self._disk.write(self.disk_key(message.key), memory, kind)
        finally:
            self.disk_bytes += (stored.stored_bytes if stored is not None else 0) - num_bytes
            count.now -= stored is None
        taken_bytes = stored.stored_bytes
        record = KeptRecord(num_bytes, taken_bytes, stored.codec, stored.kind, stored.checksum)
        self.records[message.key] = record
        self.totals["spilled_bytes"] += num_bytes
        self.totals["written_bytes"] += taken_bytes
        return record

    def _wake(self, key: int | None) -> None:
        if (idle := self._idle.pop(key, None)) is not None:
            idle.set()
