"""The disk tier over several directories, each on a drive of its own: one store has the speed and room of all of them.

::

    write ─► which drives? (ready, with room; queue and measured speed) ─► `LocalDisk.write` on one, or a part on each
                └── refused: the parts are discarded, and the other drives are asked; none is left: the error is raised
    read  ─► the drives that have it, at once
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Self

from ..errors import CorruptDataError, StorageIOError, StoreClosedError, StoreFullError
from .drive import QueuedDrive, divided, with_least_queue
from .local import LocalDisk
from .location import Location
from .parts import pieces, results_of
from .tier import DiskUsage, DriveUsage, Kind, Loaded, Stored


class Part(NamedTuple):
    """One drive's share of a record, or all of it. `key`: under which the drive has it."""

    drive: QueuedDrive
    key: int
    num_bytes: int


Parts = tuple[Part, ...]
"""All parts of a record, in the order of their bytes; each is on another drive."""


_LEAST_DIVIDED_BYTES = 8 * 2**20
_FIRST_PART_KEY = 1 << 62  # parts have keys of their own, so that no key is used twice on a drive


def _length_of(parts: Parts) -> int:
    return sum(part.num_bytes for part in parts)


async def free(parts: Iterable[Part]) -> None:
    """Discard parts, of one or many records, on all their drives at once."""
    by_drive: dict[QueuedDrive, list[int]] = {}
    for part in parts:
        by_drive.setdefault(part.drive, []).append(part.key)
    await asyncio.gather(*(drive.discard(keys) for drive, keys in by_drive.items()))


def _times(receipts: Sequence[Stored] | Sequence[Loaded]) -> tuple[float | None, float]:
    """Drive and CPU seconds of all parts. The drives work at the same time, so their times do not add up."""
    drive_seconds = max((each.drive_seconds for each in receipts if each.drive_seconds is not None), default=None)
    return drive_seconds, sum(each.cpu_seconds or 0.0 for each in receipts)


class _RefusedError(Exception):
    """Some drives did not take their part; nothing of the record is stored."""

    def __init__(self, by_drive: Mapping[QueuedDrive, StoreFullError | StorageIOError]) -> None:
        super().__init__()
        self.by_drive = by_drive


class Drives:
    """Keeps records on several drives. A `DiskTier`, and what the daemon needs of a `LocalDisk` beside that.

    All coroutines belong to one loop and do not block it. A record goes to the drive on which it ends first, by the
    bytes that are queued there and the drive's measured speed; a large one is divided over all. Drives without room, or
    that rest, are passed over while another one takes it: after it was full, a drive rests for a second; after a write
    that failed, for 10 seconds, twice as long after each further failure. A refused write is made again on the other
    drives before it is told as failed.

    `divides`: divide large records. A daemon does not: after a kill an index that has only some parts of a record could
    not be told from a whole one. `leases`: as the first drive, which alone keeps leases, had them when it was opened.
    """

    def __init__(self, drives: Sequence[QueuedDrive], *, divides: bool) -> None:
        self._drives = drives
        self._name = ", ".join(drive.name for drive in drives)
        self._divides = divides
        self._parts_of: dict[int, Parts] = {}
        self._part_keys = itertools.count(_FIRST_PART_KEY)
        self._closed_because: str | None = None
        self._first = drives[0].disk
        self.scratch_bytes = sum(drive.disk.scratch_bytes for drive in drives)
        self.session, self.leases = self._first.session, self._first.leases

    @classmethod
    async def open(
        cls, openers: Mapping[str, Callable[[], LocalDisk]], *, num_jobs: int, divides: bool, keep: bool = False
    ) -> Self:
        """Open the tier of each drive, by directory, and restore the records in them. If one raises, none is open, and
        with `keep` the records on the others stay for the next process. `num_jobs`: as `QueuedDrive`'s."""
        drives: list[QueuedDrive] = []
        try:
            for name, opener in openers.items():
                drives.append(QueuedDrive(name, opener(), num_jobs))
            tier = cls(drives, divides=divides)
            await tier._rebuild()
        except BaseException:
            closings = (drive.disk.close(keep=keep) for drive in drives)
            await asyncio.gather(*closings, return_exceptions=True)  # the first error is the one to tell
            raise
        return tier

    async def write(self, key: int, source: memoryview, kind: Kind) -> Stored:
        self._check_open()
        if key in self._parts_of:
            raise ValueError(f"key {key} is in use")
        refusals: dict[QueuedDrive, StoreFullError | StorageIOError] = {}
        while parts := self._parts_for(key, len(source), refusals):
            try:
                receipt = await self._write_parts(parts, source, kind)
            except _RefusedError as refused:
                refusals |= refused.by_drive
                continue
            self._parts_of[key] = parts
            return receipt
        raise self._error_of(len(source), list(refusals.values()))

    async def read(self, key: int, destination: memoryview) -> Loaded:
        self._check_open()
        parts = self._parts_of[key]
        if len(destination) != (num_bytes := _length_of(parts)):
            raise ValueError(f"record {key} has {num_bytes} bytes, not {len(destination)}")
        try:
            if len(parts) == 1:
                return await parts[0].drive.read(parts[0].key, destination)
            reads = (part.drive.read(part.key, piece) for part, piece in pieces(parts, destination))
            outcomes = await asyncio.gather(*reads, return_exceptions=True)  # ends when all have
            receipts = results_of(outcomes)
            return Loaded(sum(each.read_bytes for each in receipts), *_times(receipts))
        except CorruptDataError as error:
            raise CorruptDataError(key, error.place, error.expected, error.found) from error

    def confirms(self, key: int, memory: memoryview) -> bool:
        parts = self._parts_of.get(key, ())
        if not parts or len(memory) != _length_of(parts):
            return False
        return all(part.drive.disk.confirms(part.key, piece) for part, piece in pieces(parts, memory))

    async def discard(self, keys: Sequence[int]) -> None:
        self._check_open()
        found = {key: self._parts_of[key] for key in keys}
        for key in found:
            del self._parts_of[key]
        await free(itertools.chain.from_iterable(found.values()))

    def usage(self) -> DiskUsage:
        usages = [drive.disk.usage() for drive in self._drives]
        modes = {usage.io_mode for usage in usages}
        named = (f"{usage.io_mode} at {drive.name}" for drive, usage in zip(self._drives, usages, strict=True))
        allowances = [usage.write_allowance_bytes for usage in usages]
        return DiskUsage(
            disk_bytes=sum(usage.disk_bytes for usage in usages),
            allocated_bytes=sum(usage.allocated_bytes for usage in usages),
            budget_bytes=sum(usage.budget_bytes for usage in usages),
            num_records=len(self._parts_of),
            io_mode=modes.pop() if len(modes) == 1 else "; ".join(named),
            write_allowance_bytes=None if None in allowances else sum(each or 0 for each in allowances),
        )

    def codec_choices(self) -> Mapping[str, Mapping[str, int]]:
        choices: dict[str, Counter[str]] = {}
        for drive in self._drives:
            for kind, counts in drive.disk.codec_choices().items():
                choices.setdefault(kind, Counter()).update(counts)
        return choices

    def abandon_after_fork(self) -> None:
        self._closed_because = "it belongs to the process that this one was forked from"
        for drive in self._drives:
            drive.disk.abandon_after_fork()

    async def close(self, *, keep: bool = False) -> None:
        """As `LocalDisk.close`. If the first drive loses its leases, nothing stays on the others: it is nobody's."""
        if self._closed_because is None:
            self._closed_because = "it was closed"
            self._parts_of.clear()
            keep = keep and not self._first.damaged_indexes
            closings = (drive.disk.close(keep=keep) for drive in self._drives)
            results_of(await asyncio.gather(*closings, return_exceptions=True))

    # --- for the daemon -------------------------------------------------------------------------------------------

    def drives(self) -> list[DriveUsage]:
        found = []
        for drive in self._drives:
            (usage,) = drive.disk.drives()
            speed, is_resting = drive.speed.bytes_per_second, drive.is_resting()
            found.append(replace(usage, path=drive.name, write_bytes_per_second=speed, is_resting=is_resting))
        return found

    @property
    def damaged_indexes(self) -> Mapping[str, Exception]:
        return {name: damage for drive in self._drives for name, damage in drive.disk.damaged_indexes.items()}

    @property
    def is_empty(self) -> bool:
        return all(drive.disk.is_empty for drive in self._drives)

    def found_locations(self) -> dict[int, Location]:
        return {key: location for drive in self._drives for key, location in drive.disk.found_locations().items()}

    async def put_lease(self, number: int, blob: bytes) -> None:
        await self._first.put_lease(number, blob)

    async def delete_lease(self, number: int) -> None:
        await self._first.delete_lease(number)

    async def _rebuild(self) -> None:
        """Note where the records lie that were found. Leases on another drive than the first are deleted."""
        for drive in self._drives:
            if drive.disk is not self._first:
                for number in drive.disk.leases:
                    await drive.disk.delete_lease(number)
            for key, location in drive.disk.found_locations().items():
                if key in self._parts_of:  # a damaged index claims it; if it is this one that is right, reading tells
                    await drive.discard([key])
                else:
                    self._parts_of[key] = (Part(drive, key, location.logical_bytes),)

    # --- writing --------------------------------------------------------------------------------------------------

    def _parts_for(self, key: int, num_bytes: int, refused: Iterable[QueuedDrive]) -> Parts:
        """Which drives are to take the record; none if all have refused it."""
        left = [drive for drive in self._drives if drive not in refused]
        if not left:
            return ()
        roomy = [drive for drive in left if drive.room_bytes() >= num_bytes]
        # Those without room come last, but they come: a record that is being discarded may make room.
        drives = [drive for drive in roomy if not drive.is_resting()] or roomy or left
        if not self._divides or num_bytes < _LEAST_DIVIDED_BYTES or len(drives) == 1:
            return (Part(with_least_queue(num_bytes, drives), key, num_bytes),)
        part_key = next(self._part_keys)
        return tuple(Part(drive, part_key, part_bytes) for drive, part_bytes in divided(num_bytes, drives))

    async def _write_parts(self, parts: Parts, source: memoryview, kind: Kind) -> Stored:
        """All parts, or none: _RefusedError if some drives are full or failed."""
        if len(parts) > 1:
            return await self._write_divided(parts, source, kind)
        drive = parts[0].drive
        try:
            return await drive.write(parts[0].key, source, kind)
        except (StoreFullError, StorageIOError) as error:
            raise _RefusedError({drive: error}) from error

    async def _write_divided(self, parts: Parts, source: memoryview, kind: Kind) -> Stored:
        writes = (part.drive.write(part.key, piece, kind) for part, piece in pieces(parts, source))
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        failed = {part.drive: each for part, each in zip(parts, outcomes, strict=True) if isinstance(each, Exception)}
        if not failed:
            receipts = results_of(outcomes)
            codec = max(receipts, key=lambda each: each.stored_bytes).codec
            num_bytes = sum(each.stored_bytes for each in receipts)
            return Stored(num_bytes, codec, receipts[0].kind, None, *_times(receipts))
        await free(part for part in parts if part.drive not in failed)
        refusals = {drive: each for drive, each in failed.items() if isinstance(each, (StoreFullError, StorageIOError))}
        if len(refusals) < len(failed):
            results_of(outcomes)
        raise _RefusedError(refusals)

    def _error_of(self, num_bytes: int, errors: list[StoreFullError | StorageIOError]) -> Exception:
        """What to raise when no drive took the record. One that failed is told of first, even if others are full."""
        cause = min(errors, key=lambda each: not isinstance(each, StorageIOError))
        if isinstance(cause, StorageIOError):
            told: Exception = replace(cause)
        else:
            full = [error for error in errors if isinstance(error, StoreFullError)]
            usage = self.usage()
            reason = "; ".join(error.reason for error in full)
            advice = "; or ".join(dict.fromkeys(error.advice for error in full))
            told = StoreFullError(num_bytes, usage.disk_bytes, usage.budget_bytes, reason=reason, advice=advice)
        told.__cause__ = cause
        return told

    def _check_open(self) -> None:
        if self._closed_because is not None:
            raise StoreClosedError(self._name, self._closed_because)


LocalTier = LocalDisk | Drives
"""The disk tier on one directory of this machine, or on several."""
