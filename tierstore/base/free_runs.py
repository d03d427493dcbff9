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

    def allocate(self, num_bytes: int) -> int | None:
        """Take the first bytes of the best fit and return its start; None: no run is long enough."""
        by_length = self._by_length
        place = bisect_left(by_length, (num_bytes, 0))
        if place == len(by_length):
            return None
        length, start = by_length.pop(place)
        del self.length_at[start]
        place = bisect_left(self.starts, start)
        if length == num_bytes:
            del self.starts[place]
        else:
            self.starts[place] = rest = start + num_bytes
            self.length_at[rest] = length - num_bytes
            insort(by_length, (length - num_bytes, rest))
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
        """Add [start, start + num_bytes), and join it with its neighbours. ValueError: part of it is free."""
        starts, length_at, by_length = self.starts, self.length_at, self._by_length
        end, place = start + num_bytes, bisect_left(starts, start)
        after = place  # up to which runs are replaced
        before_end = starts[place - 1] + length_at[starts[place - 1]] if place else start
        if before_end > start or (place < len(starts) and starts[place] < end):
            raise ValueError(f"[{start}, {end}) is not handed out")
        if before_end == start and place:
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
        """Of the free run that ends there; 0: none does."""
        place = bisect_left(self.starts, end)
        if place and self.starts[place - 1] + self.length_at[self.starts[place - 1]] == end:
            return end - self.starts[place - 1]
        return 0
