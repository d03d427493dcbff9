"""One drive of several: its disk tier, the queue of its writes, its measured speed, and its rest after a failure."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from ..base.system_words import words_of
from ..errors import CorruptDataError, StorageIOError, StoreFullError
from .budget import divided_budget
from .local import LocalDisk
from .tier import Kind, Loaded, Stored

_HALF_LIFE_BYTES = 64 * 2**20  # a write counts half as much once this much was written after it
_LEAST_MEASURED_BYTES = 128 * 2**10  # shorter records show the index and the processor rather than the drive
_MOST_SILENT_SECONDS = 5.0
_FULL_SECONDS = 1.0  # others may give space back on the file system
_FIRST_FAILED_SECONDS, _MOST_FAILED_SECONDS = 10.0, 640.0
_LEAST_PART_BYTES = 2**20  # shorter parts cost more in calls than they save


class DriveSpeed:
    """Bytes per second that a drive writes while it has something to write; newer writes weigh more. Pure."""

    def __init__(self) -> None:
        self.measured_at = 0.0
        self._num_running = 0
        self._busy_since = 0.0
        self._num_bytes = 0.0
        self._seconds = 0.0

    @property
    def bytes_per_second(self) -> float | None:
        return self._num_bytes / self._seconds if self._num_bytes and self._seconds else None

    def begin(self, now: float) -> None:
        if not self._num_running:
            self._busy_since = now
        self._num_running += 1

    def end(self, num_bytes: int, now: float) -> None:
        """A write has ended. `num_bytes`: what it has written; 0: it has failed."""
        weight = 0.5 ** (num_bytes / _HALF_LIFE_BYTES)
        self._num_bytes = self._num_bytes * weight + num_bytes
        self._seconds = self._seconds * weight + now - self._busy_since
        self._num_running -= 1
        self._busy_since = self.measured_at = now

    def measure_anew(self) -> None:
        self._num_bytes = self._seconds = 0.0


class QueuedDrive:
    """A directory's disk tier, with what has to be known to choose between several. For one loop. `num_jobs` records of
    each direction are given to it at once; the others wait here, and take no thread from other drives. `queued_bytes`:
    of writes that have not ended. Errors name the drive."""

    def __init__(self, name: str, disk: LocalDisk, num_jobs: int, clock: Callable[[], float] = monotonic) -> None:
        self.name, self.disk = name, disk
        self.queued_bytes = 0
        self.speed = DriveSpeed()
        self._clock = clock
        self._writes, self._reads = asyncio.Semaphore(num_jobs), asyncio.Semaphore(num_jobs)
        self._full_until = 0.0
        self._failed_until = 0.0
        self._failed_seconds = _FIRST_FAILED_SECONDS  # the length of the next rest

    def is_resting(self) -> bool:
        return self._clock() < max(self._full_until, self._failed_until)

    def room_bytes(self) -> int:
        """What seems to fit. Only a write tells: records may shrink, and the index and others take space."""
        usage = self.disk.usage()
        room_bytes = usage.budget_bytes - usage.disk_bytes
        return room_bytes if usage.write_allowance_bytes is None else min(room_bytes, usage.write_allowance_bytes)

    async def write(self, key: int, source: memoryview, kind: Kind) -> Stored:
        num_bytes = len(source)
        self.queued_bytes += num_bytes
        try:
            async with self._writes:
                with self._naming_errors(), self._timed(num_bytes):
                    stored = await self.disk.write(key, source, kind)
        except StoreFullError:
            self._full_until = self._clock() + _FULL_SECONDS
            raise
        except StorageIOError:
            self._failed_until = self._clock() + self._failed_seconds
            self._failed_seconds = min(2 * self._failed_seconds, _MOST_FAILED_SECONDS)
            raise
        finally:
            self.queued_bytes -= num_bytes
        self._failed_until, self._failed_seconds = 0.0, _FIRST_FAILED_SECONDS
        return stored

    async def read(self, key: int, destination: memoryview) -> Loaded:
        async with self._reads:
            with self._naming_errors():
                return await self.disk.read(key, destination)

    async def discard(self, keys: Sequence[int]) -> None:
        await self.disk.discard(keys)
        self._full_until = 0.0

    @contextmanager
    def _timed(self, num_bytes: int) -> Iterator[None]:
        if num_bytes < _LEAST_MEASURED_BYTES:
            yield
            return
        written_bytes = 0
        self.speed.begin(self._clock())
        try:
            yield
            written_bytes = num_bytes
        finally:
            self.speed.end(written_bytes, self._clock())

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except CorruptDataError as error:
            raise dataclasses.replace(error, place=f"{self.name}, {error.place}") from error
        except StorageIOError as error:
            place = f"{self.name}, {error.place}"
            reason = words_of(error.__cause__ or error, place)
            raise dataclasses.replace(error, place=place, reason=reason) from error
        except StoreFullError as error:
            raise dataclasses.replace(error, reason=f"{self.name}: {error.reason}") from error


def with_least_queue(num_bytes: int, drives: Sequence[QueuedDrive]) -> QueuedDrive:
    """The drive on which a record of that length ends first: (queued bytes + its bytes) / speed is least."""
    speeds = _speeds(drives)
    return min(drives, key=lambda drive: (drive.queued_bytes + num_bytes) / speeds[drive])


def divided(num_bytes: int, drives: Sequence[QueuedDrive]) -> list[tuple[QueuedDrive, int]]:
    """Divide a record as the speeds of the drives are, so that all its parts take equally long. All but the last are
    multiples of 4096 bytes, so each begins at the same address modulo 4096 as the record. A drive whose part would be
    short gets none. Queues do not count: it would be read back at the speed of one drive."""
    speeds, chosen = _speeds(drives), list(drives)
    while len(chosen) > 1:
        slowest = min(chosen, key=speeds.__getitem__)
        if num_bytes * speeds[slowest] >= _LEAST_PART_BYTES * sum(speeds[drive] for drive in chosen):
            break
        chosen.remove(slowest)
    shares = divided_budget(num_bytes, [int(speeds[drive]) for drive in chosen])
    return list(zip(chosen, shares, strict=True))


def _speeds(drives: Sequence[QueuedDrive]) -> dict[QueuedDrive, float]:
    """One of which nothing is known is taken for the fastest, and so is soon measured. What is known is forgotten when
    others were measured for some seconds and it was not: else a slow one would be passed over for ever."""
    newest = max(drive.speed.measured_at for drive in drives)
    for drive in drives:
        if not drive.queued_bytes and drive.speed.measured_at < newest - _MOST_SILENT_SECONDS:
            drive.speed.measure_anew()
    measured = {drive: drive.speed.bytes_per_second for drive in drives}
    fastest = max((speed for speed in measured.values() if speed is not None), default=1.0)
    return {drive: speed or fastest for drive, speed in measured.items()}
