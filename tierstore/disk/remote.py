"""The disk tier that a daemon of this host keeps. `wire.py` says how it is spoken to, `link.py` keeps the session.

Payload goes through a window of shared memory: a job copies a record into a slot of it, or out of it, and the daemon
reads and writes the slot. A record that is longer than the window gets a slab of its own.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple

from .. import wire
from ..errors import (
    ConfigError,
    CorruptDataError,
    DaemonUnavailableError,
    ProtocolError,
    QuotaExceededError,
    StorageIOError,
    StoreClosedError,
    StoreFullError,
)
from .allocator import round_up
from .forking import let_go_of
from .jobs import run_job, to_the_end
from .link import Answer, DaemonLink, Request
from .linux import address_of, copy_memory
from .location import record_hasher, record_seed
from .shared_slab import SharedSlab
from .tier import DiskUsage, Kind, Stored
from .window import Window, WindowSlot

__all__ = ["RemoteDisk"]

_PAGE_BYTES = 4096
_STILL_IN_MEMORY = "the data is still in memory"
_STILL_ON_DISK = "the record is still with the daemon and may be asked for again"
_READ, _WRITE = ("read", _STILL_ON_DISK), ("write", _STILL_IN_MEMORY)


class _Record(NamedTuple):
    """One that is stored; `wire_key` is the daemon's name for it."""

    num_bytes: int
    stored: Stored
    wire_key: int


class _Sent(NamedTuple):
    """A write on its way. A record that is written again has another key there: keys are used once (rule 5)."""

    request: Request
    slot: WindowSlot
    wire_key: int


class RemoteDisk:
    """Keeps records with a daemon. A `DiskTier`; `open` makes one.

    All coroutines belong to one loop and do not block it. What they raise beside what `DiskTier` says:
    DaemonUnavailableError, if the daemon is lost and has not come back in time. What it had stored is there again
    when it is back; the source of a write is still the caller's.

    Attributes:
        scratch_bytes: the window; slabs of longer records are held beside it while they move.
    """

    def __init__(self, link: DaemonLink, slab: SharedSlab, executor: Executor, name: str) -> None:
        self.scratch_bytes = slab.num_bytes
        self._link = link
        self._slab = slab
        self._window = Window(slab)
        self._executor = executor
        self._name = name
        self._records: dict[int, _Record] = {}
        self._given_up: dict[int, _Sent] = {}  # writes that may still be done, by key
        self._wire_keys = itertools.count(1)
        self._slab_numbers = itertools.count(slab.number + 1)
        self._choices: dict[str, dict[str, int]] = {}
        self._disk_bytes = 0
        self._closed_because: str | None = None
        self._long_bytes = 0  # of slabs beside the window
        self._waiting_for_long: list[asyncio.Future[None]] = []
        link.on_unavailable = self._refuse_waiting

    @classmethod
    async def open(
        cls,
        address: str,
        *,
        name: str,
        rank: int | None,
        pid: int,
        window_bytes: int,
        reconnect_seconds: float,
        executor: Executor,
    ) -> RemoteDisk:
        """Begin a session with the daemon at `address`.

        Args:
            address: of its socket.
            name, rank, pid: for people and metrics.
            window_bytes: of shared memory that is held for what moves.
            reconnect_seconds: for how long a lost daemon is waited for.
            executor: runs the copies; not shut down before `close` has returned.

        Raises:
            ConfigError: the daemon does not allow so large a window.
            DaemonUnavailableError, ProtocolError: see `DaemonLink.open`.
            StorageIOError: there is no memory for the window.
        """
        link = DaemonLink(address, wire.Open(wire.fitting_word(name), rank, pid), reconnect_seconds)
        try:
            slab = await run_job(executor, partial(SharedSlab, 0, window_bytes, link.inodes, is_lasting=True))
        except OSError as error:
            raise StorageIOError("open", "the shared window", str(error), "nothing was stored") from error
        try:
            await link.open()
            if slab.num_bytes > link.max_slab_bytes:
                await link.close()
                allowed = f"the daemon allows {link.max_slab_bytes} bytes of shared memory"
                raise ConfigError("window_bytes", window_bytes, allowed)
        except BaseException:
            slab.close()
            raise
        link.share(slab)
        return cls(link, slab, executor, name)

    async def write(self, key: int, source: memoryview, kind: Kind) -> Stored:
        """See `DiskTier.write`; also StoreClosedError and, for a key in use, ValueError."""
        self._check_open()
        if key in self._records:
            raise ValueError(f"key {key} is in use")
        return await to_the_end(self._write(key, source, kind), undo=partial(self.discard, (key,)))

    async def read(self, key: int, destination: memoryview) -> int:
        """See `DiskTier.read`; also StoreClosedError, KeyError, and ValueError for a wrong length."""
        self._check_open()
        record = self._records[key]
        if len(destination) != record.num_bytes:
            raise ValueError(f"record {key} has {record.num_bytes} bytes, not {len(destination)}")
        return await to_the_end(self._read(key, record.wire_key, destination))

    def confirms(self, key: int, memory: memoryview) -> bool:
        """See `DiskTier.confirms`."""
        record = self._records.get(key)
        if record is None or record.stored.checksum is None or len(memory) != record.num_bytes:
            return False
        hasher = record_hasher(record_seed(self._link.opened.seed, self._link.opened.key_base + record.wire_key))
        hasher.update(memory)
        return hasher.intdigest() == record.stored.checksum

    async def discard(self, keys: Sequence[int]) -> None:
        """See `DiskTier.discard`; no read of these keys may be in progress. Also StoreClosedError.

        While the daemon is away they are freed when it is back, or with the session.
        """
        self._check_open()
        records = [self._records[key] for key in keys]
        for key, record in zip(keys, records, strict=True):
            del self._records[key]
            self._disk_bytes -= record.stored.stored_bytes
        await to_the_end(self._discard([record.wire_key for record in records]))

    def usage(self) -> DiskUsage:
        """What is held now for this client. Any thread; does not block."""
        opened = self._link.opened
        return DiskUsage(
            disk_bytes=self._disk_bytes,
            allocated_bytes=self._disk_bytes,
            budget_bytes=opened.disk_bytes,
            num_records=len(self._records),
            io_mode=f"{opened.io_mode}, by the daemon at {self._link.address}",
        )

    def codec_choices(self) -> Mapping[str, Mapping[str, int]]:
        """How many of this client's records were stored with each codec, by kind. Any thread."""
        return {kind: dict(counts) for kind, counts in list(self._choices.items())}

    def abandon_after_fork(self) -> None:
        """In a forked child: let go of the parent's socket and memory. Waits for nothing and takes no lock."""
        self._closed_because = "it belongs to the process that this one was forked from"
        let_go_of(self._link.inodes)

    async def close(self) -> None:
        """End the session; idempotent. No other call may be in progress."""
        if self._closed_because is None:
            self._closed_because = "it was closed"
            await to_the_end(self._close())

    async def _close(self) -> None:
        await self._link.close()
        self._records.clear()
        self._disk_bytes = 0
        self._slab.close()

    def _check_open(self) -> None:
        if self._closed_because is not None:
            raise StoreClosedError(self._link.address, self._closed_because)

    # --- down -----------------------------------------------------------------------------------------------------

    async def _write(self, key: int, source: memoryview, kind: Kind) -> Stored:
        wire_key, answer = await self._answer_to_write(key, source, kind)
        if isinstance(answer, wire.Stored):
            stored = Stored(answer.stored_bytes, answer.codec, answer.kind, answer.checksum)
            self._records[key] = _Record(len(source), stored, wire_key)
            self._disk_bytes += stored.stored_bytes
            counts = self._choices.setdefault(stored.kind, {})
            counts[stored.codec] = counts.get(stored.codec, 0) + 1
            return stored
        if isinstance(answer, wire.Full):
            figures = (len(source), answer.disk_bytes, answer.budget_bytes)
            if answer.is_quota:
                raise QuotaExceededError(*figures, reason=answer.reason, session=self._name)
            raise StoreFullError(*figures, reason=answer.reason)
        if isinstance(answer, wire.Failed):
            raise StorageIOError(answer.operation, answer.place, answer.reason, _STILL_IN_MEMORY)
        raise self._unexpected(answer)

    async def _answer_to_write(self, key: int, source: memoryview, kind: Kind) -> tuple[int, Answer]:
        # One that was given up is of the same bytes: a key of the store's has no others.
        sent = self._given_up.pop(key, None) or await self._send_write(key, source, kind)
        try:
            answer = await self._link.answer_to(sent.request)
        except DaemonUnavailableError:
            if self._link.is_pending(sent.request):
                self._given_up[key] = sent
            raise
        self._give_back(sent.slot)
        return sent.wire_key, answer

    async def _send_write(self, key: int, source: memoryview, kind: Kind) -> _Sent:
        slot = await self._take(source, to_read=False)
        try:
            await run_job(self._executor, copy_memory, slot.memory, source)
        except BaseException:
            self._give_back(slot)
            raise
        wire_key = next(self._wire_keys)

        def message(request: int) -> wire.Write:
            about = (wire.fitting_word(kind.dtype), max(1, kind.itemsize_bytes), wire.fitting_word(kind.origin))
            return wire.Write(request, wire_key, slot.slab.number, slot.offset, slot.num_bytes, *about)

        request = self._link.submit(message, partial(self._was_written_late, key, wire_key, slot))
        return _Sent(request, slot, wire_key)

    def _was_written_late(self, key: int, wire_key: int, slot: WindowSlot, answer: Answer | None) -> None:
        self._given_up.pop(key, None)
        self._give_back(slot)
        if isinstance(answer, wire.Stored):  # the store has kept the bytes, and may have forgotten them since
            self._link.submit(partial(_discard_of, (wire_key,)), lambda _: None)

    # --- up -------------------------------------------------------------------------------------------------------

    async def _read(self, key: int, wire_key: int, destination: memoryview) -> int:
        slot = await self._take(destination, to_read=True)

        def message(request: int) -> wire.Read:
            return wire.Read(request, wire_key, slot.slab.number, slot.offset, slot.num_bytes)

        request = self._link.submit(message, lambda _: self._give_back(slot))
        answer = await self._link.answer_to(request)
        try:
            if isinstance(answer, wire.Loaded):
                await run_job(self._executor, copy_memory, destination, slot.memory)
                return answer.read_bytes
        finally:
            self._give_back(slot)
        if isinstance(answer, wire.Bad):
            raise CorruptDataError(key, answer.place, answer.expected, answer.found)
        if isinstance(answer, wire.Failed):
            raise StorageIOError(answer.operation, answer.place, answer.reason, _STILL_ON_DISK)
        raise self._unexpected(answer)

    # --- the end --------------------------------------------------------------------------------------------------

    async def _discard(self, keys: Sequence[int]) -> None:
        for first in range(0, len(keys), wire.MAX_KEYS):
            some = tuple(keys[first : first + wire.MAX_KEYS])
            request = self._link.submit(partial(_discard_of, some), lambda _: None)
            try:
                await self._link.answer_to(request)
            except DaemonUnavailableError:
                pass  # it is sent again when the daemon is back; if that is never, the lease ends

    # --- slots ----------------------------------------------------------------------------------------------------

    async def _take(self, memory: memoryview, *, to_read: bool) -> WindowSlot:
        """A slot for as many bytes, at the same address modulo 4096: the daemon writes it as it would the memory."""
        await self._link.reach()  # else each attempt in vain would keep a slot, until there is none to wait for
        num_bytes, phase = len(memory), address_of(memory) % _PAGE_BYTES
        if num_bytes + phase <= self._window.num_bytes:
            return await self._window.take(num_bytes, to_read=to_read, phase=phase)
        return await self._take_long(num_bytes, phase, *(_READ if to_read else _WRITE))

    async def _take_long(self, num_bytes: int, phase: int, operation: str, kept: str) -> WindowSlot:
        """A slab of its own. Waits while the daemon allows no more beside those that there are."""
        slab_bytes, place = round_up(num_bytes + phase), f"a shared slab of {num_bytes} bytes"
        room_bytes = self._link.max_slab_bytes - self._slab.num_bytes
        if slab_bytes > room_bytes:
            raise StorageIOError(operation, place, f"the daemon allows {room_bytes} beside the window", kept)
        while self._long_bytes + slab_bytes > room_bytes:
            self._waiting_for_long.append(asyncio.get_running_loop().create_future())
            await self._waiting_for_long[-1]
        self._long_bytes += slab_bytes
        try:
            slab = await run_job(self._executor, SharedSlab, next(self._slab_numbers), slab_bytes, self._link.inodes)
        except OSError as error:
            self._end_long(slab_bytes)
            raise StorageIOError(operation, place, str(error), kept) from error
        self._link.share(slab)
        return WindowSlot(slab, phase, num_bytes)

    def _end_long(self, slab_bytes: int) -> None:
        self._long_bytes -= slab_bytes
        waiting, self._waiting_for_long = self._waiting_for_long, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _refuse_waiting(self, error: Callable[[], DaemonUnavailableError]) -> None:
        """A lost daemon gives back nothing that could be waited for."""
        self._window.refuse_waiting(error)
        waiting, self._waiting_for_long = self._waiting_for_long, []
        for future in waiting:
            if not future.done():
                future.set_exception(error())

    def _give_back(self, slot: WindowSlot) -> None:
        """The daemon does not touch it any more."""
        if slot.slab is self._slab:
            self._window.give_back(slot)
        else:
            self._link.unshare(slot.slab)
            slot.slab.close()
            self._end_long(slot.slab.num_bytes)

    def _unexpected(self, answer: Answer) -> ProtocolError:
        return ProtocolError(self._link.address, f"{type(answer).__name__} in answer to something else")


def _discard_of(keys: tuple[int, ...], request: int) -> wire.Discard:
    return wire.Discard(request, keys)
