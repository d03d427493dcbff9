"""Whose messages are handled now: one connection's at a time, a few, then the loop goes round. For one loop.

Fair as the turns at the drive (NOTE [Fair turns], `lanes.py`): all users who have something to say get the same share,
measured by its price, however many connections they have. Who says little comes first: a connection that was idle gets
one turn's credit, so it waits for the turn that runs, and not for all who are never silent."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

MOST_IN_TURN = 32
"""Frames and messages of a connection that are handled in one turn. One takes up to 20 us, with the task it starts."""

_MOST_SECONDS = 0.0005
_SECONDS_OF_ONE = 2e-5  # time counts as much as the messages that usually take it
_REST_SECONDS = 0.001
"""Pause after a full turn, unless somebody asks for one, or there is nobody else; the least that the timers have. A job
at the drive needs the interpreter's lock a dozen times: beside a client that never ends, it waited for the switch
interval each time."""


class Client(Protocol):
    """The connection that a client is on, as far as those know it that the connection is made of."""

    @property
    def slab_bytes(self) -> int: ...

    def hold(self) -> None: ...

    def go_on(self) -> None: ...

    def give_up_session(self) -> None: ...

    def cut_off(self, reason: str) -> None: ...


class Turn:
    """A connection's place. `take`: handle messages, at most so many, until this time (`time.perf_counter`); returns
    how many it were."""

    def __init__(self, uid: int, take: Callable[[int, float], int]) -> None:
        self.uid = uid
        self.take = take


T = TypeVar("T")


class _Line(Generic[T]):
    """Those who wait, by what each has paid so far. One that is new begins with what the others have paid by now."""

    def __init__(self) -> None:
        self._now = 0.0
        self._paid: dict[T, float] = {}
        self._waiting: list[tuple[float, int, T]] = []
        self._numbers = itertools.count()  # first come first served among equals

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_known(self) -> int:
        """Those who have waited, and are not forgotten."""
        return len(self._paid)

    def push(self, one: T) -> None:
        self._paid[one] = paid = max(self._paid.get(one, self._now), self._now - MOST_IN_TURN)
        heapq.heappush(self._waiting, (paid, next(self._numbers), one))

    def pop(self) -> T:
        paid, _, one = heapq.heappop(self._waiting)
        self._now = max(self._now, paid)
        return one

    def charge(self, one: T, price: float) -> None:
        """Of one that does not wait, and may be forgotten by now."""
        if one in self._paid:
            self._paid[one] += price

    def remove(self, one: T) -> None:
        self._paid.pop(one, None)


class Turns:
    """Gives turns to those who have asked for one; who has more to say asks again. `num_taken`: turns so far."""

    def __init__(self) -> None:
        self.num_taken = 0
        self._users: _Line[int] = _Line()  # those with a connection that waits
        self._of_user: defaultdict[int, _Line[Turn]] = defaultdict(_Line)
        self._running: Turn | None = None
        self._asks_again = False  # the one that runs
        self._rest: asyncio.TimerHandle | None = None  # until the next turn

    def ask(self, turn: Turn) -> None:
        """Ask for one turn. Not twice at a time."""
        if turn is self._running:  # what it pays for this one is not known yet
            self._asks_again = True
            return
        if self._rest is not None or (not self._users and self._running is None):
            self._end_rest()
            asyncio.get_running_loop().call_soon(self._give)
        of_user = self._of_user[turn.uid]
        is_running = self._running is not None and self._running.uid == turn.uid
        if not of_user and not is_running:
            self._users.push(turn.uid)
        of_user.push(turn)

    def remove(self, turn: Turn) -> None:
        """Of one that asks for no more."""
        self._of_user[turn.uid].remove(turn)

    def _end_rest(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def _give(self) -> None:
        self._end_rest()
        of_user = self._of_user[uid := self._users.pop()]
        self._running = turn = of_user.pop()
        self._asks_again = False
        self.num_taken += 1
        began_at, price = time.thread_time(), 0.0
        try:
            price = turn.take(MOST_IN_TURN, time.perf_counter() + _MOST_SECONDS)
        finally:
            price = max(price, (time.thread_time() - began_at) / _SECONDS_OF_ONE)
            self._running = None
            of_user.charge(turn, price)
            self._users.charge(uid, price)
            if self._asks_again:
                of_user.push(turn)
            if of_user:
                self._users.push(uid)
            if self._users:  # only after all that is ready by now
                loop = asyncio.get_running_loop()
                if price >= MOST_IN_TURN and sum(each.num_known for each in self._of_user.values()) > 1:
                    self._rest = loop.call_later(_REST_SECONDS, self._give)
                else:
                    loop.call_soon(self._give)
