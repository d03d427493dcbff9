"""When a daemon counts as hanging: a clock that the test turns."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tierstore.sidecar.reconnecting import Silence


class Clock:
    """Calls what was asked for, in order, as it is turned; it is its own `TimerHandle`: only one is pending."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: tuple[float, Callable[[], None]] | None = None

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Clock:
        assert self._due is None
        self._due = self.now + seconds, callback
        return self

    def cancel(self) -> None:
        self._due = None

    def turn_to(self, now: float) -> None:
        while self._due is not None and self._due[0] <= now + 1e-9:
            (due_at, callback), self._due = self._due, None
            self.now = max(self.now, due_at)
            callback()
        self.now = now


class Watched:
    """A silence of 10 seconds that is watched, and what came of it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.is_owed = True
        self.asked_at: list[float] = []
        self.given_up_at: list[float] = []
        self.silence = Silence(
            10.0,
            is_owed=lambda: self.is_owed,
            ask=lambda: self.asked_at.append(round(self.clock.now, 6)),
            give_up=lambda: self.given_up_at.append(round(self.clock.now, 6)),
            call_later=self.clock.call_later,  # type: ignore[arg-type]
        )
        self.silence.watch()


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_silent_daemon_is_asked_at_half_time_and_given_up_at_the_end(watched: Watched) -> None:
    watched.clock.turn_to(9.9)
    assert (watched.asked_at, watched.given_up_at) == ([5.0], [])
    watched.clock.turn_to(100)
    assert (watched.asked_at, watched.given_up_at) == ([5.0], [10.0])


def test_daemon_that_only_says_that_it_lives_is_never_given_up(watched: Watched) -> None:
    for _ in range(20):
        num_asked = len(watched.asked_at)
        while len(watched.asked_at) == num_asked:
            watched.clock.turn_to(watched.clock.now + 1)
        watched.clock.turn_to(watched.clock.now + 4)  # it takes its time
        watched.silence.heard()
    assert watched.given_up_at == []


def test_silence_is_no_offence_while_nothing_is_owed(watched: Watched) -> None:
    watched.clock.turn_to(8)
    watched.is_owed = False
    watched.clock.turn_to(100)
    watched.is_owed = True
    watched.silence.watch()
    watched.clock.turn_to(109)
    assert (watched.asked_at, watched.given_up_at) == ([5.0, 105.0], [])
    watched.clock.turn_to(110)
    assert watched.given_up_at == [110.0]


def test_own_standstill_is_not_taken_for_the_daemon_s(watched: Watched) -> None:
    """A stopped process finds all timers due at once, and reads what has arrived only after the first of them."""
    watched.clock.turn_to(8)
    watched.clock.now = 3600.0
    watched.clock.turn_to(3600.0)  # one look: the next is a second later
    watched.silence.heard()
    watched.clock.turn_to(3608)
    assert watched.given_up_at == []
