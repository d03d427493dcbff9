"""Limits how many bytes of one session's writes are queued at once. Pure: no clock, no threads, no I/O.

Further writes are held back, in order. Only their names are kept here: the bytes lie in the client's shared memory.
Reads and discards do not come through here, so they never wait for the writes that are held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["WriteQueue"]


class _HeldBack(NamedTuple):
    num_bytes: int
    start: Callable[[], None]


class WriteQueue:
    """Writes of one session: those that are queued or at the drive, and those that are held back.

    Args:
        most_bytes: the most that may be queued or at the drive. A longer write goes alone. None: no limit.

    Attributes:
        most_bytes: as given.
        queued_bytes: bytes of writes that were started and have not ended.
        held_bytes: bytes of writes that were not started yet.
    """

    def __init__(self, most_bytes: int | None) -> None:
        self.most_bytes = most_bytes
        self.queued_bytes = 0
        self.held_bytes = 0
        self._held: deque[_HeldBack] = deque()

    def add(self, num_bytes: int, start: Callable[[], None]) -> None:
        """Start a write when those before it leave room for it: now, or in a later `end`."""
        self._held.append(_HeldBack(num_bytes, start))
        self.held_bytes += num_bytes
        self._start()

    def end(self, num_bytes: int) -> None:
        """A write that was started has ended."""
        self.queued_bytes -= num_bytes
        self._start()

    def _start(self) -> None:
        while self._held and self._has_room_for(self._held[0].num_bytes):
            first = self._held.popleft()
            self.held_bytes -= first.num_bytes
            self.queued_bytes += first.num_bytes
            first.start()

    def _has_room_for(self, num_bytes: int) -> bool:
        if self.most_bytes is None or not self.queued_bytes:
            return True
        return self.queued_bytes + num_bytes <= self.most_bytes
