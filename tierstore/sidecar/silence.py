"""Notices a daemon that hangs: by whether it is heard from, not by how long its work takes. For one loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Silence"]

_LOOKS = 10
_LOOKS_BEFORE_ASKING = 5


class Silence:
    """Gives up a daemon that owes answers and says nothing at all, though it was asked whether it lives.

    Silence is counted in looks, not by the clock: if this process was stopped itself, it reads what the daemon has said
    meanwhile before the next look.

    Args:
        seconds: the daemon hangs after this much silence; a tenth more, if it was heard between two looks.
        is_owed: whether the daemon owes an answer.
        ask: asks the daemon whether it lives; called when half of the time has passed.
        give_up: called when all of the time has passed.
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
        self._num_looks = -1  # the next look may come at once, and does not count

    def watch(self) -> None:
        """Look from now on until nothing is owed any more; idempotent."""
        if self._timer is None:
            self._num_looks = 0
            self._timer = self._call_later(self.seconds / _LOOKS, self._look)

    def stop(self) -> None:
        """Stop looking; idempotent."""
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
