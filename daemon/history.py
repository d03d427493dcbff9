"""The last minutes of figures, as curves: counts as rates, levels as they are. Pure: the time is passed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec

__all__ = ["Curves", "History"]

_DIGITS = 6


class Curves(msgspec.Struct, frozen=True):
    """Figures over time. All lists are equally long, the oldest first.

    Attributes:
        at: when, in seconds.
        rates: growth of each count per second, since the moment before.
        levels: the others.
        fastest: the highest rate of each count since the history began, not only of the moments kept.
    """

    at: list[float]
    rates: dict[str, list[float]]
    levels: dict[str, list[float]]
    fastest: dict[str, float]


class History:
    """Keeps the newest moments. The names of figures must be the same at each.

    Args:
        num_moments: how many to keep.
    """

    def __init__(self, num_moments: int) -> None:
        self._num_moments = num_moments
        self._at: deque[float] = deque(maxlen=num_moments)
        self._rates: dict[str, deque[float]] = {}
        self._levels: dict[str, deque[float]] = {}
        self._fastest: dict[str, float] = {}
        self._last: tuple[float, Mapping[str, float]] | None = None

    def note(self, at: float, counts: Mapping[str, float], levels: Mapping[str, float]) -> None:
        """Take in a moment. The first one has no rates, so it is only what the second is compared with.

        Args:
            at: in seconds, later than the last.
            counts: totals that only grow.
            levels: what goes up and down.
        """
        before, self._last = self._last, (at, counts)
        if before is None:
            return
        then, counts_then = before
        self._at.append(at)
        for name, count in counts.items():
            rate = round((count - counts_then[name]) / (at - then), _DIGITS)
            self._of(self._rates, name).append(rate)
            self._fastest[name] = max(rate, self._fastest.get(name, 0.0))
        for name, level in levels.items():
            self._of(self._levels, name).append(level)

    def curves(self) -> Curves:
        """All that is kept."""
        rates, levels = ({name: list(kept) for name, kept in kinds.items()} for kinds in (self._rates, self._levels))
        return Curves(list(self._at), rates, levels, dict(self._fastest))

    def _of(self, kept: dict[str, deque[float]], name: str) -> deque[float]:
        return kept.setdefault(name, deque(maxlen=self._num_moments))
