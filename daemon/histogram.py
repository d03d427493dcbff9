"""Counts of observed sizes or durations, in fixed buckets. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["Histogram"]


class Histogram:
    """Counts of what was observed.

    Args:
        bounds: upper ends of the buckets, ascending, each within its bucket. One more bucket takes all larger values.

    Attributes:
        bounds: as given.
        counts: one for each bucket, so one more than bounds.
        total: sum of all values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
