"""Virtual time: processes that wait for each other and for shared work, without any real waiting.

A process is a generator. It yields a `Wait`: a function that takes a `Resume`, which continues the process, and calls
it at some later virtual time. Actions at the same time happen in the order in which they were asked for, so every run
is the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Mapping
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

_MOST_AT_ONCE = 1_000_000

Resume = Callable[[], None]
Wait = Callable[[Resume], object]
Process = Generator[Wait, None, Any]
Rates = Callable[[Mapping[Hashable, int]], Mapping[Hashable, float]]
"""From the number of work items of each activity: the work that each item receives per second; may be infinite."""


class Clock:
    """Runs processes until none can go on.

    All work items of one activity run at the same speed. So one number for each activity tells when each item is done:
    the work that an item has received if it was there from the beginning."""

    def __init__(self, rates: Rates) -> None:
        self.now_seconds = 0.0
        self._rates_of = rates
        self._rates: Mapping[Hashable, float] | None = None
        self._served: dict[Hashable, float] = {}
        self._under_way: dict[Hashable, list[tuple[float, int, Resume]]] = {}
        self._due: list[tuple[float, int, Resume]] = []
        self._numbers = count()

    def begin(self, process: Process) -> None:
        try:
            wait = next(process)
        except StopIteration:
            return
        wait(lambda: self.begin(process))

    def call_soon(self, action: Resume) -> None:
        self._call(0.0, action)

    def sleep(self, seconds: float) -> Wait:
        return lambda resume: self._call(seconds, resume)

    def work(self, activity: Hashable, amount: float) -> Wait:
        """Go on when `amount` of an activity is done, at the rate at which it is served."""

        def add(resume: Resume) -> None:
            ends_at = self._served.setdefault(activity, 0.0) + amount
            heappush(self._under_way.setdefault(activity, []), (ends_at, next(self._numbers), resume))
            self._rates = None

        return add

    def run(self) -> None:
        """Let time pass until nothing more can happen. Raises RuntimeError: actions never end and no time passes: an
        infinitely fast drive moves the same bytes forever."""
        num_at_once, began_seconds = 0, -1.0
        while True:
            num_at_once = num_at_once + 1 if self.now_seconds == began_seconds else 0
            began_seconds = self.now_seconds
            if num_at_once > _MOST_AT_ONCE:
                raise RuntimeError(f"{num_at_once} events at {self.now_seconds:g} s: time does not pass")
            until_due = self._due[0][0] - self.now_seconds if self._due else inf
            until_done, activity = self._next_done()
            if until_due == until_done == inf:
                return
            if until_due <= until_done:
                self._serve(until_due)
                self.now_seconds, _, action = heappop(self._due)
            else:
                self._serve(until_done)
                self.now_seconds += until_done
                ends_at, _, action = heappop(self._under_way[activity])
                self._served[activity] = max(ends_at, self._served[activity])  # in spite of rounding
                self._rates = None
            action()

    def _call(self, seconds: float, action: Resume) -> None:
        heappush(self._due, (self.now_seconds + seconds, next(self._numbers), action))

    def _next_done(self) -> tuple[float, Hashable]:
        if self._rates is None:
            self._rates = self._rates_of({activity: len(work) for activity, work in self._under_way.items() if work})
        first_seconds, first = inf, None
        for activity, work in self._under_way.items():
            if work:
                left = max(0.0, work[0][0] - self._served[activity])
                rate = self._rates[activity]
                seconds = left / rate if rate else (inf if left else 0.0)
                if seconds < first_seconds:
                    first_seconds, first = seconds, activity
        return first_seconds, first

    def _serve(self, seconds: float) -> None:
        if not seconds or self._rates is None:
            return
        for activity, work in self._under_way.items():
            if work:
                self._served[activity] += self._rates[activity] * seconds


class VirtualTurns:
    """Lets `num_turns` processes work at once. Others wait, first come, first served."""

    def __init__(self, num_turns: int) -> None:
        self._num_free = num_turns
        self._waiting: deque[Resume] = deque()

    def take(self, resume: Resume) -> None:
        """A `Wait`: go on once there is a free turn, and take it."""
        if self._num_free:
            self._num_free -= 1
            resume()
        else:
            self._waiting.append(resume)

    def give_back(self) -> None:
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._num_free += 1
