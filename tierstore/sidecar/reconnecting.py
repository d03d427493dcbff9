"""Decides when a client that lost its connection tries to resume its session: at growing pauses, until it is resumed.

When the daemon has not come back within `reconnect_seconds`, all who wait are told; those who come later are told after
the next attempt that fails. So a client that computes and asks for nothing is back before its lease ends, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from ..base.system_words import words_of

_SHORTEST_PATIENCE_SECONDS = 1.0  # a loaded machine takes that long to come back to a process that lives
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5


class RefusedError(ConnectionError):
    """The daemon refuses the session. `is_final`: trying again is of no use."""

    def __init__(self, reason: str, is_final: bool) -> None:
        super().__init__(reason)
        self.is_final = is_final


class Reconnecting:
    """Runs the attempts as a task, from `begin` until the session is resumed, or over for good.

    Args:
        reconnect_seconds: for how long a lost daemon is waited for before those who wait are told.
        resume: makes one attempt within the seconds that it is given; raises why it failed.
        tell: called with the reason and the seconds waited, when those who wait are to be told.

    `patience_seconds`: the longest that a daemon which owes an answer may be silent, or take to resume the session.
    `lost_because`, `ended_because`: why the last attempt failed, and why the session is over for good, in words.
    """

    def __init__(
        self,
        reconnect_seconds: float,
        *,
        resume: Callable[[float], Awaitable[None]],
        has_requests: Callable[[], bool],
        tell: Callable[[str, float], None],
    ) -> None:
        self.patience_seconds = max(_SHORTEST_PATIENCE_SECONDS, reconnect_seconds)
        self.lost_because = "it closed the connection"
        self.ended_because: str | None = None
        self.task: asyncio.Task[None] | None = None
        self._reconnect_seconds = reconnect_seconds
        self._resume, self._has_requests, self._tell = resume, has_requests, tell
        self._lost_since: float | None = None  # since when no request has been answered, connected or not

    def note_answer(self) -> None:
        self._lost_since = None

    def note_silence(self) -> None:
        """The daemon was silent for `patience_seconds`: that time counts as waited for already."""
        self._lost_since = self._lost_since or time.monotonic() - self.patience_seconds

    def begin(self) -> None:
        """Begin the attempts, unless they have begun."""
        if self.task is None:
            self.task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """End the attempts; returns when none is under way."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait((self.task,))

    async def _run(self) -> None:
        try:
            await self._try_until_resumed()
        finally:
            self.task = None

    async def _try_until_resumed(self) -> None:
        """Time counts from when the daemon last answered a request, so nobody waits for ever for one that comes back
        and fails at each request; it is not tried again at once either."""
        is_due = self._lost_since is None
        pause = _FIRST_PAUSE_SECONDS if is_due else _LONGEST_PAUSE_SECONDS
        lost_since = self._lost_since = self._lost_since or time.monotonic()
        while True:
            left = lost_since + self._reconnect_seconds - time.monotonic()
            if is_due and await self._try(max(_SHORTEST_PATIENCE_SECONDS, left) if left > 0 else self.patience_seconds):
                return
            waited = time.monotonic() - lost_since
            left = self._reconnect_seconds - waited
            if left <= 0 or self.ended_because is not None:
                self._tell(self.lost_because, waited)
            if self.ended_because is not None:
                return
            await asyncio.sleep(min(pause, left) if left > 0 else pause)
            pause, is_due = min(2 * pause, _LONGEST_PAUSE_SECONDS), True

    async def _try(self, seconds: float) -> bool:
        """Try once. False: `lost_because` says why not; if it is for good, `ended_because` does too."""
        try:
            await self._resume(seconds)
        except RefusedError as error:
            self.lost_because = str(error)
            if error.is_final:
                self.ended_because = self.lost_because
            return False
        except Exception as error:  # noqa: BLE001 - delivered: to everybody who waits, when time is up
            self.lost_because = words_of(error)
            return False
        if not self._has_requests():
            self._lost_since = None
        return True
