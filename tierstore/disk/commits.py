"""Commits operations to the index in batches. One batch is in flight; operations that come meanwhile form the next.

A job that has written a record to an extent also enters it in the index, by `commit_now`. This spares two hops between
threads, during which a client's slot would be held for nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor

from .index import Index
from .jobs import run_job
from .operations import Operation, Outcome, Put

__all__ = ["Commits"]

_BATCH_BYTES = 64 * 2**20  # LMDB keeps a transaction's new values in memory until it commits
_BATCH_OPERATIONS = 4096


class Commits:
    """The only way to an index that is in use. Lives on one loop and never blocks it; `commit_now` is for jobs.

    Args:
        index: open; the caller's to close.
        executor: runs the jobs.
    """

    def __init__(self, index: Index, executor: Executor) -> None:
        self._index = index
        self._executor = executor
        self._one_at_a_time = threading.Lock()  # calls of the index must not overlap
        self._queue: deque[tuple[Operation, asyncio.Future[Outcome]]] = deque()
        self._flight: asyncio.Task[None] | None = None

    def commit_now(self, operation: Operation) -> Outcome:
        """Do an operation now; returns its outcome. Blocks, also while a batch is in flight: only in a job."""
        return self._do((operation,))[0]

    async def submit(self, operation: Operation) -> Outcome:
        """Do an operation with the next batch; returns its outcome.

        Raises:
            RuntimeError: the executor takes no more jobs; nothing was done.
        """
        return (await self.submit_all((operation,)))[0]

    async def submit_all(self, operations: Iterable[Operation]) -> list[Outcome]:
        """Do several operations with the next batches; returns the outcome of each, with the error of one that failed.

        Raises:
            RuntimeError: the executor takes no more jobs; nothing was done.
        """
        loop = asyncio.get_running_loop()
        operations = list(operations)
        futures = [loop.create_future() for _ in operations]
        self._queue.extend(zip(operations, futures, strict=True))
        if self._flight is None:
            self._flight = loop.create_task(self._fly())
        return await asyncio.gather(*futures) if len(futures) > 1 else [await future for future in futures]

    async def settle(self) -> None:
        """Return when nothing is queued or in flight."""
        while self._flight is not None:
            await asyncio.wait((self._flight,))

    async def _fly(self) -> None:
        try:
            while batch := self._next_batch():
                await self._apply(batch)
        finally:
            self._flight = None

    async def _apply(self, batch: list[tuple[Operation, asyncio.Future[Outcome]]]) -> None:
        try:
            outcomes = await run_job(self._executor, self._do, [operation for operation, _ in batch])
        except Exception as error:  # noqa: BLE001  (handed to everybody who waits for this batch)
            outcomes = [Outcome(error)] * len(batch)
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            future.set_result(outcome)

    def _do(self, operations: Sequence[Operation]) -> list[Outcome]:
        with self._one_at_a_time:
            try:
                return self._index.apply(operations)
            except Exception as error:  # noqa: BLE001  (it is the outcome: raised again where each came from)
                return [Outcome(error)] * len(operations)

    def _next_batch(self) -> list[tuple[Operation, asyncio.Future[Outcome]]]:
        batch: list[tuple[Operation, asyncio.Future[Outcome]]] = []
        room = _BATCH_BYTES
        while self._queue and room > 0 and len(batch) < _BATCH_OPERATIONS:
            operation, _ = entry = self._queue.popleft()
            batch.append(entry)
            if isinstance(operation, Put) and operation.value is not None:
                room -= len(operation.value)
        return batch
