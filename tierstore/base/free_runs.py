"""Free runs on a line of bytes: best fit, neighbours joined at once. Pure bookkeeping, for disk space and memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable


class FreeRuns:
    """The free runs of a line of bytes: their `starts`, sorted, and start -> length in `length_at`."""

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        """`runs`: (start, length) of each run that is free at first, by address; no two overlap or touch."""
        self.length_at = dict(runs)
        self.starts = list(self.length_at)
        # (length, start), sorted, so that best fit is a bisection
        self._by_length = sorted((length, start) for start, length in self.length_at.items())

    @property
    def longest_bytes(self) -> int:
        return self._by_length[-1][0] if self._by_length else 0

    def best_fit(self, num_bytes: int) -> int:
        """The start of the shortest run that is long enough, the lowest among equals. One must exist."""
        return self._by_length[bisect_left(self._by_length, (num_bytes, 0))][1]

    def allocate(self, num_bytes: int) -> int:
        """Take the first bytes of the best fit and return its start. A run that is long enough must exist."""
        start = self.best_fit(num_bytes)
        self.take(start, num_bytes)
        return start

    def take(self, start: int, num_bytes: int) -> None:
        """Take [start, start + num_bytes), which must be free."""
        place = bisect_right(self.starts, start) - 1
        run = self.starts[place]
        length = self.length_at.pop(run)
        end, run_end = start + num_bytes, run + length
        by_length = self._by_length
        del by_length[bisect_left(by_length, (length, run))]
        left = [(run, start - run)] if run < start else []
        if end < run_end:
            left.append((end, run_end - end))
        self.starts[place : place + 1] = [first for first, _ in left]
        for first, nbytes in left:
            self.length_at[first] = nbytes
            insort(by_length, (nbytes, first))

    def free(self, start: int, num_bytes: int) -> None:
        """Add [start, start + num_bytes), in which no byte may be free, and join it with its neighbours."""
        starts, length_at, by_length = self.starts, self.length_at, self._by_length
        end, place = start + num_bytes, bisect_left(starts, start)
        after = place  # up to which runs are replaced
        if place and starts[place - 1] + length_at[starts[place - 1]] == start:
            place -= 1
            start = starts[place]
        if end in length_at:
            end += length_at[end]
            after += 1
        for joined in starts[place:after]:
            del by_length[bisect_left(by_length, (length_at.pop(joined), joined))]
        starts[place:after] = [start]
        length_at[start] = end - start
        insort(by_length, (end - start, start))

    def length_before(self, end: int) -> int:
        place = bisect_left(self.starts, end)
        if place and self._end_of(start := self.starts[place - 1]) == end:
            return end - start
        return 0

    def has_free_in(self, start: int, end: int) -> bool:
        place = bisect_right(self.starts, start)
        before_is_free = place > 0 and self._end_of(self.starts[place - 1]) > start
        return before_is_free or (place < len(self.starts) and self.starts[place] < end)

    def _end_of(self, start: int) -> int:
        return start + self.length_at[start]
