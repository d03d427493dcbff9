"""The worker: asks the residency what is to be moved, and has the disk tier move it. A part of the engine, on its loop.

It decides nothing. Whenever it is woken, and whenever jobs have ended, it takes a turn: one call of the residency,
under the lock, reports what has ended and returns what comes next, as much as there is room for. Each job is a task
that awaits the disk tier. Writes and reads have room of their own, so that a read never waits behind writes."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from ..ledger.jobs import Discard, Job, Read, Room, Write
from ..residency.handle import Record

if TYPE_CHECKING:
    from ..disk.tier import DiskTier
    from ..residency.residency import Residency

_NOTHING_MORE = Room(0, 0, 0)
_PATIENCE_SECONDS = 0.002
"""For so long, the end of a write or a discard waits for a turn that comes anyway, unless somebody waits for it."""


class Worker:
    """Made and used on the loop. `num_writes`, `num_reads`: the most jobs at once in each direction."""

    def __init__(
        self, disk: DiskTier, residency: Residency, executor: Executor, num_writes: int, num_reads: int
    ) -> None:
        self._disk = disk
        self._residency = residency
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._free_writes, self._free_reads, self._free_discards = num_writes, num_reads, 1
        self._is_stopping = False
        self._is_turn_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._ended: list[tuple[Job[Record], Any]] = []

    async def serve(self, stop_wanted: asyncio.Event) -> None:
        """Take turns until the event is set and what runs by then has ended. What was not begun is abandoned."""
        async with asyncio.TaskGroup() as self._tasks:
            self.take_turn()
            try:
                await stop_wanted.wait()
            finally:
                self._is_stopping = True
        self.take_turn()  # what has ended last

    def take_turn(self) -> None:
        self._is_turn_due = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ended, self._ended = self._ended, []
        room = Room(self._free_writes, self._free_reads, self._free_discards)
        for job in self._residency.exchange(ended, _NOTHING_MORE if self._is_stopping else room):
            self._begin(job)

    def _begin(self, job: Job[Record]) -> None:
        match job:
            case Write():
                self._free_writes -= 1
                self._tasks.create_task(self._write(job))
            case Read():
                self._free_reads -= 1
                self._tasks.create_task(self._read(job))
            case Discard():
                self._free_discards -= 1
                self._tasks.create_task(self._discard(job))

    def _end(self, job: Job[Record], outcome: object, *, is_urgent: bool) -> None:
        """Report it in the next turn, with all others that end until then."""
        self._ended.append((job, outcome))
        if self._is_turn_due:
            return
        if is_urgent or self._is_stopping or self._residency.guard.num_waiting:
            self._is_turn_due = True
            self._loop.call_soon(self.take_turn)
        elif self._timer is None:
            self._timer = self._loop.call_later(_PATIENCE_SECONDS, self.take_turn)

    async def _write(self, write: Write[Record]) -> None:
        source, kind, ready = write.memory
        try:
            if ready is not None:
                await self._loop.run_in_executor(self._executor, ready.synchronize)
            outcome: object = await self._disk.write(write.record.key, source, kind)
        except Exception as error:  # noqa: BLE001 - delivered: the residency raises it on the thread that trains
            outcome = error
        self._free_writes += 1
        self._end(write, outcome, is_urgent=self._free_writes == 1)  # else others may wait for room

    async def _read(self, read: Read[Record]) -> None:
        try:
            outcome: object = await self._disk.read(read.record.key, read.memory)
        except Exception as error:  # noqa: BLE001 - delivered: the residency raises it on the thread that trains
            outcome = error
        self._free_reads += 1
        self._end(read, outcome, is_urgent=True)

    async def _discard(self, discard: Discard) -> None:
        await self._disk.discard(discard.keys)
        self._free_discards += 1
        self._end(discard, None, is_urgent=False)
