"""Puts a tier's locations, values and leases into its index, removes them, and tries again when that is refused.

An index refuses changes while the file system is full, deletions included. Empty segments may fill it, or space that is
just being freed, so a refused change is tried again when there is news.
"""

from __future__ import annotations

from .boundary import means_full, translated
from .budget import DiskBudget
from .commits import Commits
from .extents import Extent, ExtentSpace
from .location import Location
from .operations import Delete, DeleteLease, Fetch, Outcome, Put, PutLease

__all__ = ["IndexEntries"]


class IndexEntries:
    """The entries of one index. Lives on one loop and does not block it; `enter_now` is for jobs.

    Args:
        commits: the way to the index.
        space, budget: of the tier; an entry that is gone gives back what its record took of them.
        has_extents: records in extents are entered too, for the next process. Else only values are.
    """

    def __init__(self, commits: Commits, space: ExtentSpace, budget: DiskBudget, *, has_extents: bool) -> None:
        self._commits = commits
        self._space = space
        self._budget = budget
        self._has_extents = has_extents
        self._undeleted: dict[int, Location] = {}  # discarded, but the index refused: the next `delete` tries again
        self._undeleted_leases: set[int] = set()  # likewise

    @property
    def has_undeleted(self) -> bool:
        """Whether the index has refused to delete something, which it still holds."""
        return bool(self._undeleted or self._undeleted_leases)

    def is_for(self, location: Location) -> bool:
        """Whether a record at this place is entered. Extents that no later process looks for are not."""
        return location.segment is None or self._has_extents

    def enter_now(self, key: int, location: Location) -> Outcome:
        """Enter a record that was written to an extent, if it is to be entered. Blocks: only in a job."""
        return self._commits.commit_now(Put(key, location, None))

    async def put(self, put: Put | PutLease, outcome: Outcome | None = None) -> Outcome:
        """Enter a record or a lease; returns the outcome, with an error only if that failed for good.

        If empty segments, or one that is being made, fill the file system, this waits until they give space back.

        Args:
            put: what to enter.
            outcome: of a first try, if there was one.
        """
        if outcome is None:
            outcome = await self._commits.submit(put)
        is_last_try = False
        while outcome.error is not None and means_full(outcome.error) and not is_last_try:
            self._space.free_budget_for(0)
            is_last_try = not await self._space.wait_for_news()
            outcome = await self._commits.submit(put)
        return outcome

    async def fetch(self, fetch: Fetch) -> Outcome:
        """Read a value."""
        return await self._commits.submit(fetch)

    async def put_lease(self, number: int, blob: bytes) -> None:
        """Keep a few bytes under a number, in place of those that are there; returns when they are committed.

        Raises:
            StoreFullError, StorageIOError: what was there still is.
        """
        outcome = await self.put(PutLease(number, blob))
        usage = self._space.usage()
        with translated("write", "the index", "the lease is not entered", num_bytes=len(blob), usage=usage):
            if outcome.error is not None:
                raise outcome.error

    async def delete_lease(self, number: int) -> None:
        """Forget the bytes of that number, if there are any; if the index refuses, a later `delete` tries again."""
        self._undeleted_leases.add(number)
        await self.delete({})

    async def delete(self, locations: dict[int, Location]) -> None:
        """Remove records from the index and free what they took, once that is committed.

        A record that the index refuses to delete (a full file system) keeps its space until a later call succeeds. Each
        call also tries again what was refused before: records and leases.
        """
        locations = self._undeleted | locations
        leases = sorted(self._undeleted_leases)
        self._undeleted, self._undeleted_leases = {}, set()
        for key in [key for key, location in locations.items() if not self.is_for(location)]:
            self._free(locations.pop(key))
        if not locations and not leases:
            return
        self._space.promise()
        try:
            outcomes = await self._commits.submit_all([*map(Delete, locations), *map(DeleteLease, leases)])
            for number, outcome in zip(leases, outcomes[len(locations) :], strict=True):
                if outcome.error is not None:
                    self._undeleted_leases.add(number)
            for (key, location), outcome in zip(locations.items(), outcomes[: len(locations)], strict=True):
                if outcome.error is None:
                    self._free(location)
                else:
                    self._undeleted[key] = location
        finally:
            self._space.settle_promise()

    async def settle(self) -> None:
        """Return when the index has nothing more to do."""
        await self._commits.settle()

    def _free(self, location: Location) -> None:
        if location.segment is None or location.offset is None:
            self._budget.remove_value(location.taken_bytes)
        else:
            self._space.give_back(Extent(location.segment, location.offset, location.taken_bytes))
