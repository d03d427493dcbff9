"""Allocates extents in a segment. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import starmap

from ..base.free_runs import FreeRuns

ALIGNMENT_BYTES = 4096
"""Extents start and end at multiples of this: the block of the file systems we write to, and of 4K-sector drives."""


def round_up(num_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """The smallest multiple of the alignment that holds `num_bytes`."""
    return -(-num_bytes // alignment_bytes) * alignment_bytes


class FreeExtents(FreeRuns):
    """The free extents of a segment of `num_bytes`. `taken`: offset -> length of those in use, which do not overlap;
    they lie inside."""

    def __init__(self, num_bytes: int, taken: Mapping[int, int]) -> None:
        in_use = sorted(taken.items())
        ends = [0, *starmap(int.__add__, in_use)]
        starts = [*(start for start, _ in in_use), num_bytes]
        super().__init__((end, start - end) for end, start in zip(ends, starts, strict=True) if start > end)
        self._num_bytes = num_bytes

    @property
    def is_whole(self) -> bool:
        """Whether nothing is in use."""
        return self.length_at.get(0) == self._num_bytes

    def free(self, start: int, num_bytes: int) -> None:
        """Take back an extent, or a part of one. ValueError: part of it is not in use."""
        if start < 0 or start + num_bytes > self._num_bytes:
            raise ValueError(f"[{start}, {start + num_bytes}) is not handed out")
        super().free(start, num_bytes)
