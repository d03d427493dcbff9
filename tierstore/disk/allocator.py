"""Allocates extents on a line of bytes that consists of ranges. Pure. An extent is the best fit of the oldest range
that has room, so extents gather in few ranges, and the others become empty when use falls."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from operator import attrgetter

from ..base.free_runs import FreeRuns

ALIGNMENT_BYTES = 4096
"""Extents start and end at multiples of this: the block of the file systems we write to, and of 4K-sector drives."""


def round_up(num_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """The smallest multiple of the alignment that holds `num_bytes`."""
    return -(-num_bytes // alignment_bytes) * alignment_bytes


class _Range(FreeRuns):
    def __init__(self, start: int, num_bytes: int, taken: Iterable[tuple[int, int]]) -> None:
        super().__init__(_gaps(start, start + num_bytes, taken))
        self.start = start
        self.end = start + num_bytes

    @property
    def is_unused(self) -> bool:
        return self.length_at.get(self.start) == self.end - self.start


class ExtentAllocator:
    """Hands out and takes back aligned extents; for one loop. `total_bytes`: the sum of all ranges; `free_bytes`: those
    among them that are not handed out."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self.free_bytes = 0
        self._ranges: list[_Range] = []  # by address
        self._by_age: dict[int, _Range] = {}  # by start, the oldest first

    @property
    def largest_free_bytes(self) -> int:
        return max((each.longest_bytes for each in self._ranges), default=0)

    def allocate(self, num_bytes: int) -> int | None:
        """Take the best fit of the oldest range that has one; returns its start, or None."""
        _check_aligned(num_bytes)
        for each in self._by_age.values():
            if each.longest_bytes >= num_bytes:
                self.free_bytes -= num_bytes
                return each.allocate(num_bytes)
        return None

    def free(self, start: int, num_bytes: int) -> None:
        """Take back an extent, or any aligned part of one. ValueError: part of it is not handed out."""
        _check_aligned(num_bytes)
        end = start + num_bytes
        place = bisect_right(self._ranges, start, key=attrgetter("start")) - 1
        if place < 0 or end > self._ranges[place].end or self._ranges[place].has_free_in(start, end):
            raise ValueError(f"[{start}, {end}) is not handed out")
        self._ranges[place].free(start, num_bytes)
        self.free_bytes += num_bytes

    def add_range(self, start: int, num_bytes: int, taken: Iterable[tuple[int, int]] = ()) -> None:
        """Make [start, start + num_bytes) available, except for the extents that are `taken`: (start, length), by
        address. ValueError: it touches a range that is there, or an extent overlaps another or the range's end."""
        _check_aligned(num_bytes)
        end = start + num_bytes
        place = bisect_left(self._ranges, start, key=attrgetter("start"))
        touches_before = place > 0 and self._ranges[place - 1].end >= start
        touches_after = place < len(self._ranges) and self._ranges[place].start <= end
        if touches_before or touches_after:
            raise ValueError(f"[{start}, {end}) touches a range that is there")
        added = _Range(start, num_bytes, taken)
        self._by_age[start] = added
        self._ranges.insert(place, added)
        self.total_bytes += num_bytes
        self.free_bytes += sum(added.length_at.values())

    def remove_range(self, start: int, num_bytes: int) -> None:
        if not self.is_unused(start, num_bytes):
            raise ValueError(f"[{start}, {start + num_bytes}) is not an unused range")
        self._ranges.remove(self._by_age.pop(start))
        self.total_bytes -= num_bytes
        self.free_bytes -= num_bytes

    def is_unused(self, start: int, num_bytes: int) -> bool:
        """Whether [start, start + num_bytes) is a range in which no extent is handed out."""
        found = self._by_age.get(start)
        return found is not None and found.end == start + num_bytes and found.is_unused

    def free_runs(self) -> list[tuple[int, int]]:
        return [(start, each.length_at[start]) for each in self._ranges for start in each.starts]


def _gaps(start: int, end: int, taken: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for extent, num_bytes in taken:
        if extent < start:
            raise ValueError(f"the extent at {extent} overlaps another, or the range's start")
        if start < extent:
            yield start, extent - start
        start = extent + num_bytes
    if start > end:
        raise ValueError(f"an extent ends at {start}, behind the range's end")
    if start < end:
        yield start, end - start


def _check_aligned(num_bytes: int) -> None:
    if num_bytes <= 0 or num_bytes % ALIGNMENT_BYTES:
        raise ValueError(f"{num_bytes} bytes: an extent is a positive multiple of {ALIGNMENT_BYTES}")
