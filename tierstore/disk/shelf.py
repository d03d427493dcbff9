"""Stores and loads one record: codec, space, job, index. Only `LocalDisk` calls it."""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import msgspec

from ..errors import StoreFullError
from .allocator import ALIGNMENT_BYTES
from .boundary import translated
from .budget import DiskBudget, value_charge_bytes
from .codec.codec import NO_CODEC
from .codec.policy import CodecPolicy
from .entries import IndexEntries
from .extents import Extent, ExtentSpace
from .index import Fetch, Index, Outcome, Put
from .jobs import run_job
from .location import Location, record_seed
from .native import NativeTransfers
from .orders import FileRange, WriteOrder, Written
from .records import DoesNotFitError, decode_small_value, is_record, make_value, read_record, write_record
from .scratch import ScratchTurns
from .tier import Kind, Loaded, Stored

_LONGEST_VALUE_BYTES = 2**30  # LMDB takes values below 4 GiB, and holds one in memory until it is committed
_QUICK_BYTES = 128 * 2**10  # checksummed on the loop in microseconds: a hop to the pool would cost more
_BEST_HOPE = 8  # encoding is not tried if the record is longer than this many times the extent
_STILL_IN_MEMORY = "the data is still in memory"
_STILL_ON_DISK = "the record is still on disk and may be asked for again"


class _Record(NamedTuple):
    key: int
    source: memoryview
    kind: Kind
    order: WriteOrder


class _Filled(NamedTuple):
    written: Written
    outcome: Outcome | None  # of entering it in the index; None: that was not tried


@dataclass(eq=False, slots=True)
class RecordShelf:
    """Puts records into extents and the index and gets them out. Lives on one loop; does not block it.

    Its coroutines must not be cancelled: they own extents and buffers until their jobs have ended. `locations`: where
    each live record lies; the shelf changes it.
    """

    locations: dict[int, Location]
    index: Index
    entries: IndexEntries
    space: ExtentSpace
    budget: DiskBudget
    policy: CodecPolicy
    executor: Executor
    inline_bytes: int | None
    session: int
    has_checksums: bool
    turns: ScratchTurns
    native: NativeTransfers | None

    async def write(self, key: int, source: memoryview, kind: Kind) -> Stored:
        if self.entries.has_undeleted:
            await self.entries.delete({})
        num_bytes = len(source)
        seed = self._seed_of(key)
        is_space_short = self.space.usage()[0] + num_bytes > self.budget.limit_bytes // 8 * 7
        kind = self.policy.kind_of(kind, source)
        order = self.policy.order(kind, num_bytes, seed, is_space_short=is_space_short)
        record = _Record(key, source, kind, order)
        if num_bytes <= (_LONGEST_VALUE_BYTES if self.inline_bytes is None else self.inline_bytes):
            has_other_home = self.inline_bytes is not None and num_bytes > 0
            if await self._charge_value(num_bytes, has_other_home=has_other_home):
                return await self._write_value(record)
            if not has_other_home:
                raise StoreFullError(num_bytes, *self.space.usage())
        return await self._write_extent(record)

    async def _charge_value(self, num_bytes: int, *, has_other_home: bool) -> bool:
        """Count a value against the budget; False if there is no room, even after all space on its way back came. A
        value that may live in an extent as well does not wait."""
        charge_bytes = value_charge_bytes(num_bytes)
        while not self.budget.add_value(charge_bytes, has_other_home=has_other_home):
            if not has_other_home:
                self.space.free_budget_for(charge_bytes)
            if has_other_home or not await self.space.wait_for_news():
                return False
        return True

    async def _write_value(self, record: _Record) -> Stored:
        """Its full length was charged; the charge for what encoding saves is given back."""
        charge_bytes = value_charge_bytes(len(record.source))
        try:
            order = record.order
            if order.codec == NO_CODEC and not order.probe and len(record.source) <= _QUICK_BYTES:
                written = make_value(record.source, record.order, self.turns.writes)
            else:
                written = await run_job(self.executor, make_value, record.source, record.order, self.turns.writes)
        except BaseException:
            self.budget.remove_value(charge_bytes)
            raise
        self.budget.remove_value(charge_bytes - value_charge_bytes(written.encoded_bytes))
        return await self._enter_value(record, written)

    async def _write_extent(self, record: _Record) -> Stored:
        extent, refusal = await self._take(record)
        self.space.promise()  # encoding gives a tail back
        try:
            written, outcome = await self._fill_or_free(record, extent)
        except DoesNotFitError:
            full = refusal or StoreFullError(len(record.source), *self.space.usage())
            reason = f"{full.reason}; encoded, it does not fit into the longest free extent of {extent.num_bytes} bytes"
            raise replace(full, reason=reason) from full.__cause__
        finally:
            self.space.settle_promise()
        if written.value is not None:
            return await self._enter_value(record, written)
        extent = self.space.trim(extent, written.encoded_bytes)
        try:
            return await self._enter(record, written, extent, outcome)
        except BaseException:
            self.space.give_back(extent)
            raise

    async def _fill_or_free(self, record: _Record, extent: Extent) -> _Filled:
        """Fill the extent; it is free again if that fails, or if the record became a value (charged then)."""
        try:
            filled = await self._fill(record, extent, self.inline_bytes or 0)
            charge_bytes = value_charge_bytes(filled.written.encoded_bytes)
            if filled.written.value is not None and not self.budget.add_value(charge_bytes, has_other_home=True):
                filled = await self._fill(record, extent, 0)
        except BaseException:
            self.space.give_back(extent)
            raise
        if filled.written.value is not None:
            self.space.give_back(extent)
        return filled

    async def _enter_value(self, record: _Record, written: Written) -> Stored:
        try:
            return await self._enter(record, written, None)
        except BaseException:
            self.budget.remove_value(value_charge_bytes(written.encoded_bytes))
            raise

    async def _take(self, record: _Record) -> tuple[Extent, StoreFullError | None]:
        """An extent for the record; with why there is no longer one, if it only fits when it is encoded."""
        num_bytes = len(record.source)
        with self._write_errors(record, "a new segment"):
            try:
                return await self.space.take(num_bytes), None
            except StoreFullError as refusal:
                longest_bytes = self.space.largest_free_bytes
                if record.order.codec == NO_CODEC or longest_bytes * _BEST_HOPE < num_bytes:
                    raise
                return await self.space.take(longest_bytes), refusal

    async def _fill(self, record: _Record, extent: Extent, value_limit_bytes: int) -> _Filled:
        descriptor = self.space.descriptor(extent.segment)
        place = FileRange(descriptor, extent.offset, extent.num_bytes, ALIGNMENT_BYTES)
        with self._write_errors(record, f"segment {extent.segment} at offset {extent.offset}"):
            if self.native is not None and self.native.can_write(record.order, len(record.source)):
                return _Filled(await self.native.write(place, record.source, record.order), None)
            return await run_job(self.executor, self._fill_and_enter, record, place, extent, value_limit_bytes)

    def _fill_and_enter(self, record: _Record, place: FileRange, extent: Extent, value_limit_bytes: int) -> _Filled:
        """A job: write the record, and enter it in the index at once, unless it became a value."""
        written = write_record(place, record.source, record.order, value_limit_bytes, self.turns.writes)
        if written.value is not None:
            return _Filled(written, None)
        location = _location_of(record, written, extent.trimmed(written.encoded_bytes))
        if not self.entries.is_for(location):
            return _Filled(written, None)
        return _Filled(written, self.entries.commit_now(Put(record.key, location, None)))

    async def _enter(
        self, record: _Record, written: Written, extent: Extent | None, outcome: Outcome | None = None
    ) -> Stored:
        """Commit a record to the index, if it belongs there and its job has not done so; after that it exists."""
        value = written.value if extent is None else None
        location = _location_of(record, written, extent)
        if self.entries.is_for(location):
            outcome = await self.entries.put(Put(record.key, location, value), outcome)
            with self._write_errors(record, "the index"):
                if outcome.error is not None:
                    raise outcome.error
            if extent is None:
                location = msgspec.structs.replace(location, offset=outcome.value_offset)
        self.locations[record.key] = location
        kind = self.policy.learn_written(record.kind, len(record.source), record.order, written)
        checksum = written.checksum if written.codec == NO_CODEC else None
        return Stored(
            location.taken_bytes, str(written.codec), kind, checksum, written.write_seconds, written.cpu_seconds
        )

    def _seed_of(self, key: int) -> int | None:
        return record_seed(self.session, key) if self.has_checksums else None

    async def read(self, key: int, destination: memoryview) -> Loaded:
        location = self.locations[key]
        seed = self._seed_of(key)
        place = self._place_of(location)
        if place is None:
            receive = partial(
                decode_small_value, location=location, seed=seed, destination=destination, pool=self.turns.reads
            )
            outcome = await self.entries.submit(Fetch(key, receive))
            with translated("read", "the index", _STILL_ON_DISK, key=key):
                if outcome.error is not None:
                    raise outcome.error
            return Loaded(location.encoded_bytes)
        where = "the index's file" if location.segment is None else f"segment {location.segment}"
        with translated("read", f"{where} at offset {place.offset}", _STILL_ON_DISK, key=key):
            if self.native is not None and self.native.can_read(location, destination):
                report = await self.native.read(place, location, seed, destination)
            else:
                report = await run_job(self.executor, read_record, place, location, seed, destination, self.turns.reads)
        self.policy.learn_read(location.logical_bytes, report)
        read_bytes = location.encoded_bytes if location.segment is None else location.taken_bytes
        return Loaded(read_bytes, report.read_seconds, report.cpu_seconds)

    def confirms(self, key: int, memory: memoryview) -> bool:
        location = self.locations.get(key)
        return location is not None and is_record(location, record_seed(self.session, key), memory)

    def _place_of(self, location: Location) -> FileRange | None:
        """Where to read the record in a file; None: it is read through the index."""
        if location.offset is None:
            return None
        if location.segment is None:
            return FileRange(self.index.file.fileno(), location.offset, location.encoded_bytes, 1)
        descriptor = self.space.descriptor(location.segment)
        return FileRange(descriptor, location.offset, location.taken_bytes, ALIGNMENT_BYTES)

    def _write_errors(self, record: _Record, place: str) -> AbstractContextManager[None]:
        num_bytes = len(record.source)
        return translated(
            "write", place, _STILL_IN_MEMORY, key=record.key, num_bytes=num_bytes, usage=self.space.usage()
        )


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
