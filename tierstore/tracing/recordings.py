"""The traces of one store: at most one is recorded at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from ..base.system_words import words_of
from ..errors import ConfigError, ConfigTypeError, StorageIOError
from ..rules.observer import Observer
from .events import Header
from .file import TraceFile
from .recorder import Recorder

__all__ = ["Observed", "Recordings"]

_DEADLINE_SECONDS = 60.0


class Observed(Protocol):
    """The part of a store that a trace needs."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """The store's lock, to be used in `with`."""

    def check_open(self) -> None:
        """Raise StoreClosedError if the store is closed."""

    def refuse_to_wait(self) -> None:
        """Raise StoreBusyError if this thread may not wait for those of the store."""

    def observe(self, observer: Observer) -> None:
        """Report moves to this observer from now on, instead of the one before. The caller holds the lock."""

    def levels(self) -> tuple[int, ...]:
        """The fields of `Levels` after its time. The caller holds the lock."""


class Recordings:
    """Begins, continues and ends traces.

    Args:
        observed: what is needed of the store.
        describe: makes the first line of a trace.

    Attributes:
        recorder: records the trace of the whole store (`TierStore.trace`); None: only scopes that ask are traced.
    """

    def __init__(self, observed: Observed, describe: Callable[[], Header]) -> None:
        self.recorder: Recorder | None = None
        self._observed = observed
        self._describe = describe
        self._current: Recorder | None = None
        self._begun: set[str] = set()
        self._lock = threading.RLock()  # a finalizer may close the store in the middle of `begin`

    def begin(self, path: object) -> Recorder:
        """Return the recorder of the trace at `path`. It begins now, or goes on if this store has begun it before.

        Raises:
            ConfigError: the path cannot be written to, or another trace of this store is not over. Nothing has changed.
            StorageIOError: an earlier trace could not be written to its end, or the writing thread cannot be started.
            StoreClosedError: the store is closed.
            StoreBusyError: on a thread of a store.
        """
        self._observed.check_open()
        self._observed.refuse_to_wait()
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
        """Record a scope, or the store, from now on."""
        with self._observed.lock:
            recorder.num_inside += 1
            if not recorder.is_over():
                self._observed.observe(recorder)
        recorder.wake()

    def leave(self, recorder: Recorder) -> None:
        """Stop recording a scope, or the store. Its graphs are recorded until they are gone."""
        with self._observed.lock:
            recorder.num_inside -= 1

    @contextmanager
    def tracing(self, path: str | os.PathLike[str], deadline_seconds: float) -> Iterator[None]:
        if self.recorder is not None:
            raise ConfigError("trace", path, f"this store is being traced to {self.recorder.place} already")
        recorder = self.begin(path)
        self.enter(recorder)
        self.recorder = recorder
        try:
            yield
        finally:
            self.leave(recorder)
            self.end(deadline_seconds)

    def flush(self) -> None:
        """Block until everything recorded is written or writing has failed, at most for a minute."""
        recorder = self._current
        if recorder is not None:
            self._observed.refuse_to_wait()
            recorder.flush(_DEADLINE_SECONDS)

    def end(self, deadline_seconds: float, reason: str = "ended") -> None:
        """End the current trace, if there is one. Blocks, at most for the deadline.

        Raises:
            StorageIOError: see `Recorder.close`.
        """
        with self._lock:
            recorder, self._current, self.recorder = self._current, None, None
        if recorder is not None:
            with self._observed.lock:
                self._observed.observe(Observer())
            recorder.close(deadline_seconds, reason)

    def request_stop(self) -> None:
        """Have the current trace end, if there is one. Waits for nothing."""
        recorder = self._current
        if recorder is not None:
            recorder.request_stop()

    def abandon(self) -> None:
        """In a forked child: forget the trace; its file belongs to the parent. Takes no lock."""
        recorder, self._current, self.recorder = self._current, None, None
        if recorder is not None:
            recorder.abandon()

    def _open(self, place: str) -> Recorder:
        is_continued = place in self._begun
        file = TraceFile(place, is_continued=is_continued)
        try:
            header = None if is_continued else self._describe()
            recorder = Recorder(place, file, header, self._observed.levels, self._look_away_if_idle)
        except OSError as error:  # its thread cannot be started
            file.close()
            raise StorageIOError(
                "trace", place, words_of(error), "nothing is recorded, training is not affected"
            ) from error
        self._begun.add(place)
        return recorder

    def _end_idle(self, current: Recorder, place: str) -> None:
        with self._observed.lock:
            is_idle = current.is_idle()
            if is_idle:
                self._observed.observe(Observer())
        if not is_idle:
            raise ConfigError("trace", place, f"{current.place} is still being recorded: its graphs are alive")
        self._current = None
        current.close(_DEADLINE_SECONDS)

    def _look_away_if_idle(self) -> None:
        """Stop observing the store when nothing is traced."""
        recorder = self._current
        with self._observed.lock:
            if recorder is None or recorder.is_idle() or recorder.is_over():
                self._observed.observe(Observer())
