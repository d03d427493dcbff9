"""The worker: asks the residency what is to be moved, and has the disk tier move it. A part of the engine, on its loop.

It decides nothing. Whenever it is woken, and whenever jobs have ended, it takes a turn: one call of the residency,
under the lock, reports what has ended and returns what comes next, as much as there is room for. Each job is a task
of the disk tier, which nobody cancels: its memory is in use until it has ended. Writes and reads have room of their
own, so that a read never waits behind writes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING, Any

from ..disk.tier import WaitingDiskTier
from ..ledger.jobs import Discard, Job, Read, Room, Write
from ..residency.handle import Record

if TYPE_CHECKING:
    from ..disk.tier import DiskTier, Stored
    from ..residency.residency import Residency

_NOTHING_MORE = Room(0, 0, 0)
_PATIENCE_SECONDS = 0.002
"""For so long, the end of a write or a discard waits for a turn that comes anyway, unless somebody waits for it."""


class Worker:
    """Made and used on the loop. `num_lanes`: the most jobs at once in each direction."""

    def __init__(self, disk: DiskTier, residency: Residency, executor: Executor, num_lanes: int) -> None:
        self._disk = disk
        self._residency = residency
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._free_writes, self._free_reads, self._free_discards = num_lanes, num_lanes, 1
        self._is_stopping = False
        self._is_turn_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._ended: list[tuple[Job[Record], Any]] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    async def serve(self, stop_wanted: asyncio.Event) -> None:
        """Take turns until the event is set and what runs by then has ended, also if this is cancelled. What was not
        begun is abandoned."""
        try:
            self.take_turn()
            await stop_wanted.wait()
        finally:
            self._is_stopping = True
            if isinstance(self._disk, WaitingDiskTier):
                self._disk.end_soon()
            while self._tasks:
                await asyncio.wait(self._tasks)
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
        work: Coroutine[Any, Any, Any]
        match job:
            case Write(record, (source, kind, None)):
                self._free_writes -= 1
                work = self._disk.write(record.key, source, kind)
            case Write():
                self._free_writes -= 1
                work = self._write_when_ready(job)
            case Read(record, destination):
                self._free_reads -= 1
                work = self._disk.read(record.key, destination)
            case Discard(keys):
                self._free_discards -= 1
                work = self._disk.discard(keys)
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._end, job))

    async def _write_when_ready(self, write: Write[Record]) -> Stored:
        source, kind, ready = write.memory
        await self._loop.run_in_executor(self._executor, ready.synchronize)
        return await self._disk.write(write.record.key, source, kind)

    def _end(self, job: Job[Record], task: asyncio.Task[Any]) -> None:
        """Report it in the next turn, with all others that end until then. What is raised here ends the engine."""
        self._tasks.discard(task)
        error = task.exception()
        match job:
            case Write():
                self._free_writes += 1
                is_urgent = self._free_writes == 1  # else others may wait for room
            case Read():
                self._free_reads += 1
                is_urgent = True
            case Discard():
                self._free_discards += 1
                is_urgent = False
                if error is not None:
                    raise error  # by the contract, it cannot fail
        if error is not None and not isinstance(error, Exception):
            raise error
        self._ended.append((job, task.result() if error is None else error))
        if self._is_turn_due:
            return
        if is_urgent or self._is_stopping or self._residency.guard.num_waiting:
            self._is_turn_due = True
            self._loop.call_soon(self.take_turn)
        elif self._timer is None:
            self._timer = self._loop.call_later(_PATIENCE_SECONDS, self.take_turn)
