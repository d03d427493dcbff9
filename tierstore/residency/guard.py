"""The lock of a store, who may hold it, who waits for what, and how everything ends.

Training threads and the engine's loop hold the lock for a short time; the rules (`ledger/`) make the changes under it.
Only training threads may wait, and only for progress that the engine makes without them. A waiting thread holds no slot
and no staging that this progress could need. So every wait ends: with progress, with an error, or with the end of the
engine.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from operator import call, methodcaller
from typing import Concatenate, Never, ParamSpec, TypeVar

from ..base.interrupts import is_interrupt
from ..base.threads import refuse_green_threads, refuse_to_wait
from ..disk.tier import Loaded, Stored
from ..errors import StoreBusyError, StoreClosedError, TierStoreError
from ..ledger.books import Books
from ..ledger.counters import STALL_CAUSES
from ..ledger.ledger import Ledger
from ..ledger.noted import NotedTensors
from ..ledger.windows import HostWindows, Window
from ..plain_text import plain
from .booking import Booking
from .copies import AcceleratorCopies, Copies
from .device import DeviceTier
from .handle import Record
from .handle_making import HandleFactory
from .layout import is_inside_modes, outside_of_modes
from .lent import LentViews
from .memory import StoreMemory
from .noted import NotedTensor
from .ownership import is_sole_owner
from .slots import Slots
from .transfers import BytesToWrite, DiskSubmissions

_PACK_WAITS = STALL_CAUSES[0]
_LOOK_SECONDS = 1.0
_HALF_CHANGED = "{} came in the middle of a change of its bookkeeping and closed it; open another"
LOCKS: set[weakref.ref[threading.RLock]] = set()
"""The locks of all stores. A finalizer may run while this thread holds one. If it took another, and another thread took
them in the other order, both would wait for ever."""
_change_of_locks = threading.RLock()  # a finalizer may open a store where its thread holds it
os.register_at_fork(after_in_child=_change_of_locks._at_fork_reinit)  # type: ignore[attr-defined]  # by another thread
_is_owned = methodcaller("_is_owned")
_P = ParamSpec("_P")
_T = TypeVar("_T")
_G = TypeVar("_G", bound="Guard")


def whole(
    method: Callable[Concatenate[_G, _P], _T],
) -> Callable[Concatenate[_G, _P], _T]:
    """Decorator: the call holds the lock. If an interrupt ends it in the middle of a change, the store is closed.

    Half changed books could lose a wake-up, or give one slot to two records: the result would be a hang, or wrong
    values. So the method sets `_is_changing` before the first step of a change. When it returns, the books are whole.
    The call runs outside of the caller's modes (`unseen_by_modes`).
    """

    @wraps(method)
    def call(self: _G, /, *arguments: _P.args, **keywords: _P.kwargs) -> _T:
        if self._lock_is_mine() or (self.are_several and holds_any_lock()):  # as `lock` does
            self._refuse_handler()
        with self._lock:
            try:
                if self._is_changing:
                    self._check_open()
                if is_inside_modes():  # inlined `unseen_by_modes`, to save a call
                    with outside_of_modes():
                        result = method(self, *arguments, **keywords)
                else:
                    result = method(self, *arguments, **keywords)
                self._is_changing = False
                return result
            except BaseException as error:
                self._judge(error)
                raise

    return call


def _or_the_end(method: Callable[Concatenate[Guard, _P], _T]) -> Callable[Concatenate[Guard, _P], _T]:
    """Decorator: the call holds the lock, and an error in it closes the store before the lock is released.

    The engine needs some time to end. A thread that packs meanwhile would find no job under way that could make room,
    and would call the store full.
    """

    @wraps(method)
    def call(self: Guard, /, *arguments: _P.args, **keywords: _P.kwargs) -> _T:
        if self._lock_is_mine() or (self.are_several and holds_any_lock()):  # as `lock` does
            self._refuse_handler()
        with self._lock:
            try:
                return method(self, *arguments, **keywords)
            except BaseException as error:
                self._end_failed(error)
                raise

    return call


class Guard:
    """The lock of one store, and what happens under it whenever something has changed.

    Attributes:
        rules: what is decided, and the state of it. Only under the lock.
        closed: the error that says why the store cannot be used any more; None: it can.
        slab: host memory for restored bytes, and for copies from accelerators.
        handles: makes handles and their records. Any thread, without the lock.
        fits_on_device: whether so many bytes more may stay on devices. Without the lock, it may be out of date.
        device_of: the accelerator that a tensor lives on; None: it is in host memory. Any thread, without the lock.
        are_several: there may be other stores in this process. The same for all of them.
    """

    are_several = False

    def __init__(
        self,
        name: str,
        engine: DiskSubmissions,
        *,
        host_bytes: int,
        staging_bytes: int,
        staging_grows: bool = False,
        copies: Copies | None = None,
    ) -> None:
        self._name = name
        self._title = plain(f"the store at {name}")
        self._engine = engine
        windows = HostWindows(host_bytes, staging_bytes, grows=staging_grows)
        resident = Window(0)
        self._noted = NotedTensors[NotedTensor, Record](windows, resident)
        self._books = books = Books[Record](windows, self._noted, is_sole_owner)
        self._counters = books.counters
        self._lent_views = lent_views = LentViews()
        size_bytes = host_bytes + staging_bytes
        self._slots = slots = Slots(windows, size_bytes, books.uncharged_bytes, counters=books.counters)
        self.slab = slots.slab
        self._devices = DeviceTier(
            copies or AcceleratorCopies(), lent_views=lent_views, note_copy=slots.note_copy, resident=resident
        )
        streams = self._devices.streams
        self.device_of = streams.device_of
        self.handles = HandleFactory(self, books.released.append, streams.device_of)
        self._booking = Booking(books, self.handles, self._noted, lent_views, slots, streams)
        self._memory = StoreMemory(self._booking, slots, self._devices, lent_views)
        self.ledger = Ledger[Record](books, self._memory, self._devices, engine, engine.disk_budget_bytes)
        self.fits_on_device = self._devices.window.fits
        self._begin_lock()
        self.closed: StoreClosedError | None = None
        self._is_changing = False  # the books are half changed; only under the lock
        self._are_half_changed = False  # for good: the store is closed for that
        self._num_getting = 0  # threads that wait for bytes, or whose bytes are there but which have not woken yet

    def _begin_lock(self) -> None:
        # An RLock because it knows its owner; it is never taken twice: see `lock`.
        self._lock = threading.RLock()
        self._lock_is_mine: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]  # for Condition
        with _change_of_locks:
            LOCKS.add(weakref.ref(self._lock, LOCKS.discard))
            Guard.are_several = len(LOCKS) > 1
        self._progress = threading.Condition(self._lock)

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Raises StoreBusyError if this thread holds it already, or that of another store."""
        if self._lock_is_mine() or (self.are_several and holds_any_lock()):
            self._refuse_handler()
        return self._lock

    def _refuse_handler(self) -> Never:
        raise StoreBusyError(self._name)

    def refuse_to_wait(self) -> None:
        """Raise StoreBusyError or ConfigError if this thread may not wait for the store's, or could not."""
        refuse_to_wait(self._name)
        refuse_green_threads()

    # --- the end ---------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        with self.lock:
            self._check_open()

    def _check_open(self) -> None:
        if self.closed is None and self._is_changing:  # a second interrupt came, or no stack was left, in `_judge`
            self._are_half_changed = True
            self._end(StoreClosedError(self._name, _HALF_CHANGED.format("an interrupt")))
        if self.closed is not None:
            raise StoreClosedError(self.closed.store, self.closed.reason) from self.closed.__cause__

    def close(self, reason: str = "it was closed") -> None:
        with outside_of_modes(), self.lock:
            self._end(StoreClosedError(self._name, reason))

    def _end(self, closed: StoreClosedError) -> None:
        try:
            if self.closed is None:
                self.closed = closed
                self.ledger.end_all()
        finally:
            self._progress.notify_all()

    def _judge(self, error: BaseException) -> None:
        """An error is about to leave a call that still holds the lock.

        If it is an interrupt (`interrupts.py`) that has come while the books were half changed, the store is closed,
        and a note of it says so. Any other error was raised where they are whole.
        """
        if self._is_changing and (isinstance(error, RecursionError) or is_interrupt(error)):
            reason = _HALF_CHANGED.format(f"a {type(error).__name__}")
            self._are_half_changed = True
            try:
                with outside_of_modes():
                    self._end(StoreClosedError(self._name, reason))
            except Exception:  # noqa: BLE001 - half changed books cannot always be taken apart; the store is closed
                pass
            if self.closed is not None and self.closed.reason == reason:
                error.add_note(f"tierstore: {self._title} cannot be used: {reason}")  # no call: the stack may be full
        self._is_changing = False

    def abandon(self, reason: str) -> None:
        """In a forked child: give up every record, free nothing.

        The thread that holds the lock may not exist here, and its change stays half done.
        """
        self._begin_lock()
        self._is_changing = False
        self.closed = StoreClosedError(self._name, reason)
        self.ledger.abandon()

    # --- under the lock --------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Account for everything that has died; if there was anything, let others go on."""
        was_changing, self._is_changing = self._is_changing, True
        if self.ledger.drain():
            self._advance()
        self._is_changing = was_changing

    def _advance(self) -> None:
        self.ledger.advance()
        self._progress.notify_all()

    def _go_ahead(self) -> None:
        if self.ledger.go_ahead():
            self._progress.notify_all()  # a write that `flush` waits for was cancelled, and nobody else tells it

    def _wait(self, cause: str, record: Record | None = None) -> None:
        """Wait for progress, a second at most: the caller looks whether there was any, and waits again.

        A condition that is notified just as its time ends says that it was not. Call this only while the books are
        whole, and the engine has a job, or another thread is about to release its bytes. `record`: the record whose
        bytes are waited for; None: the wait is for room. Raises what `refuse_to_wait` does.
        """
        self._engine.hurry()
        began = time.perf_counter()
        was_changing, self._is_changing = self._is_changing, False
        try:
            self.refuse_to_wait()
            if not self._progress.wait(_LOOK_SECONDS) and self.closed is None and not self._engine.is_running:
                self._end(StoreClosedError(self._name, "its engine's thread has died"))  # and could not tell
        except BaseException:
            if not self._lock_is_mine():  # an interrupt came as the condition began to wait
                self._lock.acquire()
            raise
        seconds = time.perf_counter() - began
        self.ledger.counters.stall_seconds[cause] += seconds
        self.ledger.observer.stalled(seconds, cause, None if record is None else record.key)
        self._check_open()
        self._drain()
        self._is_changing = was_changing

    def _raise_spill_error(self) -> None:
        error, self.ledger.spill_error = self.ledger.spill_error, None
        if isinstance(error, TierStoreError):
            raise copy_of(error) from error
        if error is not None:
            raise error

    # --- the engine's loop: each call waits for nothing but the lock ----------------------------------------------

    @_or_the_end
    def begin_spill(self, record: Record) -> BytesToWrite | None:
        self._drain()
        if not self.ledger.begin_write(record):
            self._progress.notify_all()  # the record may have been withdrawn
            return None
        return BytesToWrite(self._memory.bytes_held(record), record.kind, record.ready)

    @_or_the_end
    def end_spill(self, record: Record, outcome: Stored | Exception) -> None:
        self.ledger.end_write(record, outcome)
        self._advance()

    @_or_the_end
    def begin_restore(self, record: Record) -> memoryview | None:
        self._drain()
        return self._memory.bytes_held(record) if self.ledger.begin_read(record) else None

    @_or_the_end
    def end_restore(self, record: Record, outcome: Loaded | Exception) -> None:
        self.ledger.end_read(record, outcome)
        self._advance()

    @_or_the_end
    def end_discard(self, num_records: int) -> None:
        self.ledger.end_discards(num_records)
        self._advance()

    def engine_ended(self, error: BaseException | None) -> None:
        with self.lock:
            if error is None:
                self._end(StoreClosedError(self._name))
            else:
                self._end_failed(error)
            try:
                self.ledger.end_jobs()
            except Exception:
                if not self._are_half_changed:  # else they cannot always be taken apart
                    raise
            under_way = self._devices.under_way()
        for marker in under_way:
            try:
                marker.synchronize()
            except Exception:  # noqa: BLE001 - the device has failed, or its copies were given up
                pass
        with self.lock:
            self._devices.finish()
        self.slab.unpin()  # waits for a thread, where a finalizer may want the lock

    def _end_failed(self, error: BaseException) -> None:
        closed = StoreClosedError(self._name, f"its engine failed ({error!r})")
        closed.__cause__ = error
        self._end(closed)

    # --- waiting for room ------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        ledger = self.ledger
        collected = False
        while ledger.blocked:
            self._raise_spill_error()
            if ledger.num_jobs or self._num_getting:
                self._wait_for_room()
            elif not collected:
                collected = True
                ledger.windows.keep_noted(0)  # small tensors give way
                self._collect_garbage()
            else:
                raise ledger.full_error(ledger.blocked[0].nbytes) from ledger.disk_error
            ledger.admit_blocked(is_awaited=True)
            self._slots.trim()
        self._raise_spill_error()

    def _wait_for_room(self) -> None:
        self.ledger.num_packing += 1
        try:
            self._wait(_PACK_WAITS)
        finally:
            self.ledger.num_packing -= 1

    def _collect_garbage(self) -> None:
        """Collect garbage, without the lock: graphs in reference cycles may be all that fills the store."""
        was_changing, self._is_changing = self._is_changing, False
        self._lock.release()
        try:
            gc.collect()
        finally:
            self._lock.acquire()
        self._drain()
        self._is_changing = was_changing
        self.ledger.disk_is_full = False  # try once more


def holds_any_lock() -> bool:
    """Whether this thread holds the lock of any store. In calls of C alone: a program may trace each line."""
    with _change_of_locks:
        Guard.are_several = len(LOCKS) > 1  # others may have died
    return any(map(_is_owned, filter(None, map(call, list(LOCKS)))))


def copy_of(error: TierStoreError) -> TierStoreError:
    """Make a new exception for each raise: one that is raised twice drags its first traceback along.

    Frames of the engine and of the wait refer to the error that they raised, which makes a cycle. This cycle must not
    hold the frames of the training thread, and with them its tensors, until garbage is collected.
    """
    make, arguments = error.__reduce__()
    return make(*arguments)
