"""The disk tier on a directory of this machine: extents for what is large, LMDB for what is small.

::

    write ─► codec ─► extent ─► one job: encode + checksum + write ─► index commit ─► Stored
                 └──► small: one value ─────────────────────────────────┘
    read  ─► location in memory ─► one job: read + checksum + decode

All bookkeeping happens on the loop. The pool's jobs only move bytes; one that has written an extent also enters it in
the index, if the *file layout* (`file_layout.py`: where the files live) outlives the process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import msgspec

from ..base.config import check_directory, format_bytes
from ..base.defaults import NUM_AT_ONCE
from ..base.threads import IoThreads
from ..errors import ConfigError, StoreClosedError, StoreFullError
from .allocator import ALIGNMENT_BYTES, round_up
from .boundary import naming_the_limit, translated
from .budget import DiskBudget, WriteAllowance, value_charge_bytes
from .codec.choice import WriteOrder
from .codec.codec import NO_CODEC, parse_codec
from .codec.policy import CodecPolicy
from .entries import IndexEntries
from .extents import Extent, ExtentSpace
from .file_layout import FileLayout, UnnamedFileLayout
from .forking import release_files
from .index import Fetch, Outcome, Put
from .jobs import run_job, to_the_end
from .location import FileRange, Location, Written, record_seed
from .native import LEAST_BYTES, NativeTransfers, is_native
from .records import decode_small_value, is_record, read_record, write_record
from .reserve import Reserve
from .scratch import SCRATCH_BYTES, ScratchPool
from .segments import detect_io_mode
from .tier import DiskUsage, DriveUsage, Kind, Loaded, Stored

_LONGEST_VALUE_BYTES = 2**30  # LMDB takes values below 4 GiB, and holds one in memory until it is committed
_QUICK_BYTES = 128 * 2**10  # checksummed on the loop in microseconds: a hop to the pool would cost more
_STILL_IN_MEMORY = "the data is still in memory"
_STILL_ON_DISK = "the record is still on disk and may be asked for again"
_ADVICE_ON_INDEX = "raise disk_bytes, host_bytes or `ulimit -v`"
_ADVICE_ON_ALLOWANCE = "wait, or raise max_write_bytes_per_day or host_bytes"


class _Record(NamedTuple):
    key: int
    source: memoryview
    kind: Kind
    order: WriteOrder


class LocalDisk:
    """Keeps records under a directory. A `DiskTier`, empty at first unless its file layout has kept an earlier one's
    records.

    All coroutines belong to one loop and do not block it; the constructor blocks for some milliseconds. They must not
    be cancelled: they own extents and buffers until their jobs have ended. A record may have zero bytes.
    After `close` all calls raise StoreClosedError; a key in use or a wrong length is the caller's error (ValueError).

    Args:
        inline_bytes: records up to this length live in LMDB, longer ones in extents; None: all of up to 1 GiB do.
        executor: runs the jobs; not shut down before `close` has returned.
        num_at_once: how many records of each direction are at the device, encoded or decoded at once, at most.
        num_turns: the same, where the caller limits it too, and none is to wait here; None: `num_at_once`.
        layout: not opened yet; closed with the tier. None: under `directory`, without names.

    Raises:
        ConfigError: an option is not usable.
        StorageIOError, StoreFullError: nothing can be opened there. In both cases nothing is left open but `layout`,
            which the caller closes; the records in it are still there.
    """

    def __init__(
        self,
        directory: Path,
        *,
        disk_bytes: int,
        inline_bytes: int | None,
        codec: str,
        checksum: bool,
        executor: Executor,
        num_at_once: int = NUM_AT_ONCE,
        num_turns: int | None = None,
        layout: FileLayout | None = None,
        max_write_bytes_per_day: int | None = None,
    ) -> None:
        fixed = parse_codec(codec)
        self._directory = check_directory(directory)
        limit = max_write_bytes_per_day
        sizes = {"disk_bytes": disk_bytes, "inline_bytes": inline_bytes, "max_write_bytes_per_day": limit}
        for option, num_bytes in sizes.items():
            if num_bytes is not None and num_bytes < 0:
                raise ConfigError(option, num_bytes, "give 0 or more bytes")
        self._allowance = None if limit is None else WriteAllowance(limit, monotonic())
        num_turns = num_at_once if num_turns is None else num_turns
        self.scratch_bytes = 2 * num_turns * SCRATCH_BYTES
        self._inline_bytes = inline_bytes
        self._has_checksums = checksum
        self._executor = executor
        self._closed_because: str | None = None
        self._written_bytes = self._read_bytes = 0
        self._policy = policy = CodecPolicy(fixed, num_at_once)
        self._write_turns = ScratchPool(num_turns, partial(policy.clock.timed, "write"))
        self._read_turns = ScratchPool(num_turns, partial(policy.clock.timed, "read"))
        self._layout = UnnamedFileLayout(self._directory) if layout is None else layout
        with translated("open", str(self._directory), "nothing was stored"):
            self._mode = detect_io_mode(self._layout.directory)
            # Not where somebody has put an executor of their own before the store's: each transfer is theirs to see.
            uses_native = isinstance(executor, IoThreads) and is_native()
            self._native = NativeTransfers(num_at_once, policy.clock.new_speeds) if uses_native else None
            try:
                self._open_layout(disk_bytes)
            except BaseException:
                if self._native is not None:
                    self._native.close()
                raise

    def _open_layout(self, disk_bytes: int) -> None:
        self._reserve = Reserve(self._layout.directory, disk_bytes)  # first: nothing may fail after the layout is open
        try:
            found = self._layout.open(disk_bytes, self._mode)
        except BaseException:
            self._reserve.close()
            raise
        self.session, self.leases = found.session, found.leases
        self._index, self._locations = found.index, found.locations
        self._budget = DiskBudget(round_up(disk_bytes), found.index.map_bytes)
        value_bytes = sum(each.taken_bytes for each in found.locations.values() if each.segment is None)
        segment_bytes = sum(segment.num_bytes for segment in found.segments)
        self._budget.rebuild(segment_bytes, value_bytes, found.index.allocated_bytes)
        self._space = ExtentSpace(self._layout, self._budget, self._mode, self._executor)
        self._space.rebuild(found.segments, found.spans)
        has_extents = self._layout.outlives
        self._reserve.keep()  # after it: what is there may need the last room of the drive
        self._entries = IndexEntries(
            found.index, self._executor, self._space, self._budget, self._reserve, has_extents=has_extents
        )

    async def write(self, key: int, source: memoryview, kind: Kind) -> Stored:
        """The allowance must have room for the whole record as if it were not encoded."""
        if self._closed_because is not None:
            self._check_open()
        if key in self._locations:
            raise ValueError(f"key {key} is in use")
        allowance, num_bytes = self._allowance, len(source)
        if allowance is not None and not allowance.take(num_bytes, now := monotonic()):
            reason = allowance.refusal(num_bytes, now)
            raise StoreFullError(num_bytes, *self._space.usage(), reason=reason, advice=_ADVICE_ON_ALLOWANCE)
        try:
            if self._entries.undeleted:
                await self._entries.delete({})
            record = self._ordered(key, source, kind)
            if num_bytes > (_LONGEST_VALUE_BYTES if self._inline_bytes is None else self._inline_bytes):
                stored = await self._store_in_extent(record)
            else:
                stored = await self._store_as_value(record)
        except StoreFullError as error:
            if allowance is not None:
                allowance.give_back(num_bytes)
            raise naming_the_limit(error, self._directory) from error.__cause__
        if allowance is not None:
            allowance.give_back(num_bytes - stored.stored_bytes)
        self._written_bytes += stored.stored_bytes
        return stored

    async def read(self, key: int, destination: memoryview) -> Loaded:
        if self._closed_because is not None:
            self._check_open()
        location = self._locations[key]
        if len(destination) != location.logical_bytes:
            raise ValueError(f"record {key} has {location.logical_bytes} bytes, not {len(destination)}")
        seed = record_seed(self.session, key) if self._has_checksums else None
        if location.offset is None:
            return await self._read_small(key, location, seed, destination)
        if location.segment is None:
            where = "the index's file"
            place = FileRange(self._index.file.fileno(), location.offset, location.encoded_bytes, 1)
        else:
            where, segment = f"segment {location.segment}", self._space.segments[location.segment]
            place = FileRange(segment.file.fileno(), location.offset, location.taken_bytes, ALIGNMENT_BYTES)
        address = 0 if self._native is None else self._native.address_to_read(location, destination)
        try:
            if self._native is not None and address:
                loaded = await self._native.read(place, location, seed, destination, address)
            else:
                arguments = place, location, seed, destination, self._read_turns
                loaded = await run_job(self._executor, read_record, *arguments)
        except Exception:
            with translated("read", f"{where} at offset {place.offset}", _STILL_ON_DISK, key=key):
                raise
        self._policy.learn_read(location.logical_bytes, loaded)
        self._read_bytes += loaded.read_bytes
        return loaded

    def confirms(self, key: int, memory: memoryview) -> bool:
        location = self._locations.get(key)
        return location is not None and is_record(location, record_seed(self.session, key), memory)

    async def discard(self, keys: Sequence[int]) -> None:
        self._check_open()
        locations = {key: self._locations[key] for key in keys}
        for key in locations:
            del self._locations[key]
        await self._entries.delete(locations)

    def usage(self) -> DiskUsage:
        disk_bytes, budget_bytes = self._space.usage()
        return DiskUsage(
            disk_bytes=disk_bytes,
            allocated_bytes=self._budget.segment_bytes + self._index.allocated_bytes,
            budget_bytes=budget_bytes,
            num_records=len(self._locations),
            io_mode=self._io_mode(),
            write_allowance_bytes=None if self._allowance is None else self._allowance.left_bytes(monotonic()),
        )

    def _io_mode(self) -> str:
        """LMDB reads and writes by way of the page cache, whatever extents do."""
        longest_bytes = _LONGEST_VALUE_BYTES if self._inline_bytes is None else self._inline_bytes
        if not self._mode.direct or longest_bytes <= _QUICK_BYTES:
            return self._mode.description
        return f"buffered up to {format_bytes(longest_bytes)} (inline_bytes), {self._mode.description} above"

    def drives(self) -> list[DriveUsage]:
        day_bytes = None if self._allowance is None else self._allowance.day_bytes
        moved: dict[str, Any] = {"written_bytes": self._written_bytes, "read_bytes": self._read_bytes}
        return [DriveUsage(**asdict(self.usage()), **moved, path=str(self._directory), write_day_bytes=day_bytes)]

    @property
    def damaged_indexes(self) -> Mapping[str, Exception]:
        """By directory, the damage that a change has found in the index: after it, changes may fail, but records in
        extents can be read."""
        damage = self._index.damage
        return {} if damage is None else {str(self._directory): damage}

    @property
    def is_empty(self) -> bool:
        """Whether it holds no record, and its index has refused no deletion that is still to be done."""
        return not (self._locations or self._entries.undeleted)

    def found_locations(self) -> dict[int, Location]:
        """A copy of where each record lies, by key."""
        return dict(self._locations)

    async def put_lease(self, number: int, blob: bytes) -> None:
        """Keep a few bytes under a number; returns when they are committed. On StoreFullError, StorageIOError and
        StoreClosedError, what was there still is."""
        self._check_open()
        await self._entries.put_lease(number, blob)

    async def delete_lease(self, number: int) -> None:
        """Returns when it is committed; where the index refuses, it is tried again with the next discard or write."""
        self._check_open()
        await self._entries.delete_lease(number)

    async def close(self, *, keep: bool = False) -> None:
        """As `DiskTier.close`. `keep`: leave named files for the next process, unless the index is damaged."""
        if self._closed_because is None:
            self._closed_because = "it was closed"
            await to_the_end(self._close(keep and not self.damaged_indexes))

    def codec_choices(self) -> Mapping[str, Mapping[str, int]]:
        return self._policy.choices()

    def abandon_after_fork(self) -> None:
        self._closed_because = "it belongs to the process that this one was forked from"
        release_files({self._index.inode, self._reserve.inode, *self._space.inodes, *self._layout.inodes})
        if self._native is not None:
            self._native.abandon_after_fork()

    def _check_open(self) -> None:
        if self._closed_because is not None:
            raise StoreClosedError(str(self._directory), self._closed_because)

    async def _close(self, keep: bool) -> None:
        async with AsyncExitStack() as parts:  # each is closed even if one before it cannot be
            parts.push_async_callback(run_job, self._executor, partial(self._layout.close, keep=keep))
            parts.push_async_callback(run_job, self._executor, self._index.close)
            parts.callback(self._reserve.close)
            parts.push_async_callback(self._space.close, keep=keep)
            if self._native is not None:
                parts.callback(self._native.close)
            await self._entries.settle()
            self._locations.clear()

    # --- one record -----------------------------------------------------------------------------------------------

    def _ordered(self, key: int, source: memoryview, kind: Kind) -> _Record:
        num_bytes, policy = len(source), self._policy
        seed = record_seed(self.session, key) if self._has_checksums else None
        used_bytes = self._space.used_bytes + self._budget.value_bytes
        is_space_short = used_bytes + num_bytes > self._budget.limit_bytes // 8 * 7
        if policy.stays_raw(kind, num_bytes) and not is_space_short:
            return _Record(key, source, kind, WriteOrder(NO_CODEC, max(1, kind.itemsize_bytes), seed))
        kind = policy.kind_of(kind, source)
        return _Record(key, source, kind, policy.order(kind, num_bytes, seed, is_space_short=is_space_short))

    async def _store_as_value(self, record: _Record) -> Stored:
        num_bytes = len(record.source)
        charge_bytes = value_charge_bytes(num_bytes)  # what encoding saves is given back
        may_be_extent = self._inline_bytes is not None and num_bytes > 0
        while not self._budget.add_value(charge_bytes, may_be_extent=may_be_extent):
            if may_be_extent:  # it does not wait for room in the index
                return await self._store_in_extent(record)
            self._space.free_budget_for(charge_bytes)
            if not await self._space.wait_for_news():
                raise StoreFullError(num_bytes, *self._space.usage(), advice=_ADVICE_ON_INDEX)
        order, job = record.order, (None, record.source, record.order, self._write_turns)
        try:
            if order.codec == NO_CODEC and not order.probe and num_bytes <= _QUICK_BYTES:
                written = write_record(*job)
            else:
                written = await run_job(self._executor, write_record, *job)
        except BaseException:
            self._budget.remove_value(charge_bytes)
            raise
        self._budget.remove_value(charge_bytes - value_charge_bytes(written.encoded_bytes))
        return await self._enter(record, written, None)

    async def _store_in_extent(self, record: _Record) -> Stored:
        num_bytes, order = len(record.source), record.order
        extent = self._space.take_at_once(num_bytes) or await self._take_extent(record)
        descriptor = self._space.segments[extent.segment].file.fileno()
        place = FileRange(descriptor, extent.offset, extent.num_bytes, ALIGNMENT_BYTES)
        is_raw, outcome = order.codec == NO_CODEC and not order.probe, None
        if not is_raw:
            self._space.promise()  # encoding gives a tail back
        try:
            if is_raw and self._native is not None and num_bytes >= LEAST_BYTES:
                written = await self._native.write(place, record.source, order)
            else:
                written, outcome = await run_job(self._executor, self._fill_and_enter, record, place, extent)
        except BaseException:
            self._space.give_back(extent)
            with self._write_errors(record, f"segment {extent.segment} at offset {extent.offset}"):
                raise
        finally:
            if not is_raw:
                self._space.settle_promise()
        if written.encoded_bytes < num_bytes:
            extent = self._space.trim(extent, written.encoded_bytes)
        return await self._enter(record, written, extent, outcome)

    async def _take_extent(self, record: _Record) -> Extent:
        """As `ExtentSpace.take`; where there is no room, freed small records give theirs back first."""
        num_bytes = len(record.source)
        with self._write_errors(record, "a new segment"):
            try:
                return await self._space.take(num_bytes)
            except StoreFullError:
                if not await self._entries.give_back_space():
                    raise
            return await self._space.take(num_bytes)

    def _fill_and_enter(self, record: _Record, place: FileRange, extent: Extent) -> tuple[Written, Outcome | None]:
        """A job: write the record, and enter it in the index at once."""
        written = write_record(place, record.source, record.order, self._write_turns)
        location = _location_of(record, written, extent.trimmed(written.encoded_bytes))
        if not self._entries.has_extents:
            return written, None
        return written, self._entries.commit_now(Put(record.key, location, None))

    async def _enter(
        self, record: _Record, written: Written, extent: Extent | None, outcome: Outcome | None = None
    ) -> Stored:
        """Commit a record to the index, if it belongs there and its job has not done so; after that it exists. If that
        fails, the space that it took is free again."""
        location = _location_of(record, written, extent)
        if extent is None or self._entries.has_extents:
            outcome = await self._entries.put(Put(record.key, location, written.value), outcome)
            if outcome.error is not None:
                self._entries.free(location)
                with self._write_errors(record, "the index"):
                    raise outcome.error
            if extent is None:
                location = msgspec.structs.replace(location, offset=outcome.value_offset)
        self._locations[record.key] = location
        is_raw, times = written.codec == NO_CODEC, (written.write_seconds, written.cpu_seconds)
        codec = NO_CODEC.family if is_raw else str(written.codec)
        kind = self._policy.learn_written(record.kind, len(record.source), record.order, written, codec)
        return Stored(location.taken_bytes, codec, kind, written.checksum if is_raw else None, *times)

    def _write_errors(self, record: _Record, place: str) -> AbstractContextManager[None]:
        num_bytes, usage = len(record.source), self._space.usage()
        return translated("write", place, _STILL_IN_MEMORY, key=record.key, num_bytes=num_bytes, usage=usage)

    async def _read_small(self, key: int, location: Location, seed: int | None, destination: memoryview) -> Loaded:
        receive = partial(decode_small_value, location, seed, destination, self._read_turns)
        outcome = await self._entries.submit(Fetch(key, receive))
        if outcome.error is not None:
            with translated("read", "the index", _STILL_ON_DISK, key=key):
                raise outcome.error
        self._read_bytes += location.encoded_bytes
        return Loaded(location.encoded_bytes)


def _location_of(record: _Record, written: Written, extent: Extent | None) -> Location:
    return Location(
        segment=None if extent is None else extent.segment,
        offset=None if extent is None else extent.offset,
        taken_bytes=value_charge_bytes(written.encoded_bytes) if extent is None else extent.num_bytes,
        encoded_bytes=written.encoded_bytes,
        logical_bytes=len(record.source),
        codec=written.codec.family,
        level=written.codec.level,
        itemsize_bytes=record.order.itemsize_bytes,
        head_bytes=written.head_bytes,
        checksum=written.checksum,
    )
