"""A wrapper that makes any disk tier fail as a plan says."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NoReturn, TypeVar

from ..disk.boundary import Usage, translated
from ..disk.tier import DiskTier, Kind, Loaded, Stored
from ..errors import TierStoreError
from .faults import Faults
from .plan import Operation

T = TypeVar("T")
_PLACE = "a tier with injected faults"
_IN_MEMORY = "the data is still in memory"
_ON_DISK = "what was stored is still on disk"
_GARBAGE = b"\xa5"


class FaultyDisk:
    """Injects faults into another `DiskTier`. It raises the errors of the `DiskTier` contract, caused by an OSError. A
    discard that fails breaks that contract: the user of the tier has to end."""

    def __init__(self, disk: DiskTier, faults: Faults) -> None:
        self._disk, self._faults = disk, faults
        self._num_running = self._num_done = 0
        self._changed = asyncio.Condition()  # those two
        self.scratch_bytes = disk.scratch_bytes
        self.confirms, self.usage = disk.confirms, disk.usage
        self.codec_choices, self.abandon_after_fork = disk.codec_choices, disk.abandon_after_fork

    async def write(self, key: int, source: memoryview, kind: Kind) -> Stored:
        writing = partial(self._disk.write, key, source, kind)
        return await self._run("write", writing, _IN_MEMORY, len(source))

    async def read(self, key: int, destination: memoryview) -> Loaded:
        reading = partial(self._disk.read, key, destination)
        try:
            return await self._run("read", reading, _ON_DISK, len(destination))
        except TierStoreError:
            destination[:] = _GARBAGE * len(destination)
            raise

    async def discard(self, keys: Sequence[int]) -> None:
        await self._run("discard", partial(self._disk.discard, keys), _ON_DISK)

    async def close(self) -> None:
        drawn = self._faults.draw("close")
        await asyncio.sleep(drawn.delay_seconds)
        await self._disk.close()
        if drawn.error is not None:
            _fail("close", drawn.error, "everything is freed")

    async def _run(self, operation: Operation, call: Callable[[], Awaitable[T]], data: str, num_bytes: int = 0) -> T:
        drawn = self._faults.draw(operation, num_bytes)
        if drawn.delay_seconds:
            await asyncio.sleep(drawn.delay_seconds)
        if drawn.error is not None:
            now = self._disk.usage()
            _fail(operation, drawn.error, data, num_bytes, (now.disk_bytes, now.budget_bytes))
        self._num_running += 1
        ends_at = time.monotonic() + drawn.least_seconds
        try:
            return await call()
        finally:
            if drawn.least_seconds:
                await asyncio.sleep(max(0.0, ends_at - time.monotonic()))
            await self._end(drawn.num_others)

    async def _end(self, num_others: int) -> None:
        """An operation is done. Returns when it may be reported: at once, or after `num_others` other operations, or
        when nothing runs any more, so that none waits for ever."""
        self._num_running -= 1
        self._num_done += 1
        due = self._num_done + num_others
        async with self._changed:
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._num_done >= due or not self._num_running)


def _fail(operation: Operation, number: int, data: str, num_bytes: int = 0, usage: Usage = (0, 0)) -> NoReturn:
    with translated(operation, _PLACE, data, num_bytes=num_bytes, usage=usage):
        raise OSError(number, os.strerror(number))
