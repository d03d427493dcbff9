"""Ratios of steps that are taken in turns, and how well they are known. Pure: seconds in, figures out.

What the machine does to one step it mostly does to its neighbours too. So the steps of one turn are compared with one
another, never with those of another turn, and the median over the turns tells how they stand.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy


class Estimate(NamedTuple):
    """A median over turns, and where the true one lies with 95 % (bootstrap: medians of samples from what was seen)."""

    median: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """How far the true median may be from this one, as a share of it."""
        return max(self.high - self.median, self.median - self.low) / self.median


def estimate_of(ones: Sequence[float], others: Sequence[float]) -> Estimate:
    """How ones stand to others, turn by turn; at least one turn. The same turns always give the same estimate."""
    ratios = [one / other for one, other in zip(ones, others, strict=True)]
    samples = numpy.random.default_rng(0).choice(ratios, (1000, len(ratios)))
    low, high = numpy.quantile(numpy.median(samples, axis=1), (0.025, 0.975))
    return Estimate(statistics.median(ratios), float(low), float(high))
