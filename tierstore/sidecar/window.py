"""Lends ranges of the shared slab to requests: first come first served, reads before writes. For one loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import NamedTuple

from ..base.free_runs import FreeRuns
from ..disk.allocator import round_up
from ..disk.jobs import run_job
from ..disk.linux import copy_memory
from .shared_slab import SharedSlab


class WindowSlot(NamedTuple):
    """A range of a slab that one request may name."""

    slab: SharedSlab
    offset: int
    num_bytes: int

    @property
    def range(self) -> tuple[int, int, int]:
        """The number of the slab, the first byte, how many: as a request names it."""
        return self.slab.number, self.offset, self.num_bytes

    @property
    def memory(self) -> memoryview:
        return self.slab.memory[self.offset : self.offset + self.num_bytes]


class SharedWindow:
    """Cuts one slab, which is the caller's, into slots. `executor` runs copies."""

    def __init__(self, slab: SharedSlab, executor: Executor) -> None:
        self._slab = slab
        self._executor = executor
        self._filling: set[asyncio.Future[None]] = set()
        self._renewal: asyncio.Future[None] | None = None  # slots are not to be written to until it is done
        self._free = FreeRuns()
        self._free.free(0, slab.num_bytes)
        self._waiting: tuple[deque[_Waiter], deque[_Waiter]] = (deque(), deque())  # to read, to write

    async def take(self, num_bytes: int, *, to_read: bool) -> WindowSlot:
        """Take a slot of whole pages with room for `num_bytes`, as soon as there is one; or raise what `refuse_waiting`
        was given."""
        size = round_up(max(num_bytes, 1))
        line = self._waiting[0 if to_read else 1]
        if line or (not to_read and self._waiting[0]) or self._free.longest_bytes < size:
            waiter = _Waiter(size, asyncio.get_running_loop().create_future())
            line.append(waiter)
            try:
                start = await waiter.start
            except asyncio.CancelledError:
                self._leave(line, waiter)
                raise
        else:
            start = self._free.allocate(size)
        return WindowSlot(self._slab, start, num_bytes)

    def give_back(self, slot: WindowSlot) -> None:
        self._free.free(slot.offset, round_up(max(slot.num_bytes, 1)))
        self._serve()

    async def fill(self, slot: WindowSlot, source: memoryview) -> None:
        """Copy `source` to a slot. Not to be cancelled."""
        while self._renewal is not None:
            await self._renewal
        copying = asyncio.ensure_future(run_job(self._executor, copy_memory, slot.memory, source))
        self._filling.add(copying)
        copying.add_done_callback(self._filling.discard)
        await copying

    async def renew(self) -> None:
        """Have the slab move to a new memfd if it cannot be shared again, while nobody fills a slot. As its `renew`.
        Slots that the daemon still reads or writes keep, there, the bytes that they had here. Not to be cancelled."""
        if not self._slab.needs_renewal:
            return
        renewal = self._renewal = asyncio.get_running_loop().create_future()
        try:
            if self._filling:
                await asyncio.wait(self._filling)
            await run_job(self._executor, self._slab.renew)
        finally:
            self._renewal = None
            renewal.set_result(None)

    def refuse_waiting(self, error: Callable[[], Exception]) -> None:
        """Raise an error in each `take` that waits: nobody gives a slot back any more."""
        for line in self._waiting:
            while line:
                waiter = line.popleft()
                if not waiter.start.done():
                    waiter.start.set_exception(error())

    def _serve(self) -> None:
        for line in self._waiting:
            while line:
                if line[0].start.cancelled():
                    line.popleft()
                elif self._free.longest_bytes < line[0].size:
                    return
                else:
                    waiter = line.popleft()
                    waiter.start.set_result(self._free.allocate(waiter.size))

    def _leave(self, line: deque[_Waiter], waiter: _Waiter) -> None:
        if waiter in line:
            line.remove(waiter)
        elif not waiter.start.cancelled() and waiter.start.exception() is None:
            self._free.free(waiter.start.result(), waiter.size)
        self._serve()


class _Waiter(NamedTuple):
    size: int
    start: asyncio.Future[int]
