"""The traces of one store, and the first line of each."""

from __future__ import annotations

import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.config import allowed_cores, version_of
from ..base.system_words import words_of
from ..errors import ConfigError, ConfigTypeError, StorageIOError
from .events import FORMAT, VERSION, Header, Machine, StoreSettings
from .recorder import Recorder, TraceFile

if TYPE_CHECKING:
    from ..residency.residency import Residency

_DEADLINE_SECONDS = 60.0


class Recordings:
    """Begins, continues and ends traces: at most one is recorded at a time. `describe` makes the first line of a trace.

    `recorder` records the trace of the whole store (`TierStore.trace`); None: only scopes that ask are traced."""

    def __init__(self, residency: Residency, describe: Callable[[], Header]) -> None:
        self.recorder: Recorder | None = None
        self._residency = residency
        self._describe = describe
        self._current: Recorder | None = None
        self._begun: set[str] = set()
        self._lock = threading.RLock()  # a finalizer may close the store in the middle of `begin`

    def begin(self, path: object) -> Recorder:
        """Return the recorder of the trace at `path`. It begins now, or goes on if this store has begun it before.

        ConfigError: the path cannot be written to, or another trace of this store is not over; nothing has changed.
        StorageIOError: an earlier trace could not be written to its end, or the writing thread cannot be started.
        StoreClosedError, StoreBusyError: the store is closed, or this is a thread of a store."""
        self._residency.guard.check_open()
        self._residency.guard.refuse_to_wait()
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
        with self._residency.lock:
            recorder.num_inside += 1
            if not recorder.is_over():
                self._residency.observe(recorder)
        recorder.wake()

    def leave(self, recorder: Recorder) -> None:
        with self._residency.lock:
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
        """Blocks, at most for a minute."""
        if (recorder := self._current) is not None:
            self._residency.guard.refuse_to_wait()
            recorder.flush(_DEADLINE_SECONDS)

    def end(self, deadline_seconds: float, reason: str = "ended") -> None:
        """End the current trace, if there is one. Blocks, at most for the deadline; raises as `Recorder.close`."""
        with self._lock:
            recorder, self._current, self.recorder = self._current, None, None
        if recorder is not None:
            with self._residency.lock:
                self._residency.observe(None)
            recorder.close(deadline_seconds, reason)

    def request_stop(self) -> None:
        if (recorder := self._current) is not None:
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
            recorder = Recorder(place, file, header, self._residency.levels, self._look_away_if_idle)
        except OSError as error:  # its thread cannot be started
            file.close()
            where = "nothing is recorded, training is not affected"
            raise StorageIOError("trace", place, words_of(error, place), where) from error
        self._begun.add(place)
        return recorder

    def _end_idle(self, current: Recorder, place: str) -> None:
        with self._residency.lock:
            if not current.is_idle():
                raise ConfigError("trace", place, f"{current.place} is still being recorded: its graphs are alive")
            self._residency.observe(None)
        self._current = None
        current.close(_DEADLINE_SECONDS)

    def _look_away_if_idle(self) -> None:
        recorder = self._current
        with self._residency.lock:
            if recorder is None or recorder.is_idle() or recorder.is_over():
                self._residency.observe(None)


def header_of(store: StoreSettings) -> Header:
    """A header whose trace begins now."""
    return Header(FORMAT, VERSION, time.perf_counter_ns(), time.time(), os.getpid(), store, this_machine())


def this_machine() -> Machine:
    """The one that this process runs on."""
    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    versions = {"linux": platform.release(), "python": platform.python_version()}
    return Machine(
        cpu=model[1] if model else platform.machine(),
        num_cores=len(allowed_cores()),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        versions=versions | {name: version_of(name) or "not installed" for name in ("torch", "tierstore")},
        launches_block=os.environ.get("CUDA_LAUNCH_BLOCKING") == "1",
    )
