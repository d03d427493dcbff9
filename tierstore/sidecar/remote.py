"""The disk tier that a daemon keeps. `messages.py` is the protocol, `link.py` keeps the session.

Payload goes through a window of shared memory: a job copies into a slot of it, or out of it, and the daemon reads and
writes the slot.

NOTE [Parts] A long record is sent in parts, and each part is a record of its own to the daemon. So a part is copied
while others are at the drive, a slot is free again when its part is done, and a small window serves tensors of any
size."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import NamedTuple

from ..base.system_words import words_of
from ..disk.allocator import round_up
from ..disk.forking import release_files
from ..disk.jobs import run_job, to_the_end
from ..disk.linux import copy_memory
from ..disk.location import record_checksum, record_seed
from ..disk.parts import pieces, results_of
from ..disk.tier import DiskUsage, Kind, Loaded, Stored
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
from . import messages
from .link import Answer, DaemonLink
from .window import SharedSlab, SharedWindow, WindowSlot

_PAGE_BYTES = 4096
_PART_BYTES = 8 * 2**20  # a record of the daemon's costs some 0.5 ms of CPU, whatever its length
_PARTS_IN_WINDOW = 4  # at least: some at the drive, others being copied
_SHORTEST_PART_BYTES = 2**20  # if the window is so small that fewer fit in

_STILL_IN_MEMORY = "the data is still in memory"
_ADVICE = "raise host_bytes, or give the daemon room: on its drive, by --disk-bytes or --max-write-bytes-per-day"
_STILL_ON_DISK = "the record is still with the daemon and may be asked for again"


class _Part(NamedTuple):
    num_bytes: int
    stored: Stored
    wire_key: int


class RemoteDisk:
    """Keeps records with a daemon. A `DiskTier`; `open` makes one. Link and slab are closed with it.

    All coroutines belong to one loop and do not block it. They raise what `DiskTier` says, and DaemonUnavailableError
    if the daemon has not come back in time: its records are there again when it is; a write's source is still the
    caller's."""

    def __init__(self, link: DaemonLink, slab: SharedSlab, executor: Executor, name: str) -> None:
        self.scratch_bytes = slab.num_bytes
        self._link = link
        self._slab = slab
        self._window = SharedWindow(slab, executor)
        self._executor = executor
        self._name = name
        fitting_bytes = max(slab.num_bytes // _PARTS_IN_WINDOW, min(slab.num_bytes, _SHORTEST_PART_BYTES))
        self._part_bytes = min(_PART_BYTES, fitting_bytes) // _PAGE_BYTES * _PAGE_BYTES
        self._records: dict[int, list[_Part]] = {}
        self._wire_keys = itertools.count(1)
        self._choices: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._disk_bytes = 0
        self._closed_because: str | None = None
        link.on_unavailable = self._window.refuse_waiting
        link.renew_slabs = lambda: to_the_end(self._window.renew())

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
        daemon_uid: int | None = None,
    ) -> RemoteDisk:
        """Begin a session with the daemon at `address`. `name`, `rank`, `pid`: for people and metrics. `executor` runs
        the copies; it is not shut down before `close` has returned.

        Raises:
            ConfigError: the daemon does not allow so large a window.
            DaemonUnavailableError, ProtocolError: there is no daemon, it refuses, or it speaks something else.
            StorageIOError: there is no memory for the window.
        """
        introduction = messages.Open(messages.fitting(name, messages.MOST_WORD), rank, pid)
        link = DaemonLink(address, introduction, reconnect_seconds, daemon_uid)
        async with AsyncExitStack() as made:
            made.push_async_callback(link.close)
            await link.open()
            if window_bytes > link.max_slab_bytes:  # asked first: a slab takes all of its memory as it is made
                allowed = f"the daemon allows {link.max_slab_bytes} bytes of shared memory"
                raise ConfigError("window_bytes", window_bytes, allowed)
            try:
                slab = await run_job(executor, SharedSlab, 0, window_bytes, link.inodes)
            except OSError as error:
                raise StorageIOError("open", "the shared window", words_of(error), "nothing was stored") from error
            made.callback(slab.close)
            link.share(slab)
            made.pop_all()
        return cls(link, slab, executor, name)

    async def write(self, key: int, source: memoryview, kind: Kind) -> Stored:
        self._check_open()
        if key in self._records:
            raise ValueError(f"key {key} is in use")
        return await self._write(key, source, kind)

    async def read(self, key: int, destination: memoryview) -> Loaded:
        self._check_open()
        parts = self._records[key]
        num_bytes = sum(part.num_bytes for part in parts)
        if len(destination) != num_bytes:
            raise ValueError(f"record {key} has {num_bytes} bytes, not {len(destination)}")
        return await self._read(key, parts, destination)

    def confirms(self, key: int, memory: memoryview) -> bool:
        parts = self._records.get(key)
        if parts is None or len(memory) != sum(part.num_bytes for part in parts):
            return False
        return all(self._confirms(part, piece) for part, piece in pieces(parts, memory))

    def _confirms(self, part: _Part, memory: memoryview) -> bool:
        if part.stored.checksum is None:
            return False
        seed = record_seed(self._link.opened.seed, self._link.opened.key_base + part.wire_key)
        return record_checksum(memory, seed) == part.stored.checksum

    async def discard(self, keys: Sequence[int]) -> None:
        """While the daemon is away they are freed when it is back, or with the session."""
        self._check_open()
        records = [self._records[key] for key in keys]
        for key in keys:
            del self._records[key]
        await self._discard([part for parts in records for part in parts])

    def usage(self) -> DiskUsage:
        opened = self._link.opened
        return DiskUsage(
            disk_bytes=self._disk_bytes,
            allocated_bytes=self._disk_bytes,
            budget_bytes=opened.disk_bytes,
            num_records=len(self._records),
            io_mode=f"{opened.io_mode}, by the daemon at {self._link.address}",
        )

    def codec_choices(self) -> Mapping[str, Mapping[str, int]]:
        return {kind: dict(counts) for kind, counts in list(self._choices.items())}

    def abandon_after_fork(self) -> None:
        self._closed_because = "it belongs to the process that this one was forked from"
        release_files(self._link.inodes)

    def end_soon(self) -> None:
        self._link.end_soon()

    async def close(self) -> None:
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
        writes = [self._write_part(piece, kind, len(source)) for piece in self._cut(source)]
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        parts = [outcome for outcome in outcomes if isinstance(outcome, _Part)]
        self._disk_bytes += sum(part.stored.stored_bytes for part in parts)
        try:
            results_of(outcomes)
        except BaseException:
            await self._discard(parts)
            raise
        self._records[key] = parts
        codec, counted_as = parts[0].stored.codec, parts[0].stored.kind
        self._choices[counted_as][codec] += 1
        return Stored(sum(part.stored.stored_bytes for part in parts), codec, counted_as)

    def _cut(self, source: memoryview) -> Iterator[memoryview]:
        """The parts of a record, of nearly the same length: a short rest would cost as much as a whole part."""
        num_parts = max(1, -(-len(source) // self._part_bytes))
        part_bytes = max(1, round_up(-(-len(source) // num_parts)))
        for first in range(0, max(1, len(source)), part_bytes):
            yield source[first : first + part_bytes]

    async def _write_part(self, source: memoryview, kind: Kind, record_bytes: int) -> _Part:
        slot = await self._take(len(source), to_read=False)
        try:
            await self._window.fill(slot, source)
        except BaseException:
            self._window.give_back(slot)
            raise
        wire_key = next(self._wire_keys)  # used once (rule 5): a write that was given up may still be done
        dtype, origin = (messages.fitting(each, messages.MOST_WORD) for each in (kind.dtype, kind.origin))
        what = dtype, max(1, kind.itemsize_bytes), origin
        on_late = partial(self._was_written_late, wire_key, slot)
        answer = await self._link.ask(messages.Write, wire_key, *slot.range, *what, on_late=on_late)
        self._window.give_back(slot)
        if isinstance(answer, messages.Stored):
            stored = Stored(answer.stored_bytes, answer.codec, answer.kind, answer.checksum)
            return _Part(len(source), stored, wire_key)
        if isinstance(answer, messages.Full):
            figures = (record_bytes, answer.disk_bytes, answer.budget_bytes)
            if answer.is_quota:
                raise QuotaExceededError(*figures, reason=answer.reason, session=self._name)
            raise StoreFullError(*figures, reason=answer.reason, advice=_ADVICE)
        raise self._failure(answer, _STILL_IN_MEMORY)

    def _was_written_late(self, wire_key: int, slot: WindowSlot, answer: Answer | None) -> None:
        self._window.give_back(slot)
        if isinstance(answer, messages.Stored):  # the store has kept the bytes, and may have forgotten them since
            self._link.submit(messages.Discard, (wire_key,))

    # --- up -------------------------------------------------------------------------------------------------------

    async def _read(self, key: int, parts: Sequence[_Part], destination: memoryview) -> Loaded:
        reads = (self._read_part(key, part, piece) for part, piece in pieces(parts, destination))
        outcomes = await asyncio.gather(*reads, return_exceptions=True)
        return Loaded(sum(loaded.read_bytes for loaded in results_of(outcomes)))

    async def _read_part(self, key: int, part: _Part, destination: memoryview) -> Loaded:
        slot = await self._take(len(destination), to_read=True)
        give_back = self._window.give_back
        answer = await self._link.ask(messages.Read, part.wire_key, *slot.range, on_late=lambda _: give_back(slot))
        try:
            if isinstance(answer, messages.Loaded):
                await run_job(self._executor, copy_memory, destination, slot.memory)
                return Loaded(answer.read_bytes)
        finally:
            self._window.give_back(slot)
        if isinstance(answer, messages.Bad):
            raise CorruptDataError(key, answer.place, answer.expected, answer.found)
        raise self._failure(answer, _STILL_ON_DISK)

    # --- the end --------------------------------------------------------------------------------------------------

    async def _discard(self, parts: Sequence[_Part]) -> None:
        self._disk_bytes -= sum(part.stored.stored_bytes for part in parts)
        keys = tuple(part.wire_key for part in parts)
        for first in range(0, len(keys), messages.MAX_KEYS):
            with suppress(DaemonUnavailableError):  # it is sent again when the daemon is back; else the lease ends
                await self._link.ask(messages.Discard, keys[first : first + messages.MAX_KEYS])

    async def _take(self, num_bytes: int, *, to_read: bool) -> WindowSlot:
        await self._link.reach()  # else each request in vain would keep a slot, until none is left
        return await self._window.take(num_bytes, to_read=to_read)

    def _failure(self, answer: Answer, kept: str) -> StorageIOError | ProtocolError:
        if isinstance(answer, messages.Failed):
            return StorageIOError(answer.operation, answer.place, answer.reason, kept)
        return ProtocolError(self._link.address, f"{type(answer).__name__} in answer to something else")
