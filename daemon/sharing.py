"""Makes one thing for all who ask for it, and rests in between. For one loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

__all__ = ["Shared"]

T = TypeVar("T")

_RESTS = 10
"""How many times as long as the making. So all who ask without end take a tenth of the time together."""
_MOST_REST_SECONDS = 0.5  # a client that asks for a sign of life waits for it too


class Shared(Generic[T]):
    """A thing that is made when somebody asks. Nothing blocks the loop but what `make` does on it.

    Everybody gets one that was begun after they had asked. All who ask before it begins get the same.

    Args:
        make: makes the thing.
        clock: time in seconds.
    """

    def __init__(self, make: Callable[[], Awaitable[T]], clock: Callable[[], float] = time.perf_counter) -> None:
        self._make = make
        self._clock = clock
        self._turn = asyncio.Lock()
        self._next: asyncio.Task[T] | None = None  # the one that has not begun
        self._due_at = clock()

    async def get(self) -> T:
        """Wait for the next one: until the one before is made, for a rest of half a second at most, and for its making.

        Raises:
            Exception: what `make` raises, for each who asked.
        """
        if self._next is None:
            self._next = asyncio.ensure_future(self._make_when_due())
        return await asyncio.shield(self._next)

    def rest_for(self, seconds: float) -> None:
        """Rest for work of so many seconds, which was done with the thing or for it."""
        self._due_at = self._clock() + min(_MOST_REST_SECONDS, _RESTS * seconds)

    async def _make_when_due(self) -> T:
        async with self._turn:
            await asyncio.sleep(max(0.0, self._due_at - self._clock()))
            self._next = None
            began_at = self._clock()
            try:
                return await self._make()
            finally:
                self.rest_for(self._clock() - began_at)
