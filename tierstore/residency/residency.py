"""The books behind one lock: who may call, who waits, and for what.

Training threads call `note`, `track`, `settle`, `fetch` and `flush`, among others. The engine's loop calls the methods
of `Transfers`. All of them hold the lock for a short time; the rules (`rules/`) make the changes under it. Only
training threads may wait, and only for progress that the engine makes without them. A waiting thread holds no slot and
no staging that this progress could need. So every wait ends: with progress, with an error, or with the end of the
engine.

NOTE [Stolen gradients]
A function may return its saved tensor as a gradient. If nobody else refers to that tensor, autograd takes it as it is
("steals" it), and later adds to it in place; otherwise autograd copies it into `.grad`. Without hooks, it copies while
the graph or the user refers to the saved tensor. With hooks, a tensor that is handed out must not look unreferenced
either: it shares the record's version counter, so an addition to a stolen gradient would be a change of what was saved.
Hence the same tensor is handed out each time while the bytes stay in memory: the saved one, if it is still alive (NOTE
[The same object] in `hooks/saved.py`), or one that the record keeps. When the bytes leave memory, because of the next
tensor of the same node or of another thread, `lent.py` keeps the tensor for as long as anybody uses it. A gradient may
wait while further nodes run, so the node that asks does not tell how long that is.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, Never, ParamSpec, TypeVar

import torch

from ..base.interrupts import is_half_changed, is_interrupt
from ..disk.tier import Loaded, Stored
from ..errors import ModifiedInPlaceError, StoreBusyError, StoreClosedError, TierStoreError
from ..rules.counters import STALL_CAUSES, Counters
from ..rules.ledger import Ledger
from ..rules.observer import Observer
from ..rules.pending import NUM_EXAMINED_PER_PACK
from ..rules.rules import Rules
from ..rules.state import IN_MEMORY, State
from ..rules.windows import HostBooks
from .booking import Booking
from .copies import AcceleratorCopies
from .device import DeviceTier
from .handle import Record
from .layout import (
    Layout,
    describe,
    is_inside_modes,
    memory_at,
    outside_of_modes,
    rebuild,
    unseen_by_modes,
)
from .lent import LentViews
from .memory import StoreMemory
from .noted import NotedTensors
from .ownership import claims_of, is_sole_owner
from .slots import Slots
from .transfers import DiskSubmissions, Spill

if TYPE_CHECKING:
    from ..rules.lookahead import Lookahead
    from .copies import Copies
    from .graph_times import GraphTimes
    from .noted import LogRemains, NotedLog, NotedTensor

__all__ = ["Residency"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

_PACK_WAITS, _UNPACK_WAITS = STALL_CAUSES


def _whole(
    method: Callable[Concatenate[Residency, _P], _T],
) -> Callable[Concatenate[Residency, _P], _T]:
    """Decorator: if an interrupt (`interrupts.py`) ends the call in the middle of a change, the store is closed.

    The call runs outside of the caller's modes (`unseen_by_modes`).

    An interrupt may come between any two steps of a change. Half changed books could lose a wake-up, or give one slot
    to two records: the result would be a hang, or wrong values. The books are whole during a wait, and where no method
    in the traceback says otherwise. A method says so with its local variable `is_changing`; if the outermost method has
    no such variable, it counts as changing all the time (`is_half_changed`).
    """

    @wraps(method)
    def call(self: Residency, /, *arguments: _P.args, **keywords: _P.kwargs) -> _T:
        try:
            if is_inside_modes():  # inlined `unseen_by_modes`, to save a call
                with outside_of_modes():
                    return method(self, *arguments, **keywords)
            return method(self, *arguments, **keywords)
        except BaseException as error:
            self.end_interrupted(error)
            raise

    return call


class Residency:
    """See the module's docstring.

    Args:
        name: the store's name, for messages.
        host_bytes, staging_bytes: the limits of the two windows of host memory.
        staging_grows: see NOTE [Large tensors] in `host.py`.
        copies: the copy engine for accelerators; None: whatever `torch.accelerator` drives.
        engine: moves bytes between host memory and disk.

    Attributes:
        rules: what is decided, and the state of it. Only under the lock.
        slab: host memory for restored bytes, and for copies from accelerators.
        note_release: takes a record whose handle has died. Any thread, without the lock.
        closed: the error that says why the store cannot be used any more; None: it can.
        device_of: the accelerator that a tensor lives on; None: it is in host memory. Any thread, without the lock.
    """

    def __init__(
        self,
        name: str,
        *,
        host_bytes: int,
        staging_bytes: int,
        staging_grows: bool = False,
        copies: Copies | None = None,
        engine: DiskSubmissions,
    ) -> None:
        self._name = name
        self._engine = engine
        windows = HostBooks(host_bytes, staging_bytes, grows=staging_grows)
        self._noted = NotedTensors(windows)
        ledger = Ledger[Record](windows, self._noted, is_sole_owner)
        self._counters, self._lent_views = ledger.counters, LentViews()
        slots = Slots(windows, host_bytes + staging_bytes, ledger.uncharged_bytes, counters=ledger.counters)
        self._booking = Booking(ledger, self._noted, self._lent_views)
        devices = DeviceTier(copies or AcceleratorCopies(), lent_views=self._lent_views, note_copy=slots.note_copy)
        self._memory = StoreMemory(self._booking, slots, devices, self._lent_views)
        self._ledger, self._slots, self._devices = ledger, slots, devices
        self.rules = Rules[Record](ledger, self._memory, devices, engine, engine.disk_budget_bytes)
        self.slab = slots.slab
        self.note_release = self.rules.released.append
        self.device_of = devices.streams.device_of
        self._begin_lock()
        self._num_getting = 0  # threads that wait for bytes, or whose bytes are there but which have not woken yet
        self.closed: StoreClosedError | None = None
        self._interrupted_wait: BaseException | None = None

    # --- training threads: may wait -----------------------------------------------------------------------------

    def note(self, noted: NotedTensor, node: int, nbytes: int) -> None:
        """Note a tensor in host memory that autograd node `node` saved; its storage has `nbytes` bytes.

        Its bytes are not read before a later node saves something, or its log is settled. Waits while the budget is
        full.

        Raises:
            StoreFullError, StorageIOError, StoreClosedError: as `track`.
        """
        try:
            if self._lock_is_mine():
                self._refuse_handler()
            with self._lock:
                if self.closed is not None:
                    self._check_open()
                rules = self.rules
                noted.log.newest_node = node
                is_short = rules.is_short_of(nbytes)
                is_planned = noted.log.plan is not None and not rules.uses_staging
                is_short |= is_planned
                if is_short:
                    self._relieve(is_planned=is_planned)
                is_changing = True
                counters = self._counters
                counters.packed_tensors += 1
                counters.packed_bytes += nbytes
                self._noted.add(noted, node, nbytes)
                if is_short:
                    self._join_if_booked(noted)
                    self._slots.trim()
                elif rules.uses_staging:
                    rules.charge_noted(nbytes)
                is_changing = False  # noqa: F841 - `is_half_changed` reads it
        except BaseException as error:  # as `_whole` does, but without its extra call: every saved tensor passes here
            self.end_interrupted(error)
            raise

    @_whole
    def track(self, record: Record, settled: Iterable[Record] = ()) -> None:
        """Take a record into the books. Its bytes are not read before it is settled.

        `settled`: earlier records whose bytes may be read from now on. Waits while the budget is full.

        Raises:
            StoreFullError: host budget and disk are full; everything is where it was.
            StorageIOError: an earlier write failed; its bytes, and all others, are in memory.
            StoreClosedError: the store is closed.
        """
        with self.lock:
            self._check_open()
            self._drain()
            is_changing = True
            self._register(record)
            self.rules.pending.settle(settled)
            try:
                self._relieve()
            except BaseException:
                self._withdraw(record)
                raise
            is_changing = False  # noqa: F841

    def begin_log(self, log: NotedLog) -> LogRemains:
        """Register a new log. Any thread, without the lock."""
        return self._noted.begin(log)

    @_whole
    def enter(self, log: NotedLog, record: Record, node: int) -> int:
        """Append to the log a record that autograd node `node` saved; returns its index in the log."""
        with self.lock:
            is_changing = True
            if not log.nodes:
                self._noted.drop_ended()  # orders learned from earlier logs are needed for this one
            index = log.append_booked(record, node)
            is_changing = False  # noqa: F841
            return index

    @_whole
    def store(self, record: Record) -> None:
        """Like `track`, but the record is stored even if others hold its storage, and from now on."""
        with self.lock:
            self._check_open()
            self._drain()
            is_changing = True
            if self.rules.windows.noted_bytes:
                self.rules.examine(0)
            self._register(record)
            record.forced = True
            if record.nbytes:
                self.rules.admit(record)
                try:
                    self._make_room()
                except BaseException:
                    self._withdraw(record)
                    raise
            is_changing = False  # noqa: F841

    def _register(self, record: Record) -> None:
        self._ledger.register(record)
        if record.device is not None:
            self.slab.begin_to_pin(record.device)
            self._devices.streams.note_stream(record)

    @_whole
    def settle(self, records: Iterable[Record] = ()) -> None:
        """Allow the records' bytes to be read from now on. Does not wait."""
        with self.lock:
            if self.closed is None:
                self._drain()
                is_changing = True
                self.rules.pending.settle(records)
                self._slots.trim()
                is_changing = False  # noqa: F841

    @_whole
    def survey(self, log: NotedLog) -> None:
        """At the end of a scope or a forward, find out which storages others also hold. Does not wait.

        Noted tensors whose storage others also hold are booked. Pending records are examined again if room is short.
        """
        with self.lock:
            if self.closed is None:
                self._drain()
                is_changing = True
                self.rules.relieve(None)
                self._booking.survey(log)
                self.rules.pending.survey()
                is_changing = False  # noqa: F841

    @_whole
    def book(self, noted: NotedTensor) -> None:
        """Book a tensor whose handle is needed; its bytes may be read from now on. Does not wait.

        Raises:
            StoreClosedError: the store is closed.
        """
        with self.lock:
            if noted.handle is None:
                self._check_open()
                self._drain()
                is_changing = True
                self._booking.book_one(noted)
                is_changing = False  # noqa: F841

    @_whole
    def join(self, record: Record, layout: Layout, nbytes: int) -> bool:
        """Let one more view share the record. Does not wait.

        False: it may not, because the bytes were read already, the handle is gone, or the store is closed.
        """
        with self.lock:
            if record.span is not None or record.source is None or self.closed is not None:
                return False
            is_changing = True
            record.joined += (layout,)
            self._count_join(nbytes)
            is_changing = False  # noqa: F841
            return True

    @_whole
    def rejoin(self, record: Record, tensor: torch.Tensor, layout: Layout) -> Layout | None:
        """Let a tensor over restored bytes, which is saved again, share the record that they were restored from.

        Returns the tensor's layout over the storage of that record. None: the bytes may not be the record's any more
        (they could have been changed through another version counter). Computes a checksum, but does not wait.
        """
        is_changing = False
        storage = tensor.untyped_storage()
        with self.lock:
            if record.state is not State.CLEAN or record.device is not None or record.claims is not claims_of(storage):
                return None
            memory = memory_at(record.address, record.nbytes)  # the caller's tensor keeps it alive
        if not self._engine.confirms(record.key, memory):
            return None
        with self.lock:
            is_changing = True
            self._count_join(tensor.numel() * layout.dtype.itemsize)
            is_changing = False  # noqa: F841
        return layout._replace(offset=layout.offset + record.first_byte // layout.dtype.itemsize)

    def _count_join(self, nbytes: int) -> None:
        self._counters.packed_tensors += 1
        self._counters.deduplicated_bytes += nbytes

    @_whole
    def fetch(
        self,
        record: Record,
        layout: Layout,
        ahead: Lookahead[Record] | None = None,
        reload_ahead: Lookahead[Record] | None = None,
        index: int = 0,
    ) -> torch.Tensor:
        """Return a tensor of the given layout over the record's bytes. Waits if they are not in memory.

        What lies ahead of pack `index` is restored (`ahead`), and copied to its device (`reload_ahead`), as far as
        there is room.

        Raises:
            ModifiedInPlaceError: the saved tensor, or one that was handed out, was changed in place.
            CorruptDataError: the bytes on disk are damaged; they are lost.
            StorageIOError: they could not be read; they are still on disk.
            StoreClosedError: the store is closed; they are gone.
        """
        with self.lock:
            rules = self.rules
            if record.state is not State.CLOSED:
                self._check_open()
            self._drain()
            self._check_unchanged(record, layout)
            is_changing = True
            if rules.ask_for(record, ahead, index):
                self._progress.notify_all()  # `flush` waits for the write that was cancelled, and nobody else tells it
            if record.state in IN_MEMORY:
                is_changing = False
                return self._hand_over(record, layout, reload_ahead, index)
            record.demanded += 1  # it may not leave memory again before it is handed over
            self._num_getting += 1
            try:
                self._await_bytes(record)
                return self._hand_over(record, layout, reload_ahead, index)
            finally:
                record.demanded -= 1
                self._num_getting -= 1
                rules.used(record)
                self._advance()
                is_changing = False  # noqa: F841

    @_whole
    def look_ahead(self, ahead: Lookahead[Record]) -> None:
        """Restore what lies ahead, as far as there is room, because backward begins. Does not wait."""
        with self.lock:
            if self.closed is None:
                self._drain()
                is_changing = True
                self.rules.ahead = ahead
                self._go_ahead()
                is_changing = False  # noqa: F841

    @_whole
    def prefetch(self, records: Iterable[Record]) -> None:
        """Fetch the records, in this order, as far as there is room, and go on as room is freed. Does not wait."""
        with self.lock:
            if self.closed is None:
                self._drain()
                self.rules.name(records)
                self._go_ahead()

    @_whole
    def flush(self) -> None:
        """Wait until all writes that were decided on are done.

        Raises:
            StoreFullError, StorageIOError: a write failed; the bytes are in memory.
            StoreClosedError: the store is closed.
        """
        with self.lock:
            self._check_open()
            self._drain()
            is_changing = True
            self.rules.disk_is_full = False  # others may have freed something
            self.rules.examine()
            self._make_room()
            while True:
                is_changing = False
                while self.rules.num_spills or self.rules.num_discards or self.rules.has_doomed:
                    self._wait(_PACK_WAITS)
                self._raise_spill_error()
                if not self.rules.unwritten_bytes:
                    return
                if self.rules.disk_is_full:
                    raise self.rules.full_error(self.rules.unwritten_bytes) from self.rules.disk_error
                is_changing = True  # noqa: F841
                self.rules.retry_unwritten()

    @property
    def records(self) -> list[Record]:
        """The records of all living handles, oldest first."""
        return list(self._ledger.records.values())

    def has_any(self) -> bool:
        """Whether anything is kept here. Any thread, without the lock: it may be out of date."""
        return bool(self._ledger.records or self._noted.num_bytes)

    def check_open(self) -> None:
        """Raise StoreClosedError if the store is closed."""
        with self.lock:
            self._check_open()

    def count_kept(self, reason: str, nbytes: int) -> None:
        """Count `nbytes` of a saved tensor that stays where it is."""
        with self.lock:
            self._counters.kept_bytes[reason] += nbytes

    def close(self, reason: str = "it was closed") -> None:
        """Give up every record and wake all waiting threads. Idempotent."""
        with outside_of_modes(), self.lock:
            self._end(StoreClosedError(self._name, reason))

    def end_interrupted(self, interrupt: BaseException) -> None:
        """Close the store if an interrupt has ended a call while the books were half changed. See `_whole`.

        Adds a note to the interrupt, so that its traceback says that the store is closed.
        """
        if interrupt is self._interrupted_wait:
            self._interrupted_wait = None
            return
        if not is_interrupt(interrupt) or self._lock_is_mine():  # the latter: a signal handler's call was refused
            return
        if not is_half_changed(interrupt.__traceback__, __name__):
            return
        name = type(interrupt).__name__
        reason = f"a {name} came in the midst of a change of its books, which closed it; open another"
        with outside_of_modes(), self.lock:
            try:
                self._end(StoreClosedError(self._name, reason))
            except Exception:  # noqa: BLE001 - half changed books cannot always be taken apart; the store is closed
                pass
        if self.closed is not None and self.closed.reason == reason:
            interrupt.add_note(f"tierstore: {self.closed}")

    def abandon(self, reason: str) -> None:
        """In a forked child: give up every record, free nothing.

        The thread that holds the lock may not exist here, and its change stays half done.
        """
        self._begin_lock()
        self.closed = StoreClosedError(self._name, reason)
        self.rules.abandon()

    @_whole
    def tidy(self) -> None:
        """Account for everything that has died, and for everything that is ours by now. Does not wait."""
        with self.lock:
            is_changing = True
            self._lent_views.take_back(None)
            self._drain()
            if self.closed is None:
                self.rules.examine()
                self._engine.hurry()
            is_changing = False  # noqa: F841

    @contextmanager
    def counted(self) -> Iterator[tuple[Counters, Mapping[str, int]]]:
        """Hold the lock while the caller reads: all counters, and the levels of now. See `StoreStats`."""
        with self.lock:
            rules, windows = self.rules, self.rules.windows
            host_bytes, staging_bytes = windows.used_bytes
            yield (
                self._counters,
                {
                    "live_handles": self._booking.num_live(),
                    "device_bytes": self._devices.held_bytes,
                    "device_limit_bytes": self.device_limit_bytes,
                    "host_bytes": host_bytes,
                    "host_bytes_peak": windows.host_bytes_peak,
                    "staging_used_bytes": staging_bytes,
                    "lent_bytes": windows.lent.used_bytes,
                    "disk_bytes": rules.disk_bytes,
                    "disk_bytes_peak": rules.disk_bytes_peak,
                },
            )

    @property
    def device_limit_bytes(self) -> int:
        """Bytes of saved tensors that may stay on accelerators now. Any thread, without the lock."""
        return self._devices.window.resident.limit_bytes or 0

    @property
    def window_limits(self) -> tuple[int, int]:
        """The limits of the host window and of the staging window, as they are now. Any thread, without the lock."""
        return self.rules.windows.limits

    @_whole
    def keep_on_device(self, device_bytes: int) -> None:
        """Let the last `device_bytes` that are saved stay on the accelerator from now on. Spoils times being taken."""
        with self.lock:
            self._devices.keep(device_bytes)

    @_whole
    def time_graph(self, record: Record) -> GraphTimes:
        """Begin to take the times of the graph whose first pack the record is; they tell what stays on its device."""
        with self.lock:
            return self._devices.time_graph(record)

    # --- traces: the caller holds the lock ------------------------------------------------------------------------

    def observe(self, observer: Observer) -> None:
        """See `Observed`."""
        self.rules.observer = observer

    def levels(self) -> tuple[int, ...]:
        """See `Observed`."""
        host_bytes, staging_bytes = self.rules.windows.used_bytes
        uncharged_bytes, lent_bytes = self._ledger.uncharged_bytes(), self.rules.windows.lent.used_bytes
        disk_bytes = self.rules.disk_bytes
        return self._devices.held_bytes, uncharged_bytes, host_bytes, staging_bytes, lent_bytes, disk_bytes

    # --- the engine's loop: `Transfers` -------------------------------------------------------------------------

    def begin_spill(self, record: Record) -> Spill | None:
        """See `Transfers`."""
        with self.lock:
            self._drain()
            if not self.rules.begin_write(record):
                self._progress.notify_all()  # the record may have been withdrawn
                return None
            return Spill(self._memory.bytes_held(record), record.kind, record.ready)

    def end_spill(self, record: Record, outcome: Stored | Exception) -> None:
        """See `Transfers`."""
        with self.lock:
            self.rules.end_write(record, outcome)
            self._advance()

    def begin_restore(self, record: Record) -> memoryview | None:
        """See `Transfers`."""
        with self.lock:
            self._drain()
            return self._memory.bytes_held(record) if self.rules.begin_read(record) else None

    def end_restore(self, record: Record, outcome: Loaded | Exception) -> None:
        """See `Transfers`."""
        with self.lock:
            self.rules.end_read(record, outcome)
            self._advance()

    def end_discard(self, num_records: int) -> None:
        """See `Transfers`."""
        with self.lock:
            self.rules.end_discards(num_records)
            self._advance()

    def engine_ended(self, error: BaseException | None) -> None:
        """See `Transfers`."""
        closed = StoreClosedError(self._name)
        if error is not None:
            closed = StoreClosedError(self._name, f"its engine failed ({error!r})")
            closed.__cause__ = error
        with self.lock:
            self._end(closed)
            self.rules.end_jobs()
            under_way = self._devices.under_way()
        for marker in under_way:
            try:
                marker.synchronize()
            except Exception:  # noqa: BLE001 - the device has failed, or its copies were given up
                pass
        with self.lock:
            self._devices.finish()
            self.slab.unpin()

    # --- the lock -----------------------------------------------------------------------------------------------

    def _begin_lock(self) -> None:
        # An RLock because it knows its owner; it is never taken twice: see `lock`.
        self._lock = threading.RLock()
        self._lock_is_mine: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]  # for Condition
        self._progress = threading.Condition(self._lock)

    @property
    def lock(self) -> AbstractContextManager[object]:
        """The store's lock, as a context manager.

        Raises:
            StoreBusyError: this thread holds it already.
        """
        if self._lock_is_mine():
            self._refuse_handler()
        return self._lock

    def _refuse_handler(self) -> Never:
        raise StoreBusyError(self._name)

    # --- under the lock -----------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.closed is not None:
            raise StoreClosedError(self.closed.store, self.closed.reason) from self.closed.__cause__

    def _end(self, closed: StoreClosedError) -> None:
        try:
            if self.closed is None:
                self.closed = closed
                self.rules.end_all()
        finally:
            self._progress.notify_all()

    def _drain(self) -> None:
        """Account for everything that has died; if there was anything, let others go on."""
        if self.rules.drain():
            is_changing = True
            self._advance()
            is_changing = False  # noqa: F841

    def _advance(self) -> None:
        """Use the room of what was freed: for blocked records, writes, prefetches and waiting threads."""
        self.rules.advance()
        self._progress.notify_all()

    def _go_ahead(self) -> None:
        if self.rules.go_ahead():
            self._progress.notify_all()  # a write that `flush` waits for was cancelled, and nobody else tells it

    def _check_unchanged(self, record: Record, layout: Layout) -> torch.Tensor:
        source = record.source
        if source is None:
            raise StoreClosedError(self._name, "the handle was released")
        if source._version != record.version:
            raise ModifiedInPlaceError(describe(layout), record.version, source._version)
        return source

    def _wait(self, cause: str, record: Record | None = None) -> None:
        """Wait for progress. Call it only while the engine has a job, or another thread is about to release its bytes.

        `record`: the record whose bytes are waited for; None: the wait is for room.
        """
        self._engine.hurry()
        began = time.perf_counter()
        try:
            self._progress.wait()
        except BaseException as interrupt:
            if not self._lock_is_mine():  # the interrupt came as the condition began to wait
                self._lock.acquire()
            self._interrupted_wait = interrupt
            raise
        seconds = time.perf_counter() - began
        self.rules.counters.stall_seconds[cause] += seconds
        self.rules.observer.stalled(seconds, cause, None if record is None else record.key)
        self._check_open()
        self._drain()

    @unseen_by_modes
    def _relieve(self, *, is_planned: bool = False) -> None:
        """Book what may have to leave, and make room; may wait."""
        self._drain()
        is_changing = True
        self.rules.relieve(NUM_EXAMINED_PER_PACK, is_planned=is_planned)
        if self.rules.blocked or self.rules.spill_error is not None:
            self._make_room()
        is_changing = False  # noqa: F841

    @unseen_by_modes
    def _join_if_booked(self, noted: NotedTensor) -> None:
        self._booking.join_if_booked(noted)

    def _withdraw(self, record: Record) -> None:
        """Remove a record that is refused; the caller still has the tensor."""
        self.rules.withdraw(record)
        self._advance()

    def _make_room(self) -> None:
        """Wait until no record is blocked, or raise the reason why that cannot be."""
        rules = self.rules
        collected = False
        while rules.blocked:
            self._raise_spill_error()
            if rules.num_jobs or self._num_getting:
                self._wait_for_room()
            elif not collected:
                collected = True
                self._collect_garbage()
            else:
                raise rules.full_error(rules.blocked[0].nbytes) from rules.disk_error
            rules.admit_blocked(is_awaited=True)
        self._raise_spill_error()

    def _wait_for_room(self) -> None:
        self.rules.num_packing += 1
        try:
            self._wait(_PACK_WAITS)
        finally:
            self.rules.num_packing -= 1

    def _collect_garbage(self) -> None:
        """Collect garbage, without the lock: graphs in reference cycles may be all that fills the store."""
        self._lock.release()
        try:
            gc.collect()
        finally:
            self._lock.acquire()
        self._drain()
        self.rules.disk_is_full = False  # try once more

    def _raise_spill_error(self) -> None:
        error, self.rules.spill_error = self.rules.spill_error, None
        if isinstance(error, TierStoreError):
            raise _copy_of(error) from error
        if error is not None:
            raise error

    def _await_bytes(self, record: Record) -> None:
        if record.state is State.QUEUED:
            self.rules.cancel_spill(record)
        while record.state not in IN_MEMORY:
            self._raise_cause(record)
            self.rules.hasten(record)
            self._wait(_UNPACK_WAITS, record)

    def _hand_over(
        self, record: Record, layout: Layout, reload_ahead: Lookahead[Record] | None, index: int
    ) -> torch.Tensor:
        source = self._check_unchanged(record, layout)
        is_changing = True
        self.rules.hand_over(record, reload_ahead, index)
        is_changing = False  # noqa: F841 - a new view that is not kept does no harm
        return self._view_of(record, source, layout)

    def _view_of(self, record: Record, source: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return the same tensor for a layout each time: see NOTE [Stolen gradients]."""
        view = record.views.get(layout)
        if view is None:
            view = rebuild(source, layout, record.first_byte)
            record.keep_view(layout, view)
        return view

    def _raise_cause(self, record: Record) -> None:
        if record.state is State.CLOSED:
            self._check_open()
        cause = record.cause
        if cause is None:
            return
        if record.state is not State.FAILED:
            record.cause = None  # may be tried again
        if isinstance(cause, TierStoreError):
            raise _copy_of(cause) from cause
        raise cause


def _copy_of(error: TierStoreError) -> TierStoreError:
    """Make a new exception for each raise: one that is raised twice drags its first traceback along.

    Frames of the engine and of the wait refer to the error that they raised, which makes a cycle. This cycle must not
    hold the frames of the training thread, and with them its tensors, until garbage is collected.
    """
    make, arguments = error.__reduce__()
    return make(*arguments)
