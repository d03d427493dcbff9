"""Limits how much of the loop's time goes into texts for visitors. For one loop."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Sparing"]

_SHARE = 0.1
_MOST_SECONDS = 0.5


class Sparing:
    """Makes a text whenever it is asked for, unless that has taken more than a tenth of the time lately.

    Then the text that was made last is given again. So visitors that ask without end see figures that are some moments
    old, and the clients of the daemon are served meanwhile. Half a second of work may be done at once.

    Args:
        make: makes the text; on the loop.
        clock: time in seconds.
    """

    def __init__(self, make: Callable[[], bytes], clock: Callable[[], float] = time.perf_counter) -> None:
        self._make = make
        self._clock = clock
        self._text: bytes | None = None
        self._left_seconds = _MOST_SECONDS
        self._known_at = clock()

    def text(self) -> bytes:
        """The text: a new one, or the last one."""
        now = self._clock()
        self._left_seconds = min(_MOST_SECONDS, self._left_seconds + _SHARE * (now - self._known_at))
        self._known_at = now
        if self._text is None or self._left_seconds > 0:
            self._text = self._make()
            self._left_seconds -= self._clock() - now
        return self._text
