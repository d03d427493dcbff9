"""Work that shares a resource: its speed depends on how much work there is at the same time.

All work items of one activity run at the same speed. So one number for each activity is enough to tell when each item
is done: the work that an item has received if it was there from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from heapq import heappop, heappush
from itertools import count
from math import inf

__all__ = ["Flows", "Rates"]

Rates = Callable[[Mapping[Hashable, int]], Mapping[Hashable, float]]
"""From the number of work items of each activity: the work that each item receives per second; may be infinite."""


class Flows:
    """The work that is being done.

    Args:
        rates: see `Rates`; called again whenever an item begins or ends.

    Attributes:
        busy_seconds: for each activity, how long there was any work.
    """

    def __init__(self, rates: Rates) -> None:
        self._rates_of = rates
        self._served: dict[Hashable, float] = {}
        self._under_way: dict[Hashable, list[tuple[float, int, Callable[[], None]]]] = {}
        self._rates: Mapping[Hashable, float] | None = None
        self._numbers = count()
        self._next: Hashable | None = None
        self.busy_seconds: dict[Hashable, float] = {}

    def add(self, activity: Hashable, amount: float, then: Callable[[], None]) -> None:
        """Begin work; `then` is called when it is done."""
        ends_at = self._served.setdefault(activity, 0.0) + amount
        heappush(self._under_way.setdefault(activity, []), (ends_at, next(self._numbers), then))
        self._rates = None

    def seconds_to_next(self) -> float:
        """The time until the first item is done, if nothing else begins; infinite if there is none."""
        if self._rates is None:
            self._rates = self._rates_of({activity: len(work) for activity, work in self._under_way.items() if work})
        first_seconds, self._next = inf, None
        for activity, work in self._under_way.items():
            if work:
                left = max(0.0, work[0][0] - self._served[activity])
                rate = self._rates[activity]
                seconds = left / rate if rate else (inf if left else 0.0)
                if seconds < first_seconds:
                    first_seconds, self._next = seconds, activity
        return first_seconds

    def pass_time(self, seconds: float) -> None:
        """Let time pass for all work. `seconds`: at most the last result of `seconds_to_next`."""
        if not seconds or self._rates is None:
            return
        for activity, work in self._under_way.items():
            if work:
                self._served[activity] += self._rates[activity] * seconds
                self.busy_seconds[activity] = self.busy_seconds.get(activity, 0.0) + seconds

    def finish_next(self, seconds: float) -> Callable[[], None]:
        """Let time pass until the first item is done; returns that item's `then`."""
        done = self._next
        if done is None:
            raise RuntimeError("nothing is under way")
        self.pass_time(seconds)
        ends_at, _, then = heappop(self._under_way[done])
        self._served[done] = max(ends_at, self._served[done])  # in spite of rounding
        self._rates = None
        return then
