"""When does a daemon hang? What counts is whether it is heard from, not how long its work takes. For one loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Silence"]

_LOOKS = 10
_LOOKS_BEFORE_ASKING = 5


class Silence:
    """Notices that a daemon which owes answers says nothing at all, though it was asked whether it lives.

    Silence is counted in looks, not by the clock: when it was this process that was stopped, what the daemon said
    meanwhile is read before the next look.

    Args:
        seconds: of silence after which it hangs; a tenth more, if it was heard between two looks.
        is_owed: whether it has to say something.
        ask: whether it lives; called when half of the time has passed.
        give_up: called when all of it has.
        call_later: as an event loop's.
    """

    def __init__(
        self,
        seconds: float,
        *,
        is_owed: Callable[[], bool],
        ask: Callable[[], None],
        give_up: Callable[[], None],
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle],
    ) -> None:
        self.seconds = seconds
        self._is_owed, self._ask, self._give_up, self._call_later = is_owed, ask, give_up, call_later
        self._num_looks = 0  # since something was heard
        self._timer: asyncio.TimerHandle | None = None

    def heard(self) -> None:
        """The daemon has said something."""
        self._num_looks = -1  # the next look comes too early to be one

    def watch(self) -> None:
        """Look out, if that is not done yet, until nothing is owed any more."""
        if self._timer is None:
            self._num_looks = 0
            self._timer = self._call_later(self.seconds / _LOOKS, self._look)

    def stop(self) -> None:
        """Look no more; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if not self._is_owed():
            return
        self._num_looks += 1
        if self._num_looks >= _LOOKS:
            self._give_up()
            return
        if self._num_looks == _LOOKS_BEFORE_ASKING:
            self._ask()
        self._timer = self._call_later(self.seconds / _LOOKS, self._look)
