"""Virtual time: processes that wait for each other, and nothing that really waits.

A process is a generator. It yields what it waits for: a function that is given how the process goes on, and calls that
when it may, at some later virtual time. What happens at the same time happens in the order in which it was asked for,
so a run is the same every time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

from .flows import Flows

__all__ = ["Clock", "Process", "Progress", "Resume", "Turns", "Wait"]

_MOST_AT_ONCE = 1_000_000

Resume = Callable[[], None]
Wait = Callable[[Resume], object]
Process = Generator[Wait, None, Any]


class Clock:
    """Runs processes until none can go on.

    Args:
        flows: the work that takes time; what is added to them ends by this clock.

    Attributes:
        now_seconds: since the beginning.
    """

    def __init__(self, flows: Flows) -> None:
        self.now_seconds = 0.0
        self._flows = flows
        self._due: list[tuple[float, int, Resume]] = []
        self._numbers = count()

    def begin(self, process: Process) -> None:
        """Start a process; it goes as far as it can before this returns."""
        try:
            wait = next(process)
        except StopIteration:
            return
        wait(lambda: self.begin(process))

    def call_soon(self, action: Resume) -> None:
        """Call `action` at this time, after what is under way."""
        self._call(0.0, action)

    def sleep(self, seconds: float) -> Wait:
        """Go on so much later."""
        return lambda resume: self._call(seconds, resume)

    def work(self, activity: Any, amount: float) -> Wait:
        """Go on when so much of an activity is done, at whatever rate the flows serve it."""
        return lambda resume: self._flows.add(activity, amount, resume)

    def run(self) -> None:
        """Let time pass until nothing is left that would ever happen.

        Raises:
            RuntimeError: ever more happens, and no time passes: an infinitely fast drive moves the same bytes to and
                fro.
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
    """Wakes all who wait whenever there is progress: the condition that training threads wait on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: list[Resume] = []

    def wait(self, resume: Resume) -> None:
        """A `Wait`: go on at the next progress."""
        self._waiting.append(resume)

    def notify_all(self) -> None:
        """There is some."""
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            self._clock.call_soon(resume)


class Turns:
    """So many may work at once; who comes next waits, first come, first served."""

    def __init__(self, num_turns: int) -> None:
        self._num_free = num_turns
        self._waiting: deque[Resume] = deque()

    def take(self, resume: Resume) -> None:
        """A `Wait`: go on with a turn."""
        if self._num_free:
            self._num_free -= 1
            resume()
        else:
            self._waiting.append(resume)

    def give_back(self) -> None:
        """A turn is free for the next."""
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._num_free += 1
