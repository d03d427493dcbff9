"""The way of one record down and up: codec, room, job, index. What `LocalDisk` shows, done here."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple, ParamSpec, TypeVar

import msgspec

from ..codec import NO_CODEC
from ..errors import StoreFullError
from .boundary import Usage, means_full, translated
from .budget import DiskBudget
from .codec_policy import CodecPolicy
from .commits import Commits
from .extents import Extent, ExtentSpace
from .index import Index, value_charge_bytes
from .jobs import run_job
from .location import Location, record_seed
from .operations import Delete, DeleteLease, Fetch, Outcome, Put, PutLease
from .records import (
    DoesNotFitError,
    Place,
    WriteOrder,
    Written,
    decode_small_value,
    is_record,
    make_value,
    read_record,
    write_record,
)
from .scratch import Turns
from .tier import Kind, Loaded, Stored

__all__ = ["RecordShelf"]

_LONGEST_VALUE_BYTES = 2**30  # LMDB takes values below 4 GiB, and holds one in memory until it is committed
_QUICK_BYTES = 128 * 2**10  # checksummed on the loop in microseconds: a hop to the pool would cost more
_BEST_HOPE = 8  # encoding into an extent shorter than the record by more than this is not tried
_STILL_IN_MEMORY = "the data is still in memory"
_STILL_ON_DISK = "the record is still on disk and may be asked for again"

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Record(NamedTuple):
    """A record on its way down."""

    key: int
    source: memoryview
    kind: Kind
    order: WriteOrder


class _Filled(NamedTuple):
    """What became of a record's extent.

    Attributes:
        written: as `write_record` says.
        outcome: of entering it in the index; None: not tried yet, or it does not belong there.
    """

    written: Written
    outcome: Outcome | None


def _is_quick(record: _Record) -> bool:
    order = record.order
    return order.codec == NO_CODEC and not order.probe and len(record.source) <= _QUICK_BYTES


class RecordShelf:
    """Puts records into extents and the index and gets them out. Lives on one loop; does not block it.

    Its coroutines must not be cancelled: they own extents and buffers until their jobs have ended.

    Args:
        index, space, budget, policy: of the tier; it closes them.
        executor: runs the jobs.
        inline_bytes, session: as `LocalDisk`'s.
        has_checksums: records get one, which is verified when they are read.
        has_extents_in_index: extents are entered there too, for the next process.
        turns: at the device.

    Attributes:
        locations: where each live record lies.
    """

    def __init__(
        self,
        index: Index,
        space: ExtentSpace,
        budget: DiskBudget,
        policy: CodecPolicy,
        executor: Executor,
        *,
        inline_bytes: int | None,
        session: int,
        has_checksums: bool,
        has_extents_in_index: bool,
        turns: Turns,
    ) -> None:
        self.locations: dict[int, Location] = {}
        self._undeleted: dict[int, Location] = {}  # discarded, but the index refused: tried again with the next
        self._undeleted_leases: set[int] = set()  # likewise
        self._index = index
        self._commits = Commits(index, executor)
        self._space = space
        self._budget = budget
        self._policy = policy
        self._executor = executor
        self._turns = turns
        self._inline_bytes = inline_bytes
        self._session = session
        self._has_checksums = has_checksums
        self._has_extents_in_index = has_extents_in_index

    def usage(self) -> Usage:
        """Bytes that records take, and the most that they may."""
        return self._space.used_bytes + self._budget.value_bytes, self._budget.limit_bytes

    @property
    def is_empty(self) -> bool:
        """Whether it holds no record, and the index nothing that it has refused to delete."""
        return not (self.locations or self._undeleted or self._undeleted_leases)

    def take_up(self, locations: dict[int, Location]) -> None:
        """Go on with records that an earlier process wrote. Once, before anything else."""
        self.locations = locations

    async def settle(self) -> None:
        """Return when the index has nothing more to do; every record is forgotten."""
        await self._commits.settle()
        self.locations.clear()

    async def put_lease(self, number: int, blob: bytes) -> None:
        """As `LocalDisk.put_lease`."""
        outcome = await self._put(PutLease(number, blob), None)
        with translated("write", "the index", "the lease is not entered", num_bytes=len(blob), usage=self.usage()):
            if outcome.error is not None:
                raise outcome.error

    async def delete_lease(self, number: int) -> None:
        """As `LocalDisk.delete_lease`."""
        self._undeleted_leases.add(number)
        await self.delete({})

    async def write(self, key: int, source: memoryview, kind: Kind) -> Stored:
        """As `DiskTier.write`."""
        if self._undeleted or self._undeleted_leases:
            await self.delete({})
        num_bytes = len(source)
        seed = self._seed_of(key)
        is_space_short = self.usage()[0] + num_bytes > self._budget.limit_bytes // 8 * 7
        kind = self._policy.kind_of(kind, source)
        order = self._policy.order(kind, num_bytes, seed, is_space_short=is_space_short)
        record = _Record(key, source, kind, order)
        if self._is_value(num_bytes):
            has_other_home = self._inline_bytes is not None and num_bytes > 0
            if await self._charge_value(num_bytes, has_other_home=has_other_home):
                return await self._write_value(record)
            if not has_other_home:
                raise StoreFullError(num_bytes, *self.usage())
        return await self._write_extent(record)

    async def _charge_value(self, num_bytes: int, *, has_other_home: bool) -> bool:
        """Count a value against the budget; False if it has no room, nor will what is on its way back make it.

        One that may live in an extent as well does not wait.
        """
        charge_bytes = value_charge_bytes(num_bytes)
        while not self._budget.add_value(charge_bytes, has_other_home=has_other_home):
            if not has_other_home:
                self._space.free_budget_for(charge_bytes)
            if has_other_home or not await self._space.wait_for_news():
                return False
        return True

    def _is_value(self, num_bytes: int) -> bool:
        limit = _LONGEST_VALUE_BYTES if self._inline_bytes is None else self._inline_bytes
        return num_bytes <= limit

    async def _write_value(self, record: _Record) -> Stored:
        """Write a record as a value. It has been charged as it is, not encoded; what encoding saves is given back."""
        charge_bytes = value_charge_bytes(len(record.source))
        try:
            if _is_quick(record):
                written = make_value(record.source, record.order, self._turns.writes)
            else:
                written = await self._run(make_value, record.source, record.order, self._turns.writes)
        except BaseException:
            self._budget.remove_value(charge_bytes)
            raise
        self._budget.remove_value(charge_bytes - value_charge_bytes(written.encoded_bytes))
        return await self._enter_value(record, written)

    async def _write_extent(self, record: _Record) -> Stored:
        extent = await self._take(record)
        self._space.promise()  # encoding gives a tail back
        try:
            written, outcome = await self._fill_or_free(record, extent)
        finally:
            self._space.settle_promise()
        if written.value is not None:
            return await self._enter_value(record, written)
        extent = self._space.trim(extent, written.encoded_bytes)
        try:
            return await self._enter(record, written, extent, outcome)
        except BaseException:
            self._space.give_back(extent)
            raise

    async def _fill_or_free(self, record: _Record, extent: Extent) -> _Filled:
        """Fill the extent; it is free again if that fails, or if the record became a value (charged then)."""
        try:
            filled = await self._fill(record, extent, self._inline_bytes or 0)
            charge_bytes = value_charge_bytes(filled.written.encoded_bytes)
            if filled.written.value is not None and not self._budget.add_value(charge_bytes, has_other_home=True):
                filled = await self._fill(record, extent, 0)
        except BaseException:
            self._space.give_back(extent)
            raise
        if filled.written.value is not None:
            self._space.give_back(extent)
        return filled

    async def _enter_value(self, record: _Record, written: Written) -> Stored:
        try:
            return await self._enter(record, written, None)
        except BaseException:
            self._budget.remove_value(value_charge_bytes(written.encoded_bytes))
            raise

    async def _take(self, record: _Record) -> Extent:
        num_bytes = len(record.source)
        with self._write_errors(record, "a new segment"):
            try:
                return await self._space.take(num_bytes)
            except StoreFullError:
                longest_bytes = self._space.largest_free_bytes
                if record.order.codec == NO_CODEC or longest_bytes * _BEST_HOPE < num_bytes:
                    raise
                return await self._space.take(longest_bytes)

    async def _fill(self, record: _Record, extent: Extent, value_limit_bytes: int) -> _Filled:
        place = Place(
            self._space.descriptor(extent.segment),
            extent.offset,
            extent.num_bytes,
            self._space.alignment_bytes,
        )
        try:
            where = f"segment {extent.segment} at offset {extent.offset}"
            with self._write_errors(record, where):
                return await self._run(self._fill_and_enter, record, place, extent, value_limit_bytes)
        except DoesNotFitError:
            reason = f"encoded, it does not fit into the longest free extent of {extent.num_bytes} bytes"
            raise StoreFullError(len(record.source), *self.usage(), reason=reason) from None

    def _fill_and_enter(self, record: _Record, place: Place, extent: Extent, value_limit_bytes: int) -> _Filled:
        """A job: write the record, and enter it in the index at once, unless it became a value."""
        written = write_record(place, record.source, record.order, value_limit_bytes, self._turns.writes)
        if written.value is not None:
            return _Filled(written, None)
        location = _location_of(record, written, extent.trimmed(written.encoded_bytes))
        if not self._is_in_index(location):
            return _Filled(written, None)
        return _Filled(written, self._commits.commit_now(Put(record.key, location, None)))

    async def _enter(
        self, record: _Record, written: Written, extent: Extent | None, outcome: Outcome | None = None
    ) -> Stored:
        """Commit a record to the index, if it belongs there, and its job has not; from here on it exists."""
        value = written.value if extent is None else None
        location = _location_of(record, written, extent)
        if self._is_in_index(location):
            outcome = await self._put(Put(record.key, location, value), outcome)
            with self._write_errors(record, "the index"):
                if outcome.error is not None:
                    raise outcome.error
            if extent is None:
                location = msgspec.structs.replace(location, offset=outcome.value_offset)
        self.locations[record.key] = location
        kind = self._policy.learn_written(record.key, record.kind, len(record.source), record.order, written)
        checksum = written.checksum if written.codec == NO_CODEC else None
        return Stored(
            location.taken_bytes, str(written.codec), kind, checksum, written.write_seconds, written.cpu_seconds
        )

    def _seed_of(self, key: int) -> int | None:
        """Of the record's checksum; None: there are none in this store."""
        return record_seed(self._session, key) if self._has_checksums else None

    async def _put(self, put: Put | PutLease, outcome: Outcome | None) -> Outcome:
        """Have the index take it. A file system that is full of empty segments, or of one being tried, is not full.

        `outcome`: of the first try, if that was made already.
        """
        if outcome is None:
            outcome = await self._commits.submit(put)
        is_last_try = False
        while outcome.error is not None and means_full(outcome.error) and not is_last_try:
            self._space.free_budget_for(0)
            is_last_try = not await self._space.wait_for_news()
            outcome = await self._commits.submit(put)
        return outcome

    async def read(self, key: int, destination: memoryview) -> Loaded:
        """As `DiskTier.read`."""
        location = self.locations[key]
        seed = self._seed_of(key)
        place = self._place_of(location)
        if place is None:
            receive = partial(
                decode_small_value, location=location, seed=seed, destination=destination, pool=self._turns.reads
            )
            outcome = await self._commits.submit(Fetch(key, receive))
            with translated("read", "the index", _STILL_ON_DISK, key=key):
                if outcome.error is not None:
                    raise outcome.error
            return Loaded(location.encoded_bytes)
        where = "the index's file" if location.segment is None else f"segment {location.segment}"
        with translated("read", f"{where} at offset {place.offset}", _STILL_ON_DISK, key=key):
            report = await self._run(read_record, place, location, seed, destination, self._turns.reads)
        self._policy.learn_read(key, location, report)
        read_bytes = location.encoded_bytes if location.segment is None else location.taken_bytes
        return Loaded(read_bytes, report.read_seconds, report.cpu_seconds)

    def confirms(self, key: int, memory: memoryview) -> bool:
        """As `DiskTier.confirms`."""
        location = self.locations.get(key)
        return location is not None and is_record(location, record_seed(self._session, key), memory)

    def _place_of(self, location: Location) -> Place | None:
        """Where to read it in a file; None: through the index."""
        if location.offset is None:
            return None
        if location.segment is None:
            return Place(self._index.file.fileno(), location.offset, location.encoded_bytes, 1)
        descriptor = self._space.descriptor(location.segment)
        return Place(descriptor, location.offset, location.taken_bytes, self._space.alignment_bytes)

    async def delete(self, locations: dict[int, Location]) -> None:
        """Remove records from the index and free what they took, once that is committed.

        What the index refuses to delete (a full file system) keeps its space until a later call succeeds, which also
        tries again what was refused before: records and leases.
        """
        locations = self._undeleted | locations
        leases = sorted(self._undeleted_leases)
        self._undeleted, self._undeleted_leases = {}, set()
        for key in [key for key, location in locations.items() if not self._is_in_index(location)]:
            self._free(locations.pop(key))
        if not locations and not leases:
            return
        self._space.promise()
        try:
            outcomes = await self._commits.submit_all([*map(Delete, locations), *map(DeleteLease, leases)])
            for number, outcome in zip(leases, outcomes[len(locations) :], strict=True):
                if outcome.error is not None:
                    self._undeleted_leases.add(number)
            for (key, location), outcome in zip(locations.items(), outcomes[: len(locations)], strict=True):
                if outcome.error is None:
                    self._free(location)
                else:
                    self._undeleted[key] = location
        finally:
            self._space.settle_promise()

    def _is_in_index(self, location: Location) -> bool:
        """Extents that nobody will look for after this process are kept in memory alone."""
        return location.segment is None or self._has_extents_in_index

    def _free(self, location: Location) -> None:
        if location.segment is None or location.offset is None:
            self._budget.remove_value(location.taken_bytes)
        else:
            self._space.give_back(Extent(location.segment, location.offset, location.taken_bytes))

    async def _run(self, job: Callable[_P, _T], *arguments: _P.args, **keywords: _P.kwargs) -> _T:
        return await run_job(self._executor, job, *arguments, **keywords)

    def _write_errors(self, record: _Record, place: str) -> AbstractContextManager[None]:
        num_bytes = len(record.source)
        return translated("write", place, _STILL_IN_MEMORY, key=record.key, num_bytes=num_bytes, usage=self.usage())


def _location_of(record: _Record, written: Written, extent: Extent | None) -> Location:
    """Where the record lies; `extent`: as long as it takes, None: it is a value, whose place is not known yet."""
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
