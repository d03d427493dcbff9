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
        self._disk = disk
        self._faults = faults
        self._order = _Completions()
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
        self._order.begin()
        ends_at = time.monotonic() + drawn.least_seconds
        try:
            return await call()
        finally:
            if drawn.least_seconds:
                await asyncio.sleep(max(0.0, ends_at - time.monotonic()))
            await self._order.end(drawn.num_others)


def _fail(operation: Operation, number: int, data: str, num_bytes: int = 0, usage: Usage = (0, 0)) -> NoReturn:
    with translated(operation, _PLACE, data, num_bytes=num_bytes, usage=usage):
        raise OSError(number, os.strerror(number))


class _Held:
    def __init__(self, num_others: int) -> None:
        self.num_others = num_others
        self.released = asyncio.Event()


class _Completions:
    """The order in which operations are reported done. When nothing runs, all are released, so none waits for ever."""

    def __init__(self) -> None:
        self._num_running = 0
        self._held: list[_Held] = []

    def begin(self) -> None:
        self._num_running += 1

    async def end(self, num_others: int) -> None:
        """An operation is done. Returns when it may be reported: at once, or after `num_others` other operations."""
        self._num_running -= 1
        for held in self._held:
            held.num_others -= 1
        if num_others:
            self._held.append(mine := _Held(num_others))
        self._release()
        if num_others:
            await mine.released.wait()

    def _release(self) -> None:
        due = [held for held in self._held if not self._num_running or held.num_others <= 0]
        self._held = [held for held in self._held if held not in due]
        for held in reversed(due):
            held.released.set()
