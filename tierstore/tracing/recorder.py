"""Records events and writes them to a trace. Recording costs one tuple; a thread of the recorder writes.

An event is a tuple: its class in `events.py`, and the values of its fields, none of which keeps a tensor alive. If the
file is slower than training, events wait up to a limit; further events are left out and counted."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from operator import attrgetter, call
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec

from ..base.json_text import in_unicode
from ..base.remains import Remains
from ..base.system_words import words_of
from ..base.threads import start_thread
from ..errors import ConfigError, StorageIOError
from ..ledger.observer import Observer
from . import events

if TYPE_CHECKING:
    from ..disk.tier import Loaded, Stored
    from ..residency.graph_times import GraphTimes

RecordedEvent = tuple[Any, ...]
MOST_WAITING_EVENTS = 200_000  # some 50 MB
_EVERY_SECONDS = 0.25  # in which the thread looks for events: waking it for each would cost more than the event
_LINES_AT_ONCE = 256  # few, since the interpreter's lock is held while they are made
_MODE = 0o666  # less the process's umask, as for any output file
_CUT_SHORT = "the trace is cut short there; training is not affected"
_now = time.perf_counter_ns


class TraceFile:
    """A file open for writing and locked (flock): two traces in one file could not be told apart. A device or a pipe is
    neither locked nor truncated. Raises ConfigError: it cannot be opened, or another trace is being written to it. Its
    content is unchanged."""

    def __init__(self, place: str, *, is_continued: bool = False) -> None:
        self._descriptor = -1
        try:
            self._descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _MODE)
            if stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not is_continued:
                    os.ftruncate(self._descriptor, 0)
        except OSError as error:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            reason = error.strerror
            if isinstance(error, BlockingIOError):
                reason = "another store writes a trace to it; give each process a file of its own"
            raise ConfigError("trace", place, f"cannot be written: {reason}") from error

    def write(self, lines: bytes) -> None:
        """Write all lines; blocks. On OSError, some of them may be in the file."""
        rest = memoryview(lines)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def close(self) -> None:
        os.close(self._descriptor)


class Recorder(Observer):
    """One trace while it is recorded.

    As an `Observer` it is called under the store's lock, and so it calls `levels`, for the fields of `Levels` after its
    time. Other calls are for any thread. Only `tell_times`, `flush` and `close` block. `on_idle` is called on the
    writing thread whenever it has written everything and `is_idle`. Without `header` it continues a trace.

    Attributes:
        num_inside: scopes that are being recorded now, and one for `TierStore.trace`; changed under the store's lock.
        num_graphs: graphs that have begun, as a lower bound.
        is_paced: a scope waits until accelerators have finished the graphs that are gone, and records how long those
            took: otherwise the host runs ahead, and its times do not show the step. For trials of `tierstore tune`.
    """

    def __init__(
        self,
        place: str,
        file: TraceFile,
        header: events.Header | None,
        levels: Callable[[], tuple[int, ...]],
        on_idle: Callable[[], None],
    ) -> None:
        self.place = place
        self.waiting: deque[RecordedEvent] = deque()
        self.num_inside = 0
        self.num_graphs = 0
        self.is_paced = False
        self._file = file
        self._header = header
        self._levels = levels
        self._on_idle = on_idle
        self._graphs: dict[int, _GraphRemains] = {}
        self._timed: deque[tuple[int, weakref.ref[object], GraphTimes]] = deque()
        self._spills, self._restores = _OpenJobs(), _OpenJobs()
        self._encoder = msgspec.json.Encoder(enc_hook=_name_of)
        self._lost = count()  # a lock would not do: a finalizer may lose an event where another is being lost
        self._next_lost = 0  # its next number, unless an event is lost meanwhile
        self._is_over = False
        self._reason = "nobody refers to the store any more"
        self._error: BaseException | None = None
        self._orders: SimpleQueue[threading.Event | None] = SimpleQueue()  # None: end
        self._thread = start_thread(self._run, "tierstore-trace")

    # --- any thread ------------------------------------------------------------------------------------------------

    def pace(self) -> None:
        self.is_paced = True

    def append(self, event: RecordedEvent) -> None:
        if len(self.waiting) < MOST_WAITING_EVENTS and not self._is_over:
            self.waiting.append(event)
        elif not self._is_over:
            next(self._lost)

    def begin_graph(self, number: int, graph: object) -> None:
        """Keep the trace going at least until this graph is gone. Does nothing if the trace is over."""
        self.num_graphs += 1
        if not self._is_over:
            self._graphs[number] = _GraphRemains(graph, self.waiting.extend, number)

    def time_graph(self, number: int, graph: object, times: GraphTimes) -> None:
        self._timed.append((number, weakref.ref(graph), times))

    def tell_times(self) -> None:
        """Record how long graphs that are gone took on their accelerators. Blocks until these have finished, unless the
        calling thread captures a CUDA graph; then a later call records the times."""
        timed, self._timed = self._timed, deque()
        for number, graph, times in timed:
            if graph() is not None:
                self._timed.append((number, graph, times))
                continue
            times.end()
            if not times.wait():
                self._timed.append((number, graph, times))
            elif (measured := times.measured()) is not None:
                self.append((events.Computed, _now(), number, *measured))

    def booked(self, graph: int, index: int, record: int) -> None:
        self.append((events.Booked, _now(), graph, index, record))

    def is_idle(self) -> bool:
        """Whether no scope and no graph is being recorded. The caller holds the store's lock, so none can begin."""
        return not self.num_inside and all(graph() is None for graph in list(self._graphs.values()))

    def is_over(self) -> bool:
        return self._is_over

    def flush(self, deadline_seconds: float) -> None:
        """Block until all events so far are written or writing has failed, at most for the deadline."""
        if self._is_over:
            return
        written = threading.Event()
        self._orders.put(written)
        ends_at = time.monotonic() + deadline_seconds
        while not written.wait(_EVERY_SECONDS) and self._thread.is_alive() and time.monotonic() < ends_at:
            pass  # the thread may end, by an error, after the order was put

    def wake(self) -> None:
        if not self._is_over:
            self._orders.put(threading.Event())

    def request_stop(self) -> None:
        """Have the thread write what waits, then end. Does not wait for that."""
        self._orders.put(None)

    def close(self, deadline_seconds: float, reason: str = "ended") -> None:
        """End the trace: write what waits, close the file. Idempotent, but an error is raised only once. Raises
        StorageIOError: a write failed, or was not done in time; the file ends there, and training is not affected."""
        self._reason = reason
        self._orders.put(None)
        self._thread.join(deadline_seconds)
        if self._thread.is_alive():
            raise StorageIOError("write", self.place, f"not done within {deadline_seconds:g} s", _CUT_SHORT)
        error, self._error = self._error, None
        if error is not None:
            reason = words_of(error, self.place) if isinstance(error, OSError) else repr(error)
            raise StorageIOError("write", self.place, reason, _CUT_SHORT) from error

    def abandon(self) -> None:
        self._is_over = True
        self._file.close()

    # --- under the store's lock: `Observer` --------------------------------------------------------------------------

    def spill_queued(self, record: int, nbytes: int) -> None:
        self._spills.queue(record, nbytes)
        self.changed()

    def spill_began(self, record: int, nbytes: int) -> None:
        self._spills.begin(record, nbytes)

    def spill_ended(self, record: int, outcome: Stored | Exception) -> None:
        job = self._spills.end(record)
        if job is not None:
            stored: tuple[int, str, str] = (0, "", "")
            if not isinstance(outcome, Exception):
                stored = outcome.stored_bytes, outcome.codec, outcome.kind
            times = job.lane, job.queued_ns, job.began_ns, _now()
            self.append((events.Spill, record, job.nbytes, *stored, *times, *_ending(outcome)))
        self.changed()

    def spill_cancelled(self, record: int, nbytes: int) -> None:
        self._cancelled("spill", record, nbytes)
        self._spills.end(record)

    def freed(self, record: int, nbytes: int) -> None:
        self.append((events.Freed, _now(), record, nbytes))
        self.changed()

    def restore_queued(self, record: int, nbytes: int, *, demanded: bool) -> None:
        self._restores.queue(record, nbytes, demanded=demanded)
        self.changed()

    def restore_began(self, record: int) -> None:
        self._restores.begin(record)

    def restore_ended(self, record: int, outcome: Loaded | Exception, *, is_wanted: bool) -> None:
        job = self._restores.end(record)
        if job is not None:
            read_bytes = 0 if isinstance(outcome, Exception) else outcome.read_bytes
            times = job.lane, job.demanded, is_wanted, job.queued_ns, job.began_ns, _now()
            self.append((events.Restore, record, job.nbytes, read_bytes, *times, *_ending(outcome)))
        self.changed()

    def restore_cancelled(self, record: int, nbytes: int) -> None:
        self._cancelled("restore", record, nbytes)
        self._restores.end(record)

    def offloaded(self, record: int, nbytes: int) -> None:
        self.append((events.Offload, _now(), record, nbytes))
        self.changed()

    def reloaded(self, record: int, nbytes: int) -> None:
        self.append((events.Reload, _now(), record, nbytes))

    def stalled(self, seconds: float, cause: str, record: int | None) -> None:
        ended = _now()
        self.append((events.Stall, ended - round(seconds * 1e9), ended, threading.get_ident(), cause, record))
        self.changed()

    def changed(self) -> None:
        """Record what the tiers hold. Without the lock, the figures may be from different moments."""
        self.append((events.Levels, _now(), *self._levels()))

    def _cancelled(self, what: str, record: int, nbytes: int) -> None:
        self.append((events.Cancelled, _now(), record, what, nbytes))
        self.changed()

    # --- the writing thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        is_last = False
        is_idle = False
        try:
            if self._header is not None:
                self._write([self._header])
            while not is_last:
                try:
                    written = self._orders.get(timeout=None if is_idle else _EVERY_SECONDS)
                    is_last = written is None
                except Empty:
                    written = None
                self._write_waiting()
                is_idle = self._drop_dead_graphs()
                if is_idle:
                    self._on_idle()
                if written is not None:
                    written.set()
            self._write([events.End(_now(), self._reason)])
        except BaseException as error:  # noqa: BLE001 - delivered: `close` raises it
            self._error = error
        finally:
            self._is_over = True
            self.waiting.clear()
            self._on_idle()
            self._file.close()

    def _write_waiting(self) -> None:
        while self.waiting:
            some = [self.waiting.popleft() for _ in range(min(len(self.waiting), _LINES_AT_ONCE))]
            self._write([kind(*fields) for kind, *fields in some])
        number = next(self._lost)
        num_lost, self._next_lost = number - self._next_lost, number + 1
        if num_lost:
            self._write([events.Lost(_now(), num_lost)])

    def _write(self, some: list[Any]) -> None:
        try:
            lines = self._encoder.encode_lines(some)
        except UnicodeEncodeError:  # a path or a thread's name that is no UTF-8
            lines = self._encoder.encode_lines([in_unicode(msgspec.to_builtins(e, enc_hook=_name_of)) for e in some])
        self._file.write(lines)

    def _drop_dead_graphs(self) -> bool:
        for number, graph in list(self._graphs.items()):
            if graph() is None:
                del self._graphs[number]
        return not (self.num_inside or self._graphs or self.waiting)


@dataclass(slots=True)
class _Job:
    nbytes: int
    demanded: bool
    queued_ns: int
    began_ns: int | None = None
    lane: int | None = None


class _OpenJobs:
    """Records on their way in one direction; not those that were queued before the trace began. Under the store's
    lock."""

    def __init__(self) -> None:
        self._jobs: dict[int, _Job] = {}
        self._lanes: set[int | None] = set()  # those that are taken

    def queue(self, record: int, nbytes: int, *, demanded: bool = False) -> None:
        self._jobs[record] = _Job(nbytes, demanded, _now())

    def begin(self, record: int, nbytes: int | None = None) -> None:
        """`nbytes`: bytes to move, if that is known only now."""
        job = self._jobs.get(record)
        if job is not None and job.began_ns is None:
            job.lane = next(lane for lane in count() if lane not in self._lanes)
            self._lanes.add(job.lane)
            job.began_ns = _now()
            job.nbytes = job.nbytes if nbytes is None else nbytes

    def end(self, record: int) -> _Job | None:
        """The job is over; None: the trace did not see it begin."""
        job = self._jobs.pop(record, None)
        if job is None or job.began_ns is None:
            return None
        self._lanes.discard(job.lane)
        return job


class _GraphRemains(Remains[Any]):
    """Appends a `Gone` event when the graph dies; see NOTE [No finalizers] in `remains.py`."""

    __slots__ = ("event",)

    __iter__ = property(attrgetter("event"))  # what `deque.extend` asks for, in calls of C alone

    def __init__(self, graph: object, extend: Callable[[Any], None], number: int) -> None:
        # The time is taken when it is.
        self.event = zip((events.Gone,), map(call, (_now,)), (number,), strict=True).__iter__


def _name_of(value: object) -> str:
    return str(value).removeprefix("torch.")


def _ending(outcome: Stored | Loaded | Exception) -> tuple[float | None, float | None, str | None]:
    if isinstance(outcome, Exception):
        return None, None, str(outcome)
    return outcome.drive_seconds, outcome.cpu_seconds, None
