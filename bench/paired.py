"""Ratios of steps that are taken in turns, and how well they are known. Pure: seconds in, figures out.

What the machine does to one step it mostly does to its neighbours too. So the steps of one turn are compared with one
another, never with those of another turn, and the median over the turns tells how they stand.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

_RESAMPLES = 1000
_LEVEL = 0.95


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
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    cut = round(_RESAMPLES * (1 - _LEVEL) / 2)
    return Estimate(statistics.median(ratios), medians[cut], medians[-1 - cut])
