"""The traces of one store: at most one is recorded at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from ..errors import ConfigError, ConfigTypeError, StorageIOError
from .events import Header
from .file import TraceFile
from .observer import Observer
from .recorder import Recorder

__all__ = ["Observed", "Recordings"]

_DEADLINE_SECONDS = 60.0


class Observed(Protocol):
    """The books of a store, as far as a trace needs them."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """The store's lock; to be entered."""

    def check_open(self) -> None:
        """Raise StoreClosedError if the store is closed."""

    def observe(self, observer: Observer) -> None:
        """Tell this one from now on, and no other. The caller holds the lock."""

    def levels(self) -> tuple[int, ...]:
        """The fields of `Levels` after its time. The caller holds the lock."""


class Recordings:
    """Begins, continues and ends traces.

    Args:
        books: of the store.
        describe: makes the first line of a trace.

    Attributes:
        recorder: of the trace that is on for the whole store (`TierStore.trace`); None: only scopes that say so.
    """

    def __init__(self, books: Observed, describe: Callable[[], Header]) -> None:
        self.recorder: Recorder | None = None
        self._books = books
        self._describe = describe
        self._current: Recorder | None = None
        self._begun: set[str] = set()
        self._lock = threading.Lock()

    def begin(self, path: object) -> Recorder:
        """The recorder of the trace at `path`, which begins now, or goes on if this store has begun it before.

        Raises:
            ConfigError: the path cannot be written to, or another trace of this store is not over. Nothing has changed.
            StorageIOError: an earlier trace could not be written to its end; or no thread can be started to write it.
            StoreClosedError: the store is closed.
        """
        self._books.check_open()
        if not isinstance(path, (str, os.PathLike)):
            raise ConfigTypeError("trace", path, "give the path of a file to write, or None")
        place = os.path.abspath(os.fspath(path))
        with self._lock:
            if self._current is not None and self._current.place != place:
                self._end_idle(self._current, place)
            if self._current is None:
                self._current = self._open(place)
            return self._current

    def enter(self, recorder: Recorder) -> None:
        """A scope, or the store, is recorded from now on."""
        with self._books.lock:
            recorder.num_inside += 1
            if not recorder.is_over():
                self._books.observe(recorder)
        recorder.wake()

    def leave(self, recorder: Recorder) -> None:
        """A scope, or the store, is not recorded any more; recording of its graphs goes on until they are gone."""
        with self._books.lock:
            recorder.num_inside -= 1

    def flush(self) -> None:
        """Return when what was recorded is written, or cannot be, or after a minute."""
        recorder = self._current
        if recorder is not None:
            recorder.flush(_DEADLINE_SECONDS)

    def end(self, deadline_seconds: float, reason: str = "ended") -> None:
        """End the trace that is on, if one is.

        Raises:
            StorageIOError: see `Recorder.close`.
        """
        with self._lock:
            recorder, self._current, self.recorder = self._current, None, None
        if recorder is not None:
            with self._books.lock:
                self._books.observe(Observer())
            recorder.close(deadline_seconds, reason)

    def request_stop(self) -> None:
        """Have the trace end that is on, if one is. Waits for nothing."""
        recorder = self._current
        if recorder is not None:
            recorder.request_stop()

    def abandon(self) -> None:
        """In a forked child: forget the trace, whose file is the parent's. Takes no lock."""
        recorder, self._current, self.recorder = self._current, None, None
        if recorder is not None:
            recorder.abandon()

    def _open(self, place: str) -> Recorder:
        is_continued = place in self._begun
        file = TraceFile(place, is_continued=is_continued)
        try:
            header = None if is_continued else self._describe()
            recorder = Recorder(place, file, header, self._books.levels, self._look_away_if_idle)
        except OSError as error:  # of its thread
            file.close()
            raise StorageIOError("trace", place, str(error), "nothing is recorded, training is not affected") from error
        self._begun.add(place)
        return recorder

    def _end_idle(self, current: Recorder, place: str) -> None:
        with self._books.lock:
            is_idle = current.is_idle()
            if is_idle:
                self._books.observe(Observer())
        if not is_idle:
            raise ConfigError("trace", place, f"{current.place} is still being recorded: its graphs are alive")
        self._current = None
        current.close(_DEADLINE_SECONDS)

    def _look_away_if_idle(self) -> None:
        """What is not traced is not observed either."""
        recorder = self._current
        with self._books.lock:
            if recorder is None or recorder.is_idle() or recorder.is_over():
                self._books.observe(Observer())
