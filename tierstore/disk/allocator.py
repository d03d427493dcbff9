"""Which ranges of a line of bytes are free: pure bookkeeping, no files.

Best fit over all free runs, the lowest address among equals, neighbours joined at once. Ranges are added and
removed as segment files come and go; ranges that do not touch are never joined, so that giving each segment
its own far-away part of the line keeps every extent within one file.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from operator import itemgetter

__all__ = ["ALIGNMENT_BYTES", "ExtentAllocator", "round_up"]

ALIGNMENT_BYTES = 4096
"""Extents start and end on this: the block of the file systems we write to, and of 4K-sector drives."""


def round_up(num_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """The smallest multiple of the alignment that holds `num_bytes`."""
    return -(-num_bytes // alignment_bytes) * alignment_bytes


class ExtentAllocator:
    """Hands out and takes back aligned extents. Never blocks; not thread-safe (its owner is one loop).

    Attributes:
        total_bytes: the sum of all ranges.
        free_bytes: what of them is not handed out.
    """

    def __init__(self) -> None:
        self.total_bytes = 0
        self.free_bytes = 0
        self._ranges: list[tuple[int, int]] = []  # (start, end), sorted
        self._starts: list[int] = []  # of free runs, sorted
        self._length_at: dict[int, int] = {}  # start of a free run -> its length
        self._by_length: list[tuple[int, int]] = []  # (length, start) of free runs, sorted: best fit is a bisection

    @property
    def largest_free_bytes(self) -> int:
        """The largest extent that `allocate` would grant now."""
        return self._by_length[-1][0] if self._by_length else 0

    def allocate(self, num_bytes: int) -> int | None:
        """Take the best-fitting extent; returns its start, or None where no free run is long enough."""
        _check_aligned(num_bytes)
        place = bisect_left(self._by_length, (num_bytes, 0))
        if place == len(self._by_length):
            return None
        length, start = self._by_length[place]
        self._remove_run(start)
        if length > num_bytes:
            self._insert_run(start + num_bytes, length - num_bytes)
        self.free_bytes -= num_bytes
        return start

    def free(self, start: int, num_bytes: int) -> None:
        """Take back an extent, or any aligned part of one (trimming a tail is freeing it).

        Raises:
            ValueError: part of it is free already or was never in a range; nothing changed.
        """
        _check_aligned(num_bytes)
        self._check_handed_out(start, start + num_bytes)
        self._join(start, num_bytes)
        self.free_bytes += num_bytes

    def add_range(self, start: int, num_bytes: int) -> None:
        """Make [start, start + num_bytes) available.

        Raises:
            ValueError: it overlaps or touches a range that is there.
        """
        _check_aligned(num_bytes)
        end = start + num_bytes
        place = bisect_left(self._ranges, (start, end))
        touches_before = place > 0 and self._ranges[place - 1][1] >= start
        touches_after = place < len(self._ranges) and self._ranges[place][0] <= end
        if touches_before or touches_after:
            raise ValueError(f"[{start}, {end}) touches a range that is there")
        self._ranges.insert(place, (start, end))
        self._insert_run(start, num_bytes)
        self.total_bytes += num_bytes
        self.free_bytes += num_bytes

    def remove_range(self, start: int, num_bytes: int) -> None:
        """Withdraw a range.

        Raises:
            ValueError: not a range, or some of it is handed out; nothing changed.
        """
        if not self.is_unused(start, num_bytes):
            raise ValueError(f"[{start}, {start + num_bytes}) is not an unused range")
        self._ranges.remove((start, start + num_bytes))
        self._remove_run(start)
        self.total_bytes -= num_bytes
        self.free_bytes -= num_bytes

    def is_unused(self, start: int, num_bytes: int) -> bool:
        """Whether [start, start + num_bytes) is a range of which nothing is handed out."""
        place = bisect_left(self._ranges, (start, start + num_bytes))
        is_range = place < len(self._ranges) and self._ranges[place] == (start, start + num_bytes)
        return is_range and self._length_at.get(start) == num_bytes

    def free_runs(self) -> list[tuple[int, int]]:
        """(start, length) of every free run, by address."""
        return [(start, self._length_at[start]) for start in self._starts]

    def _check_handed_out(self, start: int, end: int) -> None:
        place = bisect_right(self._ranges, start, key=itemgetter(0)) - 1
        within = place >= 0 and end <= self._ranges[place][1]
        run = bisect_right(self._starts, start)
        before_is_free = run > 0 and self._end_of(self._starts[run - 1]) > start
        after_is_free = run < len(self._starts) and self._starts[run] < end
        if not within or before_is_free or after_is_free:
            raise ValueError(f"[{start}, {end}) is not handed out")

    def _join(self, start: int, num_bytes: int) -> None:
        end = start + num_bytes
        run = bisect_right(self._starts, start)
        if run > 0 and self._end_of(previous := self._starts[run - 1]) == start:
            self._remove_run(previous)
            start = previous
        if (following := self._length_at.get(end)) is not None:
            self._remove_run(end)
            end += following
        self._insert_run(start, end - start)

    def _end_of(self, start: int) -> int:
        return start + self._length_at[start]

    def _insert_run(self, start: int, length: int) -> None:
        insort(self._starts, start)
        self._length_at[start] = length
        insort(self._by_length, (length, start))

    def _remove_run(self, start: int) -> None:
        length = self._length_at.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_length[bisect_left(self._by_length, (length, start))]


def _check_aligned(num_bytes: int) -> None:
    if num_bytes <= 0 or num_bytes % ALIGNMENT_BYTES:
        raise ValueError(f"{num_bytes} bytes: an extent is a positive multiple of {ALIGNMENT_BYTES}")
