"""The entries of a tier in its index: made and removed in batches. An index refuses changes while the file system is
full. Deletions are done in the space that is kept for them (`reserve.py`) then; what is refused all the same, as where
others took that, is tried again with the next change."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from contextlib import suppress

from .boundary import means_full, translated
from .budget import DiskBudget
from .codec.family import DamagedBytesError
from .extents import Extent, ExtentSpace
from .index import Delete, Index, Operation, Outcome, Put, PutLease
from .jobs import run_job
from .location import Location
from .reserve import Reserve

_BATCH_BYTES = 64 * 2**20  # LMDB keeps a transaction's new values in memory until it commits
_BATCH_OPERATIONS = 4096
_LEAST_KEPT_BYTES = 2**20  # of freed values, that are worth a job

_Queued = tuple[Operation, asyncio.Future[Outcome]]
_Deletion = tuple[Operation, Location | None]
"""With what it frees."""


class IndexEntries:
    """The only way to an index that is in use; for one loop, but `commit_now` is for jobs. One batch is in flight;
    operations that come meanwhile form the next. What fails has its error in its outcome, also where the executor takes
    no more jobs. An entry that is gone gives back what its record took of `space` and `budget`. `has_extents`: records
    in extents are entered too, for the next process. Else only values are. `undeleted`: what the index has refused to
    delete, and still holds; the next `delete` tries again."""

    def __init__(
        self,
        index: Index,
        executor: Executor,
        space: ExtentSpace,
        budget: DiskBudget,
        reserve: Reserve,
        *,
        has_extents: bool,
    ) -> None:
        self._index = index
        self._reserve = reserve
        self._executor = executor
        self._space = space
        self._budget = budget
        self.has_extents = has_extents
        self._one_at_a_time = threading.Lock()  # calls of the index must not overlap
        self._queue: deque[_Queued] = deque()
        self._flight: asyncio.Task[None] | None = None
        self.undeleted: list[_Deletion] = []

    def commit_now(self, operation: Operation) -> Outcome:
        """Blocks, also while a batch is in flight: only in a job."""
        return self._do((operation,))[0]

    async def submit(self, operation: Operation) -> Outcome:
        (outcome,) = await self.submit_all((operation,))
        return outcome

    async def submit_all(self, operations: Iterable[Operation]) -> list[Outcome]:
        loop = asyncio.get_running_loop()
        waiting: list[_Queued] = [(each, loop.create_future()) for each in operations]
        self._queue.extend(waiting)
        if self._flight is None:
            self._flight = loop.create_task(self._fly())
        return await asyncio.gather(*(future for _, future in waiting))

    async def give_back_space(self) -> bool:
        """Give what freed values have left in the index back to the drive, for extents; False: it is not worth it."""
        if self._budget.kept_bytes < _LEAST_KEPT_BYTES:
            return False
        await self._make_room()
        return True

    async def _make_room(self) -> None:
        await run_job(self._executor, self._give_back_free_pages)
        self._budget.note_given_back(self._index.allocated_bytes)

    def _give_back_free_pages(self) -> None:
        with self._one_at_a_time:
            self._index_gives_back()

    def _index_gives_back(self) -> None:
        with suppress(OSError, DamagedBytesError):  # a refusal to make room tells what is kept
            self._index.give_back_free_pages()

    async def settle(self) -> None:
        while self._flight is not None:
            await asyncio.wait((self._flight,))

    async def _fly(self) -> None:
        try:
            while batch := self._next_batch():
                try:
                    outcomes = await run_job(self._executor, self._do, [operation for operation, _ in batch])
                except Exception as error:  # noqa: BLE001  (handed to everybody who waits for this batch)
                    outcomes = [Outcome(error)] * len(batch)
                for (_, future), outcome in zip(batch, outcomes, strict=True):
                    if not future.done():  # else cancelled
                        future.set_result(outcome)
        finally:
            self._flight = None

    def _do(self, operations: Sequence[Operation]) -> list[Outcome]:
        with self._one_at_a_time:
            return self._apply(operations)

    def _apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        try:
            return self._index.apply(operations)
        except Exception as error:  # noqa: BLE001  (it is the outcome: raised again where each came from)
            return [Outcome(error)] * len(operations)

    def _next_batch(self) -> list[_Queued]:
        batch: list[_Queued] = []
        room = _BATCH_BYTES
        while self._queue and room > 0 and len(batch) < _BATCH_OPERATIONS:
            operation, _ = entry = self._queue.popleft()
            batch.append(entry)
            if isinstance(operation, Put) and operation.value is not None:
                room -= len(operation.value)
        return batch

    async def put(self, put: Put | PutLease, outcome: Outcome | None = None) -> Outcome:
        """Enter a record or a lease; returns the outcome, with an error only if that failed for good: where freed pages
        or empty segments fill the file system, it waits until they give space back. `outcome`: of a first try."""
        if outcome is None:
            outcome = await self.submit(put)
        if outcome.error is not None and means_full(outcome.error):
            await self._make_room()
            outcome = await self.submit(put)
        is_last_try = False
        while outcome.error is not None and means_full(outcome.error) and not is_last_try:
            self._space.free_budget_for(0)
            is_last_try = not await self._space.wait_for_news()
            outcome = await self.submit(put)
        return outcome

    async def put_lease(self, number: int, blob: bytes) -> None:
        """Raises StoreFullError or StorageIOError; what was there still is."""
        outcome = await self.put(PutLease(number, blob))
        usage = self._space.usage()
        with translated("write", "the index", "the lease is not entered", num_bytes=len(blob), usage=usage):
            if outcome.error is not None:
                raise outcome.error

    async def delete_lease(self, number: int) -> None:
        """Returns when it is committed; if the index refuses, a later `delete` tries again."""
        self.undeleted.append((PutLease(number, None), None))
        await self.delete({})

    async def delete(self, locations: dict[int, Location]) -> None:
        """Remove records and free what they took, once that is committed. What the index refuses to delete keeps its
        space until a later call succeeds, which tries again."""
        pending, self.undeleted = self.undeleted, []
        for key, location in locations.items():
            if location.segment is None or self.has_extents:
                pending.append((Delete(key), location))
            else:
                self.free(location)
        if not pending:
            return
        self._space.promise()
        try:
            outcomes = await self.submit_all([operation for operation, _ in pending])
            refused = self._free_deleted(pending, outcomes)
            if any(outcome.error is not None and means_full(outcome.error) for outcome in outcomes):
                outcomes = await run_job(self._executor, self._delete_in_reserve, [change for change, _ in refused])
                refused = self._free_deleted(refused, outcomes)
            self.undeleted += refused
        finally:
            self._space.settle_promise()
        if not self._reserve.is_kept:
            await run_job(self._executor, self._reserve.keep)

    def _free_deleted(self, pending: Sequence[_Deletion], outcomes: Sequence[Outcome]) -> list[_Deletion]:
        """Free what was deleted; returns what was refused."""
        refused = []
        for deletion, outcome in zip(pending, outcomes, strict=True):
            if outcome.error is not None:
                refused.append(deletion)
            elif deletion[1] is not None:
                self.free(deletion[1])
        return refused

    def _delete_in_reserve(self, operations: Sequence[Operation]) -> list[Outcome]:
        """A job. Each deletion takes some pages, and frees as many, whose space is given back when there is no more.

        One by one, and nothing between them: what is refused has taken space before, more of it for many."""
        outcomes: list[Outcome] = []
        with self._one_at_a_time:
            self._reserve.let_go()
            for operation in operations:
                outcome = self._apply((operation,))[0]
                if outcome.error is not None and means_full(outcome.error):
                    self._index_gives_back()
                    outcome = self._apply((operation,))[0]
                    if outcome.error is not None:  # others have taken the space, or LMDB's map is full
                        outcomes += [outcome] * (len(operations) - len(outcomes))
                        break
                outcomes.append(outcome)
            self._index_gives_back()
            self._reserve.keep()
        return outcomes

    def free(self, location: Location) -> None:
        if location.segment is None or location.offset is None:
            self._budget.remove_value(location.taken_bytes)
        else:
            self._space.give_back(Extent(location.segment, location.offset, location.taken_bytes))
