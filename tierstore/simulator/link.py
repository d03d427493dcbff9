"""The copy engine of one rank, in virtual time: a stream each way, and the copies that computing waits for."""

from __future__ import annotations

from collections import deque

from .clock import Clock, Process
from .copies import Copy
from .hardware import Activity, Copying

__all__ = ["LinkCopies"]


class LinkCopies:
    """A `SimulatedCopies`. One process both computes and queues copies: the host does not run ahead of its device.

    Args:
        clock: of the simulation.
        rank: number of the rank that has the link.

    Attributes:
        waited_seconds: how long computing has waited for copies.
    """

    def __init__(self, clock: Clock, rank: int) -> None:
        self.waited_seconds = 0.0
        self._clock = clock
        self._out = _Stream(clock, Copying(Activity.OFFLOAD, rank))
        self._back = _Stream(clock, Copying(Activity.RELOAD, rank))
        self._awaited: list[Copy] = []

    def copy_out(self, copy: Copy) -> None:
        self._out.queue(copy)

    def copy_in(self, copy: Copy) -> None:
        self._back.queue(copy)

    def wait(self, copy: Copy) -> None:
        self._awaited.append(copy)

    def catch_up(self) -> Process:
        began_seconds = self._clock.now_seconds
        while self._awaited:
            yield self._awaited.pop().wait
        self.waited_seconds += self._clock.now_seconds - began_seconds


class _Stream:
    """Runs copies one after the other."""

    def __init__(self, clock: Clock, activity: Copying) -> None:
        self._clock = clock
        self._activity = activity
        self._queue: deque[Copy] = deque()
        self._is_idle = True

    def queue(self, copy: Copy) -> None:
        self._queue.append(copy)
        if self._is_idle:
            self._is_idle = False
            self._clock.begin(self._run())

    def _run(self) -> Process:
        while self._queue:
            copy = self._queue.popleft()
            if copy.ready is not None:
                yield copy.ready.wait
            yield self._clock.work(self._activity, copy.nbytes)
            copy.end()
        self._is_idle = True
