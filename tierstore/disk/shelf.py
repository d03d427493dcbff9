"""Stores and loads one record: codec, space, job, index. Only `LocalDisk` calls it."""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import msgspec

from ..errors import StoreFullError
from .allocator import ALIGNMENT_BYTES, round_up
from .boundary import translated
from .budget import DiskBudget, value_charge_bytes
from .codec.codec import NO_CODEC
from .codec.policy import CodecPolicy
from .entries import IndexEntries
from .extents import Extent, ExtentSpace
from .home import Home
from .index import Fetch, Outcome, Put
from .jobs import run_job
from .location import FileRange, Location, WriteOrder, Written, record_seed
from .native import NativeTransfers
from .records import DoesNotFitError, decode_small_value, is_record, make_value, read_record, write_record
from .scratch import ScratchTurns
from .segments import IoMode
from .tier import Kind, Loaded, Stored

_LONGEST_VALUE_BYTES = 2**30  # LMDB takes values below 4 GiB, and holds one in memory until it is committed
_QUICK_BYTES = 128 * 2**10  # checksummed on the loop in microseconds: a hop to the pool would cost more
_BEST_HOPE = 8  # encoding is not tried if the record is longer than this many times the extent
_ADVICE_ON_INDEX = "raise disk_bytes, host_bytes or `ulimit -v`"
_STILL_IN_MEMORY = "the data is still in memory"
_STILL_ON_DISK = "the record is still on disk and may be asked for again"


class _Record(NamedTuple):
    key: int
    source: memoryview
    kind: Kind
    order: WriteOrder


class RecordShelf:
    """Puts records into extents and the index and gets them out; for one loop. Its coroutines must not be cancelled:
    they own extents and buffers until their jobs have ended. `locations`: where each live record lies. What `home` has
    kept is taken up; errors are those of its `open`."""

    def __init__(
        self,
        home: Home,
        mode: IoMode,
        policy: CodecPolicy,
        executor: Executor,
        native: NativeTransfers | None,
        *,
        disk_bytes: int,
        inline_bytes: int | None,
        num_at_once: int,
        has_checksums: bool,
    ) -> None:
        found = home.open(disk_bytes, mode)
        self.session, self.leases = found.session, found.leases
        self.index, self.locations = found.index, found.locations
        self.budget = DiskBudget(round_up(disk_bytes), found.index.map_bytes)
        value_bytes = sum(each.taken_bytes for each in found.locations.values() if each.segment is None)
        segment_bytes = sum(segment.num_bytes for segment in found.segments)
        self.budget.take_up(segment_bytes, value_bytes, found.index.allocated_bytes)
        self.space = ExtentSpace(home, self.budget, mode, executor)
        self.space.take_up(found.segments, found.spans)
        self.entries = IndexEntries(found.index, executor, self.space, self.budget, has_extents=home.outlives)
        self.turns = ScratchTurns(num_at_once, policy.clock)
        self._policy = policy
        self._executor = executor
        self._native = native
        self._inline_bytes = inline_bytes
        self._has_checksums = has_checksums

    async def write(self, key: int, source: memoryview, kind: Kind) -> Stored:
        if self.entries.has_undeleted:
            await self.entries.delete({})
        num_bytes = len(source)
        is_space_short = self.space.usage()[0] + num_bytes > self.budget.limit_bytes // 8 * 7
        kind = self._policy.kind_of(kind, source)
        order = self._policy.order(kind, num_bytes, self._seed_of(key), is_space_short=is_space_short)
        record = _Record(key, source, kind, order)
        if num_bytes > (_LONGEST_VALUE_BYTES if self._inline_bytes is None else self._inline_bytes):
            return await self._write_extent(record)
        charge_bytes = value_charge_bytes(num_bytes)
        has_other_home = self._inline_bytes is not None and num_bytes > 0
        while not self.budget.add_value(charge_bytes, has_other_home=has_other_home):
            if has_other_home:  # it does not wait for room in the index
                return await self._write_extent(record)
            self.space.free_budget_for(charge_bytes)
            if not await self.space.wait_for_news():
                raise StoreFullError(num_bytes, *self.space.usage(), advice=_ADVICE_ON_INDEX)
        return await self._write_value(record, charge_bytes)

    async def _write_value(self, record: _Record, charge_bytes: int) -> Stored:
        """`charge_bytes` were charged for its full length; what encoding saves is given back."""
        order = record.order
        try:
            if order.codec == NO_CODEC and not order.probe and len(record.source) <= _QUICK_BYTES:
                written = make_value(record.source, order, self.turns.writes)
            else:
                written = await run_job(self._executor, make_value, record.source, order, self.turns.writes)
        except BaseException:
            self.budget.remove_value(charge_bytes)
            raise
        self.budget.remove_value(charge_bytes - value_charge_bytes(written.encoded_bytes))
        return await self._enter(record, written, None)

    async def _write_extent(self, record: _Record) -> Stored:
        extent, refusal = await self._take(record)
        self.space.promise()  # encoding gives a tail back
        try:
            written, outcome = await self._fill(record, extent, self._inline_bytes or 0)
            charge_bytes = value_charge_bytes(written.encoded_bytes)
            if written.value is not None and not self.budget.add_value(charge_bytes, has_other_home=True):
                written, outcome = await self._fill(record, extent, 0)
        except BaseException as error:
            self.space.give_back(extent)
            if not isinstance(error, DoesNotFitError):
                raise
            full = refusal or StoreFullError(len(record.source), *self.space.usage())
            reason = f"{full.reason}; encoded, it does not fit into the longest free extent of {extent.num_bytes} bytes"
            raise replace(full, reason=reason) from full.__cause__
        finally:
            self.space.settle_promise()
        if written.value is not None:
            self.space.give_back(extent)
            return await self._enter(record, written, None)
        return await self._enter(record, written, self.space.trim(extent, written.encoded_bytes), outcome)

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

    async def _fill(self, record: _Record, extent: Extent, value_limit_bytes: int) -> tuple[Written, Outcome | None]:
        """Write the record; with the outcome of entering it in the index, if that was tried."""
        descriptor = self.space.descriptor(extent.segment)
        place = FileRange(descriptor, extent.offset, extent.num_bytes, ALIGNMENT_BYTES)
        with self._write_errors(record, f"segment {extent.segment} at offset {extent.offset}"):
            if self._native is not None and self._native.can_write(record.order, len(record.source)):
                return await self._native.write(place, record.source, record.order), None
            return await run_job(self._executor, self._fill_and_enter, record, place, extent, value_limit_bytes)

    def _fill_and_enter(
        self, record: _Record, place: FileRange, extent: Extent, value_limit_bytes: int
    ) -> tuple[Written, Outcome | None]:
        """A job: write the record, and enter it in the index at once, unless it became a value."""
        written = write_record(place, record.source, record.order, value_limit_bytes, self.turns.writes)
        if written.value is not None:
            return written, None
        location = _location_of(record, written, extent.trimmed(written.encoded_bytes))
        if not self.entries.is_for(location):
            return written, None
        return written, self.entries.commit_now(Put(record.key, location, None))

    async def _enter(
        self, record: _Record, written: Written, extent: Extent | None, outcome: Outcome | None = None
    ) -> Stored:
        """Commit a record to the index, if it belongs there and its job has not done so; after that it exists. If that
        fails, the space that it took is free again."""
        location = _location_of(record, written, extent)
        if self.entries.is_for(location):
            try:
                put = Put(record.key, location, written.value if extent is None else None)
                outcome = await self.entries.put(put, outcome)
                with self._write_errors(record, "the index"):
                    if outcome.error is not None:
                        raise outcome.error
            except BaseException:
                self.entries.free(location)
                raise
            if extent is None:
                location = msgspec.structs.replace(location, offset=outcome.value_offset)
        self.locations[record.key] = location
        kind = self._policy.learn_written(record.kind, len(record.source), record.order, written)
        checksum = written.checksum if written.codec == NO_CODEC else None
        times = written.write_seconds, written.cpu_seconds
        return Stored(location.taken_bytes, str(written.codec), kind, checksum, *times)

    def _seed_of(self, key: int) -> int | None:
        return record_seed(self.session, key) if self._has_checksums else None

    async def read(self, key: int, destination: memoryview) -> Loaded:
        location = self.locations[key]
        seed = self._seed_of(key)
        if location.offset is None:
            receive = partial(
                decode_small_value, location=location, seed=seed, destination=destination, pool=self.turns.reads
            )
            outcome = await self.entries.submit(Fetch(key, receive))
            with translated("read", "the index", _STILL_ON_DISK, key=key):
                if outcome.error is not None:
                    raise outcome.error
            return Loaded(location.encoded_bytes)
        if location.segment is None:
            where, read_bytes = "the index's file", location.encoded_bytes
            place = FileRange(self.index.file.fileno(), location.offset, read_bytes, 1)
        else:
            where, read_bytes = f"segment {location.segment}", location.taken_bytes
            place = FileRange(self.space.descriptor(location.segment), location.offset, read_bytes, ALIGNMENT_BYTES)
        with translated("read", f"{where} at offset {place.offset}", _STILL_ON_DISK, key=key):
            if self._native is not None and self._native.can_read(location, destination):
                report = await self._native.read(place, location, seed, destination)
            else:
                job = place, location, seed, destination, self.turns.reads
                report = await run_job(self._executor, read_record, *job)
        self._policy.learn_read(location.logical_bytes, report)
        return Loaded(read_bytes, report.read_seconds, report.cpu_seconds)

    def confirms(self, key: int, memory: memoryview) -> bool:
        location = self.locations.get(key)
        return location is not None and is_record(location, record_seed(self.session, key), memory)

    def _write_errors(self, record: _Record, place: str) -> AbstractContextManager[None]:
        num_bytes, usage = len(record.source), self.space.usage()
        return translated("write", place, _STILL_IN_MEMORY, key=record.key, num_bytes=num_bytes, usage=usage)


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
