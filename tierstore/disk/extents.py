"""Extents: ranges of segment files, allocated as they are needed and never beyond the budget.

Segments have about 1 GiB: growing one file under direct writes stalls, and preallocating all of a drive would take
space from others. The next one is allocated off the loop before the current ones are full. The first write to a segment
runs at half the speed, so empty segments are kept. All but one are closed when they have been empty for minutes, or at
once where their space is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from typing import NamedTuple

from ..errors import StoreFullError
from .allocator import ALIGNMENT_BYTES, FreeExtents, round_up
from .boundary import Usage
from .budget import DiskBudget
from .forking import Inode, inode_of
from .jobs import run_job
from .segments import IoMode, Segment, SegmentFiles, close_segments, is_out_of_space, open_segment, remove_segments

SEGMENT_BYTES = 2**30
IDLE_SECONDS = 300.0
"""An empty segment is kept for at least this long, and at most twice as long. Most training steps are shorter."""

_RECORDS_PER_SEGMENT = 8  # large records get larger segments: at most an eighth is lost to what does not fit


class Extent(NamedTuple):
    """A range of a segment; offset and length are multiples of 4096."""

    segment: int
    offset: int
    num_bytes: int

    def trimmed(self, num_bytes: int) -> Extent:
        """The first `num_bytes` of this range, rounded up to 4096."""
        return self._replace(num_bytes=max(round_up(num_bytes), ALIGNMENT_BYTES))


class ExtentSpace:
    """The segments of one tier; for one loop. They are counted against `budget` as they come and go. `executor`: runs
    the jobs that make and close them. `idle_seconds`: how long an empty segment is kept. `used_bytes`: of all extents
    that are taken. `segments`: by number, the oldest first. `inodes`: of all segments that are open, being opened or
    closed."""

    def __init__(
        self,
        segment_files: SegmentFiles,
        budget: DiskBudget,
        mode: IoMode,
        executor: Executor,
        *,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._segment_files = segment_files
        self._budget = budget
        self._mode = mode
        self._executor = executor
        self.used_bytes = self._free_bytes = 0
        self.inodes: set[Inode] = set()
        self.segments: dict[int, Segment] = {}
        self._free: dict[int, FreeExtents] = {}  # in the same order
        self._num_opened = 0
        self._idle_seconds = idle_seconds
        self._empty_since: dict[int, float] = {}  # by the loop's clock; of those in use: when they last were empty
        self._idle_timer: asyncio.TimerHandle | None = None
        self._growth: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._num_promises = 0
        self._news = asyncio.Event()
        self._is_awaited = False
        self._refusal: Exception | None = None  # the file system's, of a segment of at least `_refused_bytes`
        self._refused_bytes = 0
        self._grows_ahead = True

    def usage(self) -> Usage:
        return self.used_bytes + self._budget.value_bytes, self._budget.limit_bytes

    def rebuild(self, segments: Iterable[Segment], extents: Mapping[int, Mapping[int, int]]) -> None:
        """Continue with segments that hold records, which this space closes; the caller counts the budget. `extents`:
        those in use, by segment: offset -> length."""
        for segment in segments:
            self._add(segment, extents[segment.number])
            self.inodes.add(inode_of(segment.file.fileno()))

    def take_at_once(self, num_bytes: int) -> Extent | None:
        """Take an extent of `num_bytes`, rounded up to 4096: the best fit of the oldest segment that has one, so that
        extents gather in few, and the others become empty. None: `take` has to wait for it."""
        num_bytes = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES or ALIGNMENT_BYTES
        for number, free in self._free.items():
            offset = free.allocate(num_bytes)
            if offset is not None:
                self.used_bytes += num_bytes
                self._free_bytes -= num_bytes
                if self._free_bytes < SEGMENT_BYTES // 4:
                    self._grow_ahead()
                return Extent(number, offset, num_bytes)
        return None

    async def take(self, num_bytes: int) -> Extent:
        """As `take_at_once`, but waits. StoreFullError: neither the budget nor the file system has room, not even after
        all promised space has come back. OSError: the device failed. Nothing was taken then."""
        num_bytes = max(round_up(num_bytes), ALIGNMENT_BYTES)
        while (extent := self.take_at_once(num_bytes)) is None:
            refused = self._refusal is not None and num_bytes >= self._refused_bytes
            if self._growth is None and not refused and self._budget.room_bytes >= num_bytes:
                self._start_growth(self._segment_bytes_for(num_bytes), num_bytes)
            elif not self.free_budget_for(num_bytes) and not self._is_news_coming():
                raise self._refuse(num_bytes)
            await self.wait_for_news()
        return extent

    def give_back(self, extent: Extent) -> None:
        """Free an extent. Only when nothing can still read or write it."""
        free, num_bytes = self._free[extent.segment], extent.num_bytes
        free.free(extent.offset, num_bytes)
        self.used_bytes -= num_bytes
        self._free_bytes += num_bytes
        if 0 in free.length_at and free.is_whole:
            self._note_empty(extent.segment)
        if self._is_awaited:
            self._announce()

    def trim(self, extent: Extent, num_bytes: int) -> Extent:
        """Give back all but the first `num_bytes`, rounded up to 4096; returns the extent that is kept."""
        kept = extent.trimmed(num_bytes)
        if kept.num_bytes < extent.num_bytes:
            rest_bytes = extent.num_bytes - kept.num_bytes
            self.give_back(Extent(extent.segment, extent.offset + kept.num_bytes, rest_bytes))
        return kept

    def promise(self) -> None:
        """Announce that space may soon come back: `take` then waits for it. One `settle_promise` follows."""
        self._num_promises += 1

    def settle_promise(self) -> None:
        """The space of one promise has come back, or never will."""
        self._num_promises -= 1
        self._announce()

    async def wait_for_news(self) -> bool:
        """Wait until something was given back or made; False at once if nothing is on its way."""
        if not self._is_news_coming():
            return False
        self._is_awaited = True
        await self._news.wait()
        return True

    def free_budget_for(self, num_bytes: int) -> bool:
        """Start to close empty segments if that makes room for `num_bytes`; `wait_for_news` tells when it is done."""
        empty_bytes = sum(self.segments[number].num_bytes for number in self._empty_segments())
        if not empty_bytes or self._budget.room_bytes + empty_bytes < num_bytes:
            return False
        self._start_closing(self._empty_segments)
        return True

    async def close(self, *, keep: bool = False) -> None:
        """With `keep`, files that have a name stay. No extent may be in use by a job. Idempotent."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        while pending := [task for task in (self._growth, self._closing) if task is not None]:
            await asyncio.wait(pending)
        segments = list(self.segments.values())
        self.segments.clear()
        self._free.clear()
        self.used_bytes = self._free_bytes = self._budget.segment_bytes = 0
        if segments and keep:
            await run_job(self._executor, close_segments, segments, self.inodes)
        elif segments:
            await run_job(self._executor, remove_segments, self._segment_files, segments, self.inodes)

    def _add(self, segment: Segment, taken: Mapping[int, int]) -> None:
        self.segments[segment.number] = segment
        self._free[segment.number] = FreeExtents(segment.num_bytes, taken)
        self._num_opened = max(self._num_opened, segment.number + 1)
        taken_bytes = sum(taken.values())
        self.used_bytes += taken_bytes
        self._free_bytes += segment.num_bytes - taken_bytes

    def _segment_bytes_for(self, num_bytes: int) -> int:
        usual = min(SEGMENT_BYTES, round_up(self._budget.limit_bytes // 4))
        room = self._budget.room_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        return min(max(usual, _RECORDS_PER_SEGMENT * num_bytes), room)

    def _grow_ahead(self) -> None:
        if self._grows_ahead and self._growth is None:
            usual = self._segment_bytes_for(0)
            if self._free_bytes < usual // 4:
                self._start_growth(usual, usual)

    def _start_growth(self, num_bytes: int, least_bytes: int) -> None:
        self._budget.segment_bytes += num_bytes
        self._growth = asyncio.get_running_loop().create_task(self._grow(num_bytes, least_bytes))

    async def _grow(self, num_bytes: int, least_bytes: int) -> None:
        taken_bytes = 0
        try:
            number = self._num_opened
            how = self._segment_files, number, num_bytes, least_bytes, self._mode, self.inodes
            segment = await run_job(self._executor, open_segment, *how)
            taken_bytes = segment.num_bytes
            self._add(segment, {})
            self._note_empty(number)
        except Exception as error:  # noqa: BLE001 - raised by `take`, which would ask again without end
            # A refused segment that no record waits for only ends the growing ahead of need.
            self._grows_ahead = False
            self._refusal, self._refused_bytes = error, least_bytes
        finally:
            self._budget.segment_bytes += taken_bytes - num_bytes
            self._growth = None
            self._announce()

    def _refuse(self, num_bytes: int) -> Exception:
        refusal, self._refusal = self._refusal, None  # the next one may ask the file system again
        if refusal is not None and not is_out_of_space(refusal):
            return refusal
        longest_bytes = max((free.longest_bytes for free in self._free.values()), default=0)
        reason = f"the longest free extent has {longest_bytes} bytes"
        if refusal is not None:
            reason = str(refusal)
        elif num_bytes > self._budget.limit_bytes:
            reason = "that is more than the whole disk budget"
        else:
            if self._free_bytes < num_bytes:
                reason = "the disk budget is used up"
            if kept_bytes := self._budget.kept_bytes:
                reason += f"; the index keeps {kept_bytes} bytes of the budget for small records"
        full = StoreFullError(num_bytes, *self.usage(), reason=reason)
        full.__cause__ = refusal
        return full

    def _empty_segments(self) -> list[int]:
        return [number for number, free in self._free.items() if free.is_whole]

    def _note_empty(self, number: int) -> None:
        self._empty_since[number] = asyncio.get_running_loop().time()
        self._set_idle_timer()

    def _set_idle_timer(self) -> None:
        if self._idle_timer is None and len(self._empty_segments()) > 1:
            self._idle_timer = asyncio.get_running_loop().call_later(self._idle_seconds, self._close_idle)

    def _close_idle(self) -> None:
        self._idle_timer = None
        self._start_closing(self._idle_segments)
        self._set_idle_timer()

    def _idle_segments(self) -> list[int]:
        """The segments to close: those that have long been empty. If that holds for all empty ones, one is kept."""
        empty = self._empty_segments()
        latest = asyncio.get_running_loop().time() - self._idle_seconds
        idle = [number for number in empty if self._empty_since[number] <= latest]
        return idle[1:] if len(idle) == len(empty) else idle

    def _start_closing(self, which: Callable[[], list[int]]) -> None:
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close_segments(which))

    async def _close_segments(self, which: Callable[[], list[int]]) -> None:
        """Close one after the other: freeing 1 GiB takes the file system 0.1 s, and others may be in use by then."""
        try:
            while numbers := which():
                number = min(numbers, key=lambda number: self.segments[number].num_bytes)
                segment = self.segments.pop(number)
                del self._free[number], self._empty_since[number]
                self._free_bytes -= segment.num_bytes
                await run_job(self._executor, remove_segments, self._segment_files, [segment], self.inodes)
                self._budget.segment_bytes -= segment.num_bytes
                self._refusal = None
                self._grows_ahead = True
                self._announce()
        finally:
            self._closing = None
            self._announce()

    def _is_news_coming(self) -> bool:
        return self._num_promises > 0 or self._growth is not None or self._closing is not None

    def _announce(self) -> None:
        self._is_awaited = False
        self._news.set()
        self._news = asyncio.Event()
