"""Decides whose turn it is at the drive, by start-time fair queueing. Pure: no clock, no threads.

All owners that wait get the same share of the service, measured by cost. It does not matter how much one item costs or
how many items an owner has queued. An owner that was idle gets no credit for that.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

__all__ = ["FairQueue"]

T = TypeVar("T")


class _Line(Generic[T]):
    """The items of one owner, in order.

    Attributes:
        starts_at: the virtual time (cost served per owner) at which its first item may start.
    """

    def __init__(self, starts_at: int) -> None:
        self.starts_at = starts_at
        self.items: deque[tuple[int, T]] = deque()


class FairQueue(Generic[T]):
    """Items of several owners, each with a cost. First come first served within an owner."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line[T]] = {}
        self._now = 0
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    @property
    def num_owners(self) -> int:
        """How many owners are remembered: all that have pushed since they were last forgotten."""
        return len(self._lines)

    def push(self, owner: int, cost: int, item: T) -> None:
        """Queue an item."""
        line = self._lines.get(owner)
        if line is None:
            line = self._lines[owner] = _Line(self._now)
        elif not line.items:
            line.starts_at = max(line.starts_at, self._now)
        line.items.append((cost, item))
        self._num_items += 1

    def pop(self) -> T:
        """Take the next item of the owner that was served least; among equals, of the one that has waited longest.

        Raises:
            IndexError: nothing is queued.
        """
        waiting = [owner for owner, line in self._lines.items() if line.items]
        if not waiting:
            raise IndexError("nothing is queued")
        owner = min(waiting, key=lambda each: self._lines[each].starts_at)
        line = self._lines.pop(owner)
        self._lines[owner] = line  # behind its equals
        cost, item = line.items.popleft()
        self._now = line.starts_at
        line.starts_at += cost
        self._num_items -= 1
        return item

    def forget(self, owner: int) -> list[T]:
        """Remove an owner; returns its items."""
        line = self._lines.pop(owner, None)
        items = [] if line is None else [item for _, item in line.items]
        self._num_items -= len(items)
        return items
