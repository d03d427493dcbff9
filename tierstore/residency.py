"""The books behind one lock: who may call, who waits, and for what.

Training threads come in through `track`, `settle`, `fetch` and `flush`; the engine's loop through the methods of
`Transfers`. All of them hold the lock for some instructions (`moves.py` does what is done under it); only the first
kind may wait, and only for progress that the engine makes without them. Whoever waits holds no slot and no staging
that this progress could need, so every wait ends: with progress, with an error, or with the end of the engine.

NOTE [Stolen gradients]
A function may return its saved tensor as a gradient. Autograd then either copies it into `.grad` or, where nobody
else refers to the tensor, takes it as it is, and adds to it in place later. Without hooks the graph, and the user,
refer to the very tensor that was saved, so it is copied as long as they do. Hence the same tensor is handed out each
time while the bytes stay in memory: the one that was saved, where it lives on (NOTE [The same object] in
`hooks/saved.py`), or one that the record keeps. It shares the record's version counter: once autograd has taken it,
each addition to the gradient would be a change in place of what was saved. So it must not become autograd's own when
the bytes leave memory, which the next tensor of the same node may cause, or another thread: `lent.py` keeps it for as
long as anybody uses it. A gradient may wait while further nodes run, so how long that is cannot be told by which node
asks.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, Never, ParamSpec, TypeVar

import torch

from .disk.tier import Loaded, Stored
from .errors import ModifiedInPlaceError, StoreBusyError, StoreClosedError, StoreFullError, TierStoreError
from .handle import IN_MEMORY, Record, State
from .interrupts import is_half_changed, is_interrupt
from .layout import (
    Layout,
    describe,
    is_inside_modes,
    memory_at,
    outside_of_modes,
    rebuild,
    unseen_by_modes,
)
from .moves import Moves
from .ownership import claims_of
from .pending import NUM_EXAMINED_PER_PACK
from .stats import STALL_CAUSES
from .tracing.observer import Observer
from .transfers import Spill

if TYPE_CHECKING:
    from .copies import Copies
    from .coverage import GraphTimes
    from .lookahead import Lookahead
    from .noted import LogRemains, NotedLog, NotedTensor

__all__ = ["Residency"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

_PACK_WAITS, _UNPACK_WAITS = STALL_CAUSES


def _whole(
    method: Callable[Concatenate[Residency, _P], _T],
) -> Callable[Concatenate[Residency, _P], _T]:
    """Decorator: if an interrupt (`interrupts.py`) ends the call in the midst of a change, the store is closed.

    No mode of the caller's sees it (`unseen_by_modes`).

    An interrupt may come between any two steps of a change, and half changed books could lose a wake-up, or give one
    slot to two records: a hang, or wrong values. In a wait they are whole, and wherever no method in the traceback has
    said in its variable `is_changing` that they are not: see `is_half_changed`. A method without one is always at it.
    """

    @wraps(method)
    def call(self: Residency, /, *arguments: _P.args, **keywords: _P.kwargs) -> _T:
        try:
            if is_inside_modes():  # not by `unseen_by_modes`: it would be one more call
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
        name: of the store, for messages.
        host_bytes, staging_bytes: the limits of the two windows of host memory.
        staging_grows: see NOTE [Large tensors] in `host.py`.
        copies: the copy engine for accelerators; None: whatever `torch.accelerator` drives.

    Attributes:
        disk_budget_bytes: for messages; the disk tier enforces it.
        closed: why the store cannot be used any more; None: it can.
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
    ) -> None:
        self._name = name
        self.disk_budget_bytes = 0
        self.moves = Moves(
            host_bytes=host_bytes, staging_bytes=staging_bytes, staging_grows=staging_grows, copies=copies
        )
        self.device_of = self.moves.devices.device_of
        self._begin_lock()
        self._num_getting = 0  # threads that wait for bytes, or have been given them and not yet woken
        self._num_packing = 0  # threads that wait for room
        self.closed: StoreClosedError | None = None
        self._interrupted_wait: BaseException | None = None

    # --- training threads: may wait -----------------------------------------------------------------------------

    def note(self, noted: NotedTensor, node: int, nbytes: int) -> None:
        """A tensor was saved, in host memory, by the autograd node of that number; its storage has so many bytes.

        Its bytes are not read before a later node saves something, or its log is settled. May wait, while the budget
        is full.

        Raises:
            StoreFullError, StorageIOError, StoreClosedError: as `track`.
        """
        try:
            if self._lock_is_mine():
                self._refuse_handler()
            with self._lock:
                if self.closed is not None:
                    self._check_open()
                moves = self.moves
                noted.log.newest_node = node
                is_short = moves.is_short_of(nbytes)
                is_planned = noted.log.plan is not None and not moves.uses_staging
                is_short |= is_planned
                if is_short:
                    self._relieve(is_planned=is_planned)
                is_changing = True
                counters = moves.counters
                counters.packed_tensors += 1
                counters.packed_bytes += nbytes
                moves.noted.add(noted, node, nbytes)
                if is_short:
                    self._join_if_booked(noted)
                    moves.slots.trim()
                elif moves.uses_staging:
                    moves.charge_noted(nbytes)
                is_changing = False  # noqa: F841 - `is_half_changed` reads it
        except BaseException as error:  # as `_whole`, without a call more: every saved tensor comes this way
            self.end_interrupted(error)
            raise

    @_whole
    def track(self, record: Record, settled: Iterable[Record] = ()) -> None:
        """Begin to keep the books of a record. Its bytes are not read before it is settled.

        `settled` are earlier ones of which that is true now. May wait, while the budget is full.

        Raises:
            StoreFullError: host budget and disk are full; everything is where it was.
            StorageIOError: an earlier write failed; its bytes, and all others, are in memory.
            StoreClosedError: the store is closed.
        """
        with self.lock:
            self._check_open()
            self._drain()
            is_changing = True
            self.moves.register(record)
            self.moves.pending.settle(settled)
            try:
                self._relieve()
            except BaseException:
                self._withdraw(record)
                raise
            is_changing = False  # noqa: F841

    def begin_log(self, log: NotedLog) -> LogRemains:
        """A log begins. Any thread, without the lock."""
        return self.moves.noted.begin(log)

    @_whole
    def enter(self, log: NotedLog, record: Record, node: int) -> int:
        """A record was packed, by the autograd node of that number; returns its index in the log."""
        with self.lock:
            is_changing = True
            if not log.nodes:
                self.moves.noted.drop_ended()  # what was seen of earlier ones tells how this one goes on
            index = log.append_booked(record, node)
            is_changing = False  # noqa: F841
            return index

    @_whole
    def store(self, record: Record) -> None:
        """Like `track`, for a record that is stored whoever else holds its storage, beginning now."""
        with self.lock:
            self._check_open()
            self._drain()
            is_changing = True
            if self.moves.books.noted_bytes:
                self.moves.examine(0)
            self.moves.register(record)
            record.forced = True
            if record.nbytes:
                self.moves.admit(record)
                try:
                    self._make_room()
                except BaseException:
                    self._withdraw(record)
                    raise
            is_changing = False  # noqa: F841

    @_whole
    def settle(self, records: Iterable[Record] = ()) -> None:
        """From now on the records' bytes may be read. Does not wait."""
        with self.lock:
            if self.closed is None:
                self._drain()
                is_changing = True
                self.moves.pending.settle(records)
                self.moves.slots.trim()
                is_changing = False  # noqa: F841

    @_whole
    def survey(self, log: NotedLog) -> None:
        """A scope or a forward ends: look again at all that waits for its other owners to let go. Does not wait.

        What of the log others hold too is booked, so that it is known to be.
        """
        with self.lock:
            if self.closed is None:
                self._drain()
                is_changing = True
                self.moves.relieve(None)
                self.moves.survey(log)
                is_changing = False  # noqa: F841

    @_whole
    def book(self, noted: NotedTensor) -> None:
        """Have a tensor booked whose handle is needed; its bytes may be read from now on. Does not wait.

        Raises:
            StoreClosedError: the store is closed.
        """
        with self.lock:
            if noted.handle is None:
                self._check_open()
                self._drain()
                is_changing = True
                self.moves.booking.book_one(noted)
                is_changing = False  # noqa: F841

    @_whole
    def join(self, record: Record, layout: Layout, nbytes: int) -> bool:
        """Let one more view share the record. Does not wait.

        False: it may not, since the bytes have been read already, the handle is gone, or the store is closed.
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

        Returns its layout over what that record is of; None if it is not certain that the bytes still are the
        record's (they could have been changed through another version counter). Does not wait, but takes a checksum.
        """
        is_changing = False
        storage = tensor.untyped_storage()
        with self.lock:
            if record.state is not State.CLEAN or record.device is not None or record.claims is not claims_of(storage):
                return None
            memory = memory_at(record.address, record.nbytes)  # the caller's tensor keeps it alive
        if not self.moves.engine.confirms(record.key, memory):
            return None
        with self.lock:
            is_changing = True
            self._count_join(tensor.numel() * layout.dtype.itemsize)
            is_changing = False  # noqa: F841
        return layout._replace(offset=layout.offset + record.first_byte // layout.dtype.itemsize)

    def _count_join(self, nbytes: int) -> None:
        self.moves.counters.packed_tensors += 1
        self.moves.counters.deduplicated_bytes += nbytes

    @_whole
    def fetch(
        self,
        record: Record,
        layout: Layout,
        ahead: Lookahead[Record] | None = None,
        reload_ahead: Lookahead[Record] | None = None,
        index: int = 0,
    ) -> torch.Tensor:
        """A tensor of the given layout over the record's bytes. Waits if they are not in memory.

        What lies ahead of number `index` is restored, and copied back to its device, as far as there is room.

        Raises:
            ModifiedInPlaceError: the saved tensor, or one that was handed out, was changed in place.
            CorruptDataError: the bytes on disk are damaged; they are lost.
            StorageIOError: they could not be read; they are still on disk.
            StoreClosedError: the store is closed; they are gone.
        """
        with self.lock:
            moves = self.moves
            if record.state is not State.CLOSED:
                self._check_open()
            self._drain()
            self._check_unchanged(record, layout)
            is_changing = True
            self._count_request(record)
            if record.state is State.DISK:
                moves.start_restore(record, demanded=True)
            if ahead is not None:
                moves.ahead = ahead
                ahead.asked_for(index)
                ahead.reach.asked_for(record.nbytes)
                if record.state is State.DISK or record.state is State.READING:
                    ahead.reach.wait()
                self._go_ahead()
            elif moves.by_hand.forget(record):
                self._go_ahead()
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
                self.moves.used(record)
                self._advance()
                is_changing = False  # noqa: F841

    @_whole
    def look_ahead(self, ahead: Lookahead[Record]) -> None:
        """Backward begins: restore what lies ahead, as far as there is room. Does not wait."""
        with self.lock:
            if self.closed is None:
                self._drain()
                is_changing = True
                self.moves.ahead = ahead
                self._go_ahead()
                is_changing = False  # noqa: F841

    @_whole
    def prefetch(self, records: Iterable[Record]) -> None:
        """Fetch the records, in this order, as far as there is room, and go on as room is freed. Does not wait."""
        with self.lock:
            if self.closed is None:
                self._drain()
                self.moves.name(records)
                self._go_ahead()

    @_whole
    def flush(self) -> None:
        """Return when every write that was decided on is done. Waits.

        Raises:
            StoreFullError, StorageIOError: a write failed; the bytes are in memory.
            StoreClosedError: the store is closed.
        """
        with self.lock:
            self._check_open()
            self._drain()
            is_changing = True
            self.moves.disk_is_full = False  # others may have freed something
            self.moves.examine()
            self._make_room()
            while True:
                is_changing = False
                while self.moves.num_spills or self.moves.num_discards or self.moves.has_doomed:
                    self._wait(_PACK_WAITS)
                self._raise_spill_error()
                if not self.moves.unwritten_bytes:
                    return
                if self.moves.disk_is_full:
                    raise self._full_error(self.moves.unwritten_bytes) from self.moves.full_error
                is_changing = True  # noqa: F841
                self.moves.retry_unwritten()

    def has_any(self) -> bool:
        """Whether anything is kept here. Any thread, without the lock: it may be out of date."""
        return bool(self.moves.booking.records or self.moves.noted.num_bytes)

    def check_open(self) -> None:
        """Raise StoreClosedError if the store is closed."""
        with self.lock:
            self._check_open()

    def count_kept(self, reason: str, nbytes: int) -> None:
        """Count a saved tensor that stays where it is."""
        with self.lock:
            self.moves.counters.kept_bytes[reason] += nbytes

    def close(self, reason: str = "it was closed") -> None:
        """Give up every record and wake whoever waits. Idempotent."""
        with outside_of_modes(), self.lock:
            self._end(StoreClosedError(self._name, reason))

    def end_interrupted(self, interrupt: BaseException) -> None:
        """A call has ended by this: if it is an interrupt, close the store, unless the books are whole. See `_whole`.

        The interrupt itself is given a note, so that whoever sees it knows at once that the store is closed.
        """
        if interrupt is self._interrupted_wait:
            self._interrupted_wait = None
            return
        if not is_interrupt(interrupt) or self._lock_is_mine():  # the latter: it is a handler's call that was refused
            return
        if not is_half_changed(interrupt.__traceback__, __name__):
            return
        name = type(interrupt).__name__
        reason = f"a {name} came in the midst of a change of its books, which closed it; open another"
        with outside_of_modes(), self.lock:
            try:
                self._end(StoreClosedError(self._name, reason))
            except Exception:  # noqa: BLE001 - what is half changed cannot always be taken apart; it is closed
                pass
        if self.closed is not None and self.closed.reason == reason:
            interrupt.add_note(f"tierstore: {self.closed}")

    def abandon(self, reason: str) -> None:
        """In a forked child: give up every record, tidy nothing.

        The lock's owner may not exist here, and what it was changing stays half changed.
        """
        self._begin_lock()
        self.closed = StoreClosedError(self._name, reason)
        self.moves.abandon()

    @_whole
    def tidy(self) -> None:
        """Account for what has died, and for what is ours by now. Does not wait."""
        with self.lock:
            is_changing = True
            self.moves.lent_views.take_back(None)
            self._drain()
            if self.closed is None:
                self.moves.examine()
                self.moves.engine.hurry()
            is_changing = False  # noqa: F841

    @property
    def device_limit_bytes(self) -> int:
        """How much of what is saved may stay on accelerators now. Any thread, without the lock."""
        return self.moves.devices.resident.limit_bytes or 0

    @property
    def window_limits(self) -> tuple[int, int]:
        """The limits of the host window and of the staging window, as they are now. Any thread, without the lock."""
        return self.moves.books.limits

    @_whole
    def keep_on_device(self, device_bytes: int) -> None:
        """From now on so much of what was saved last stays on the accelerator. Ends the times that are being taken."""
        with self.lock:
            self.moves.devices.keep(device_bytes)

    @_whole
    def time_graph(self, record: Record) -> GraphTimes:
        """Take the times of the graph whose first pack the record is, on an accelerator, and what stays is found."""
        with self.lock:
            return self.moves.devices.time_graph(record)

    # --- traces: the caller holds the lock ------------------------------------------------------------------------

    def observe(self, observer: Observer) -> None:
        """See `Observed`."""
        self.moves.observer = observer

    def levels(self) -> tuple[int, ...]:
        """See `Observed`."""
        return self.moves.levels()

    # --- the engine's loop: `Transfers` -------------------------------------------------------------------------

    def begin_spill(self, record: Record) -> Spill | None:
        """See `Transfers`."""
        with self.lock:
            self._drain()
            if record.state is not State.QUEUED:
                return None
            source = record.source
            if source is None:  # its handle dies just now, on another thread, and nobody is told
                self.moves.withdraw(record)
                self._advance()
                return None
            address, nbytes = self.moves.span_to_write(record, source)
            return Spill(memory_at(address, nbytes), record.kind, record.ready)

    def end_spill(self, record: Record, outcome: Stored | Exception) -> None:
        """See `Transfers`."""
        with self.lock:
            self.moves.spilled(record, outcome)
            self._advance()

    def begin_restore(self, record: Record) -> memoryview | None:
        """See `Transfers`."""
        with self.lock:
            self._drain()
            slot = self.moves.slot_to_fill(record)
            return None if slot is None else slot.memory

    def end_restore(self, record: Record, outcome: Loaded | Exception) -> None:
        """See `Transfers`."""
        with self.lock:
            self.moves.restored(record, outcome)
            self._advance()

    def end_discard(self, num_records: int) -> None:
        """See `Transfers`."""
        with self.lock:
            self.moves.discarded(num_records)
            self._advance()

    def engine_ended(self, error: BaseException | None) -> None:
        """See `Transfers`."""
        closed = StoreClosedError(self._name)
        if error is not None:
            closed = StoreClosedError(self._name, f"its engine failed ({error!r})")
            closed.__cause__ = error
        with self.lock:
            self._end(closed)
            self.moves.end_jobs()
            under_way = self.moves.devices.under_way()
        for marker in under_way:
            try:
                marker.synchronize()
            except Exception:  # noqa: BLE001 - the device has failed, or its copies were given up
                pass
        with self.lock:
            self.moves.devices.finish()
            self.moves.slots.slab.unpin()

    # --- the lock -----------------------------------------------------------------------------------------------

    def _begin_lock(self) -> None:
        # One that knows its owner. It is never taken twice: see `lock`.
        self._lock = threading.RLock()
        self._lock_is_mine: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]  # for Condition
        self._progress = threading.Condition(self._lock)

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Enter it to hold the lock.

        Raises:
            StoreBusyError: this thread does already.
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
                self.moves.end_all()
        finally:
            self._progress.notify_all()

    def _drain(self) -> None:
        """Account for what has died; if that was something, others may be able to go on."""
        if self.moves.drain():
            is_changing = True
            self._advance()
            is_changing = False  # noqa: F841

    def _advance(self) -> None:
        """Something was freed, or a job is over: those who found no room before may find it now."""
        self.moves.admit_blocked(is_awaited=self._num_packing > 0)
        self.moves.send_ahead()
        self._go_ahead()
        self._progress.notify_all()

    def _go_ahead(self) -> None:
        """Restore what will be asked for next, unless a pack waits: that would take the very room it waits for."""
        if self.closed is None and not self._num_packing:
            num_spills = self.moves.num_spills
            self.moves.go_ahead()
            if self.moves.num_spills < num_spills:
                self._progress.notify_all()  # what a `flush` waits for is not written any more, and nobody tells of it

    def _check_unchanged(self, record: Record, layout: Layout) -> torch.Tensor:
        source = record.source
        if source is None:
            raise StoreClosedError(self._name, "the handle was released")
        if source._version != record.version:
            raise ModifiedInPlaceError(describe(layout), record.version, source._version)
        return source

    def _wait(self, cause: str, record: Record | None = None) -> None:
        """Wait for progress; only while the engine has a job, or another thread is about to let go of its bytes.

        `record`: whose bytes are waited for; None: for room.
        """
        self.moves.engine.hurry()
        began = time.perf_counter()
        try:
            self._progress.wait()
        except BaseException as interrupt:
            if not self._lock_is_mine():  # it came as the condition began to wait
                self._lock.acquire()
            self._interrupted_wait = interrupt
            raise
        seconds = time.perf_counter() - began
        self.moves.counters.stall_seconds[cause] += seconds
        self.moves.observer.stalled(seconds, cause, None if record is None else record.key)
        self._check_open()
        self._drain()

    @unseen_by_modes
    def _relieve(self, *, is_planned: bool = False) -> None:
        """Book what may have to leave, and find room; may wait."""
        self._drain()
        is_changing = True
        self.moves.relieve(NUM_EXAMINED_PER_PACK, is_planned=is_planned)
        if self.moves.blocked or self.moves.spill_error is not None:
            self._make_room()
        is_changing = False  # noqa: F841

    @unseen_by_modes
    def _join_if_booked(self, noted: NotedTensor) -> None:
        self.moves.booking.join_if_booked(noted)

    def _withdraw(self, record: Record) -> None:
        """Whoever is refused still has the tensor; the store has not."""
        self.moves.withdraw(record)
        self._advance()

    def _make_room(self) -> None:
        """Return when everything that is ours has found its place, or raise why it cannot."""
        moves = self.moves
        collected = False
        while moves.blocked:
            self._raise_spill_error()
            if moves.num_jobs or self._num_getting:
                self._wait_for_room()
            elif not collected:
                collected = True
                self._collect_garbage()
            else:
                raise self._full_error(moves.blocked[0].nbytes) from moves.full_error
            moves.admit_blocked(is_awaited=True)
        self._raise_spill_error()

    def _wait_for_room(self) -> None:
        self._num_packing += 1
        try:
            self._wait(_PACK_WAITS)
        finally:
            self._num_packing -= 1

    def _collect_garbage(self) -> None:
        """Graphs in reference cycles may be all that fills the store."""
        self._lock.release()
        try:
            gc.collect()
        finally:
            self._lock.acquire()
        self._drain()
        self.moves.disk_is_full = False  # try once more

    def _full_error(self, needed_bytes: int) -> StoreFullError:
        books, found = self.moves.books, self.moves.full_error
        return replace(
            found or StoreFullError(needed_bytes, self.moves.disk_bytes, self.disk_budget_bytes),
            needed_bytes=needed_bytes,
            host_bytes=books.used_bytes[0],
            host_budget_bytes=books.host_bytes,
        )

    def _raise_spill_error(self) -> None:
        error, self.moves.spill_error = self.moves.spill_error, None
        if isinstance(error, TierStoreError):
            raise _copy_of(error) from error
        if error is not None:
            raise error

    def _await_bytes(self, record: Record) -> None:
        if record.state is State.QUEUED:
            self.moves.cancel_spill(record)
        while record.state not in IN_MEMORY:
            self._raise_cause(record)
            if record.state is State.DISK:
                self.moves.start_restore(record, demanded=True)
            elif record.state is State.READING and not record.urgent:
                record.urgent = True
                self.moves.engine.submit_restore(record, demanded=True)  # overtakes its own prefetch
            self._wait(_UNPACK_WAITS, record)

    def _hand_over(
        self, record: Record, layout: Layout, reload_ahead: Lookahead[Record] | None, index: int
    ) -> torch.Tensor:
        source = self._check_unchanged(record, layout)
        is_changing = True
        if record.device is not None:
            self.moves.reload_demanded(record)
            self.moves.devices.hand_over(record)
            if reload_ahead is not None:
                reload_ahead.asked_for(index)
                self.moves.reload_ahead(reload_ahead)
        self.moves.used(record)
        is_changing = False  # noqa: F841 - a view that is made and not kept is nobody's
        return self._view_of(record, source, layout)

    def _view_of(self, record: Record, source: torch.Tensor, layout: Layout) -> torch.Tensor:
        """See NOTE [Stolen gradients]."""
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

    def _count_request(self, record: Record) -> None:
        counters = self.moves.counters
        if record.state is State.DISK:
            counters.prefetch_misses += 1
        elif record.state is State.READING:
            counters.prefetch_late += not record.demanded
        elif record.state is State.CLEAN and record.fetched:
            counters.prefetch_hits += 1
            record.fetched = False
        elif record.state in (State.QUEUED, State.WRITING):
            counters.forwarded_bytes += record.nbytes


def _copy_of(error: TierStoreError) -> TierStoreError:
    """A fresh one for each raise: an exception that is raised twice drags its first traceback along.

    And frames of the engine and of the wait refer to the error that they raised: a cycle, which must not hold the
    frames of the thread that trains, and with them its tensors, until garbage is collected.
    """
    make, arguments = error.__reduce__()
    return make(*arguments)
