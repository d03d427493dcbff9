"""Virtual time: processes that wait for each other, without any real waiting.

A process is a generator. It yields a `Wait`: a function that takes a `Resume`, which continues the process, and calls
it at some later virtual time. Actions at the same time happen in the order in which they were asked for, so every run
is the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

from .flows import Flows

__all__ = ["Clock", "Process", "Progress", "Resume", "VirtualTurns", "Wait"]

_MOST_AT_ONCE = 1_000_000

Resume = Callable[[], None]
Wait = Callable[[Resume], object]
Process = Generator[Wait, None, Any]


class Clock:
    """Runs processes until none can go on.

    Args:
        flows: the work that takes time; this clock ends it.

    Attributes:
        now_seconds: virtual time since the beginning.
    """

    def __init__(self, flows: Flows) -> None:
        self.now_seconds = 0.0
        self._flows = flows
        self._due: list[tuple[float, int, Resume]] = []
        self._numbers = count()

    def begin(self, process: Process) -> None:
        """Start a process. It runs until its first wait before this returns."""
        try:
            wait = next(process)
        except StopIteration:
            return
        wait(lambda: self.begin(process))

    def call_soon(self, action: Resume) -> None:
        """Call `action` at the present time, after the actions that are already due."""
        self._call(0.0, action)

    def sleep(self, seconds: float) -> Wait:
        """Go on `seconds` later."""
        return lambda resume: self._call(seconds, resume)

    def work(self, activity: Any, amount: float) -> Wait:
        """Go on when `amount` of an activity is done, at the rate at which the flows serve it."""
        return lambda resume: self._flows.add(activity, amount, resume)

    def run(self) -> None:
        """Let time pass until nothing more can happen.

        Raises:
            RuntimeError: actions never end and no time passes: an infinitely fast drive moves the same bytes forever.
        """
        num_at_once, began_seconds = 0, -1.0
        while True:
            num_at_once = num_at_once + 1 if self.now_seconds == began_seconds else 0
            began_seconds = self.now_seconds
            if num_at_once > _MOST_AT_ONCE:
                raise RuntimeError(f"{num_at_once} events at {self.now_seconds:g} s: time does not pass")
            until_due = self._due[0][0] - self.now_seconds if self._due else inf
            until_done = self._flows.seconds_to_next()
            if until_due == until_done == inf:
                return
            if until_due <= until_done:
                self.now_seconds, _, action = heappop(self._due)
                self._flows.pass_time(until_due)
                action()
            else:
                self.now_seconds += until_done
                self._flows.finish_next(until_done)()

    def _call(self, seconds: float, action: Resume) -> None:
        heappush(self._due, (self.now_seconds + seconds, next(self._numbers), action))


class Progress:
    """Wakes all waiting processes at every progress, like the condition that training threads wait on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: list[Resume] = []

    def wait(self, resume: Resume) -> None:
        """A `Wait`: go on at the next progress."""
        self._waiting.append(resume)

    def notify_all(self) -> None:
        """There is progress: wake all who wait."""
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            self._clock.call_soon(resume)


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
        """Give a turn to the next process."""
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._num_free += 1
