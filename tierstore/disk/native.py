"""Threads that transfer records without the interpreter, if the package `tierstore-native` is installed: they do what
`write_record` and `read_record` do with records that are not encoded, without passing its lock on six times."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import deque
from typing import Any, NamedTuple

from ..base.defaults import NUM_BESIDE_DEVICE
from ..base.threads import NICE
from .allocator import ALIGNMENT_BYTES
from .codec.choice import WriteOrder
from .codec.codec import NO_CODEC
from .codec.floats import SWITCH
from .codec.load import Direction
from .linux import address_of
from .location import FileRange, Location, Written
from .records import RawLayout, check_head, split_at, verify
from .tier import Loaded

try:
    from tierstore_native import Pool
except ImportError:
    Pool = None

THREAD_NAME = "ts-native"
LEAST_BYTES = 4096  # shorter records have no whole page of their own


def is_native() -> bool:
    """Whether stores of this process use these threads: the package is there, and TIERSTORE_NATIVE is not "0"."""
    return Pool is not None and os.environ.get(SWITCH) != "0"


class _Ended(NamedTuple):
    """A transfer that has ended, as `Pool.take` gives it after the job's number."""

    error: int  # an errno; 0: none
    checksum: int  # of the record as it lies in memory
    transfer_seconds: float
    cpu_seconds: float  # of the thread
    bytes_per_second: float  # of the drive, where enough was moved to tell; else 0


class NativeTransfers:
    """Writes and reads unencoded records; for one loop. Its coroutines must not be cancelled: the threads use the
    buffers until a transfer has ended. `num_at_once`: how many transfers of each direction are at the drive.
    `new_speeds`: gets the bytes per second that it was found to move, as `TransferClock`'s."""

    def __init__(self, num_at_once: int, new_speeds: deque[tuple[Direction, float]]) -> None:
        self._pool: Any = Pool(2 * (num_at_once + NUM_BESIDE_DEVICE), num_at_once, NICE, THREAD_NAME)
        self._new_speeds = new_speeds
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._pending: dict[int, tuple[asyncio.Future[_Ended], memoryview, Direction]] = {}
        self._loop.add_reader(self._pool.fileno(), self._deliver)

    @staticmethod
    def address_to_read(location: Location, destination: memoryview) -> int:
        """The destination's, if the record is not encoded, and lies page by page where it was in memory; else 0."""
        if location.codec != NO_CODEC.family or location.segment is None or len(destination) < LEAST_BYTES:
            return 0
        address = address_of(destination)
        return 0 if (address + location.head_bytes) % ALIGNMENT_BYTES else address

    async def write(self, place: FileRange, source: memoryview, order: WriteOrder) -> Written:
        """Raises OSError: the device failed."""
        address, num_bytes = address_of(source), len(source)
        layout = split_at(-address % ALIGNMENT_BYTES, num_bytes, ALIGNMENT_BYTES)
        ended = await self._begin("write", place, source, address, layout, order.seed)
        checksum = None if order.seed is None else ended.checksum
        times = ended.cpu_seconds, ended.transfer_seconds
        return Written(NO_CODEC, num_bytes, layout.head_bytes, checksum, None, *times, ())

    async def read(
        self, place: FileRange, location: Location, seed: int | None, destination: memoryview, address: int
    ) -> Loaded:
        """`address`: as `address_to_read` gives it. Raises OSError: the device failed. DamagedBytesError: these are not
        the record's bytes."""
        check_head(location, place)
        layout = split_at(location.head_bytes, len(destination), ALIGNMENT_BYTES)
        ended = await self._begin("read", place, destination, address, layout, seed)
        verify(location, seed, ended.checksum)
        return Loaded(place.num_bytes, ended.transfer_seconds, ended.cpu_seconds)

    def _begin(
        self,
        direction: Direction,
        place: FileRange,
        memory: memoryview,
        address: int,
        layout: RawLayout,
        seed: int | None,
    ) -> asyncio.Future[_Ended]:
        number, is_write = next(self._numbers), direction == "write"
        num_bytes = len(memory)
        side_bytes = num_bytes + -num_bytes % ALIGNMENT_BYTES - layout.interior_bytes
        at = place.descriptor, place.offset, address, num_bytes
        lengths = layout.head_bytes, layout.interior_bytes, side_bytes
        self._pool.submit(number, is_write, *at, *lengths, seed is not None, seed or 0)
        future: asyncio.Future[_Ended] = self._loop.create_future()
        self._pending[number] = future, memory, direction  # results are taken on this thread
        return future

    def _deliver(self) -> None:
        for number, *rest in self._pool.take():
            ended = _Ended(*rest)
            future, _, direction = self._pending.pop(number)
            if ended.bytes_per_second:
                self._new_speeds.append((direction, ended.bytes_per_second))
            if future.cancelled():
                continue
            if ended.error:
                call = "pwritev" if direction == "write" else "preadv"
                future.set_exception(OSError(ended.error, f"{call}: {os.strerror(ended.error)}"))
            else:
                future.set_result(ended)

    def close(self) -> None:
        """On the loop; no transfer may be in progress. Blocks until the threads have ended, which they do at once. (In
        a job, another thread's error in that job's thread would leave them and their descriptor for ever.)"""
        self._loop.remove_reader(self._pool.fileno())
        self._pool.close()

    def abandon_after_fork(self) -> None:
        self._pool.abandon()
