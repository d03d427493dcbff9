"""The disk budget of a tier, and the bytes counted against it. Pure bookkeeping.

Segments are counted whole, and values at their peak, because LMDB keeps the space of deleted values for later ones. So
the sum is the space that the file system has given, not only the space of live records.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .allocator import ALIGNMENT_BYTES

__all__ = ["DiskBudget", "divided_budget"]

_VALUES_SHARE = 2  # a half of the limit: the index never gives back the space that values once took


class DiskBudget:
    """Counts bytes against one limit. Never blocks; not thread-safe (its owner is one loop).

    Attributes:
        limit_bytes: the most that segments and values may take together.
        segment_bytes: bytes that segment files take.
        value_bytes: bytes that live values in the index take.
        value_peak_bytes: the most that values ever took.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.segment_bytes = 0
        self.value_bytes = 0
        self.value_peak_bytes = 0

    @property
    def room_bytes(self) -> int:
        """The most that a new segment may take."""
        return max(0, self.limit_bytes - self.segment_bytes - self.value_peak_bytes)

    def add_value(self, num_bytes: int, *, has_other_home: bool) -> bool:
        """Count a value; False, and nothing is counted, if the limit does not allow it.

        Args:
            num_bytes: the bytes that it takes.
            has_other_home: it may live in an extent instead; it is refused here if values would exceed their share.
        """
        growth = max(0, self.value_bytes + num_bytes - self.value_peak_bytes)
        if growth > self.room_bytes:
            return False
        if growth and has_other_home and self.value_peak_bytes + growth > self.limit_bytes // _VALUES_SHARE:
            return False
        self.value_bytes += num_bytes
        self.value_peak_bytes += growth
        return True

    def take_up(self, segment_bytes: int, value_bytes: int, index_bytes: int) -> None:
        """Count the files that an earlier process left: segments, live values, and the index that holds the values.

        They may be more than the limit, if that was lowered. Then nothing is added until enough is gone.
        """
        self.segment_bytes = segment_bytes
        self.value_bytes = value_bytes
        self.value_peak_bytes = max(value_bytes, min(index_bytes, self.limit_bytes - segment_bytes))

    def remove_value(self, num_bytes: int) -> None:
        """Uncount a value that is gone; its space is kept for other values."""
        self.value_bytes -= num_bytes


def divided_budget(disk_bytes: int, capacities: Sequence[int]) -> list[int]:
    """Divide a budget over drives in proportion to their capacities, in whole blocks; the shares add up to it."""
    if not any(capacities):
        capacities = [1] * len(capacities)
    ends = [disk_bytes * each // sum(capacities) for each in itertools.accumulate(capacities)]
    ends = [*(end // ALIGNMENT_BYTES * ALIGNMENT_BYTES for end in ends[:-1]), disk_bytes]
    return [end - start for start, end in itertools.pairwise([0, *ends])]
