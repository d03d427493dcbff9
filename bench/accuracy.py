"""How near predictions come to what was measured several times. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

__all__ = ["Predicted", "errors_percent", "is_tie", "rank_correlation"]


class Predicted(NamedTuple):
    """One quantity.

    Attributes:
        predicted: what it was said to be.
        measured: what it was, each time; at least once.
    """

    predicted: float
    measured: Sequence[float]

    @property
    def median(self) -> float:
        """What it is taken to be."""
        return statistics.median(self.measured)


def errors_percent(pairs: Sequence[Predicted]) -> list[float]:
    """How far each prediction is from the median, whichever way."""
    return [100 * abs(pair.predicted / pair.median - 1) for pair in pairs]


def is_tie(one: Predicted, other: Predicted) -> bool:
    """Whether the two differ by no more than the noise: the least and the most of their measurements overlap."""
    return min(one.measured) <= max(other.measured) and min(other.measured) <= max(one.measured)


def rank_correlation(pairs: Sequence[Predicted]) -> tuple[float, int]:
    """Kendall's, over those couples that are no tie, and how many these are.

    1: each of them is predicted the right way round; -1: none is. A couple that is predicted to be equal counts as
    half right. 0 where all are ties.
    """
    told_apart = [couple for couple in combinations(pairs, 2) if not is_tie(*couple)]
    signs = [_sign(one.predicted - other.predicted) * _sign(one.median - other.median) for one, other in told_apart]
    return (statistics.fmean(signs) if signs else 0.0), len(signs)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
