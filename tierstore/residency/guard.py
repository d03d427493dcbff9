"""The lock of a store, who may hold it, who waits for what, and how everything ends.

Training threads and the worker hold the lock for a short time; the ledger (`ledger/`) makes the changes under it. Only
training threads may wait, and only for progress that the worker makes without them. A waiting thread holds no slot and
no staging that this progress could need. So every wait ends: with progress, with an error, or with the end of the
engine."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum, auto
from functools import wraps
from operator import call, methodcaller
from types import FrameType
from typing import Any, Concatenate, Never, ParamSpec, TypeVar

from ..base.ctrl_c import CTRL_C
from ..base.interrupts import is_interrupt
from ..base.threads import refuse_green_threads, refuse_to_wait
from ..errors import StoreBusyError, StoreClosedError, TierStoreError
from ..ledger.counters import STALL_CAUSES
from ..ledger.ledger import ForRoom, Ledger
from ..ledger.validation import InvalidBooksError
from ..plain_text import plain
from ..tensors.layout import is_inside_modes, outside_of_modes
from .handle import Record
from .transfers import Worker
from .validating_lock import ValidatingLock

_PACK_WAITS = STALL_CAUSES[0]
_LOOK_SECONDS = 1.0
_HALF_CHANGED = "{} came in the middle of a change of its bookkeeping and closed it; open another"
LOCKS: set[weakref.ref[threading.RLock]] = set()
"""The locks of all stores. A finalizer may run while this thread holds one. If it took another, and another thread took
them in the other order, both would wait for ever."""
WAITING: set[int] = set()
"""The threads that wait for the progress of any store. They hold no lock meanwhile, but are in the middle of a call: a
handler that waited there for a store might wait for what its own thread has to give back."""
_change_of_locks = threading.RLock()  # a finalizer may open a store where its thread holds it
os.register_at_fork(after_in_child=_change_of_locks._at_fork_reinit)  # type: ignore[attr-defined]  # by another thread
os.register_at_fork(after_in_child=WAITING.clear)
_is_owned = methodcaller("_is_owned")
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Closed(Enum):
    """What a call does in a store that was closed."""

    RUNS = auto()
    RAISES = auto()
    IS_SKIPPED = auto()


def _door(closed: Closed, method: Callable[Concatenate[Any, _P], _T]) -> Callable[Concatenate[Any, _P], _T]:
    """The one door to the books for threads of the program. `Saving.track_on_device` and `HandingOut.next_member`
    repeat it inline, to save calls.

    The call holds the lock of `_guard`. If an interrupt ends it in a change, the store is closed: half changed books
    could lose a wake-up, or give one slot to two records, and the result would be a hang, or wrong values. Ctrl-C is
    held back meanwhile. When the call returns, the books are whole, and who has to learn of the change is told. It runs
    outside of the caller's modes (`unseen_by_modes`)."""
    entered = method if closed is Closed.RUNS else _after_a_drain(method)

    @wraps(method)
    def call(self: Any, /, *arguments: _P.args, **keywords: _P.kwargs) -> _T:
        guard: Guard = self._guard
        if guard.is_mine() or (guard.may_be_inside and is_inside_any()):  # as `lock` does
            guard.refuse_handler()
        with guard.mutex:
            try:
                CTRL_C.hold()
                if guard.is_changing or (closed is Closed.RAISES and guard.closed is not None):
                    guard.must_be_open()
                if closed is Closed.IS_SKIPPED and guard.closed is not None:
                    return None  # type: ignore[return-value]  # `change_if_open` is for calls without an answer
                if is_inside_modes():  # inlined `unseen_by_modes`, to save a call
                    with outside_of_modes():
                        result = entered(self, *arguments, **keywords)
                else:
                    if closed is not Closed.RUNS:  # as `entered`, without its calls
                        if any(guard.unaccounted):
                            guard.drain()
                        guard.is_changing = True
                    result = method(self, *arguments, **keywords)
                guard.is_changing = False
                if guard.jobs.has_news or guard.jobs.has_progress:
                    guard.tell()
                return result
            except BaseException as error:
                guard.judge(error)
                raise
            finally:
                if CTRL_C.is_held:
                    CTRL_C.let_through()

    return call


def _after_a_drain(method: Callable[Concatenate[Any, _P], _T]) -> Callable[Concatenate[Any, _P], _T]:
    def change(self: Any, /, *arguments: _P.args, **keywords: _P.kwargs) -> _T:
        guard: Guard = self._guard
        guard.drain()
        guard.is_changing = True
        return method(self, *arguments, **keywords)

    return change


def whole(method: Callable[Concatenate[Any, _P], _T]) -> Callable[Concatenate[Any, _P], _T]:
    """Decorator: see `_door`. The method sets `Guard.is_changing` itself, before the first step of a change."""
    return _door(Closed.RUNS, method)


def change(method: Callable[Concatenate[Any, _P], _T]) -> Callable[Concatenate[Any, _P], _T]:
    """Decorator: see `_door`. The method finds everything accounted for, and changes the books from its first line to
    its last. Raises StoreClosedError."""
    return _door(Closed.RAISES, method)


def change_if_open(method: Callable[Concatenate[Any, _P], None]) -> Callable[Concatenate[Any, _P], None]:
    """Decorator: as `change`, but nothing is done in a closed store."""
    return _door(Closed.IS_SKIPPED, method)


class Guard:
    """The lock of one store, and what happens under it whenever something has changed.

    Attributes:
        closed: the error that says why the store cannot be used any more; None: it can.
        mutex: the lock itself; `is_mine`: whether this thread holds it. `progress`: something was freed or has ended.
        is_changing: the books are half changed; only under the lock.
        jobs, unaccounted: of the ledger.
        num_waiting: threads that wait for progress.
        may_be_inside: there may be other stores in this process, or a thread that waits. The same for all of them.
    """

    may_be_inside = False

    def __init__(self, name: str, ledger: Ledger[Record], worker: Worker, *, validates: bool = False) -> None:
        self.name = name
        self._title = plain(f"the store at {name}")
        self.jobs, self.unaccounted = ledger.books.jobs, ledger.unaccounted
        self._ledger = ledger
        self._books = ledger.books
        self._worker = worker
        self._validates, self._is_invalid = validates, False
        self._begin_lock()
        self.closed: StoreClosedError | None = None
        self.is_changing = False
        self.are_half_changed = False  # for good: the store is closed for that
        self.num_waiting = 0

    def _begin_lock(self) -> None:
        # An RLock because it knows its owner; it is never taken twice: see `lock`.
        self.mutex = ValidatingLock(self._validate) if self._validates else threading.RLock()
        self.is_mine: Callable[[], bool] = self.mutex._is_owned  # type: ignore[attr-defined]  # for Condition
        with _change_of_locks:
            LOCKS.add(weakref.ref(self.mutex, LOCKS.discard))
            _look_inside()
        self.progress = threading.Condition(self.mutex)

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Raises StoreBusyError if this thread holds it already, or that of another store, or waits for one."""
        if self.is_mine() or (self.may_be_inside and is_inside_any()):
            self.refuse_handler()
        return self.mutex

    def _validate(self) -> None:
        """The lock is about to be let go of, so others may look at the books."""
        if self.is_changing or self.are_half_changed:
            return  # an interrupt has come just then; the store is closed for it
        if self._is_invalid and self.closed is not None:
            return  # it was told, and what is left of the store can end
        self._is_invalid = True
        self._ledger.validate()
        if self.closed is None and (self.jobs.has_news or self.jobs.has_progress):
            raise InvalidBooksError("the worker, or who waits, was not told of the latest change")
        self._is_invalid = False

    def refuse_handler(self) -> Never:
        raise StoreBusyError(self.name, "in the middle of another call of this thread")

    def refuse_to_wait(self) -> None:
        """Raise StoreBusyError or ConfigError if this thread may not wait for the store's, or could not."""
        refuse_to_wait(self.name)
        refuse_green_threads()

    # --- the end ---------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        with self.lock:
            self.must_be_open()

    def close(self, reason: str = "it was closed") -> None:
        with outside_of_modes(), self.lock:
            self.end(StoreClosedError(self.name, reason))

    def judge(self, error: BaseException) -> None:
        """An error is about to leave a call that still holds the lock.

        If it is an interrupt (`interrupts.py`) that has come while the books were half changed, the store is closed,
        and a note of it says so. Any other error was raised where they are whole."""
        if self.is_changing and (isinstance(error, RecursionError) or is_interrupt(error)):
            reason = _HALF_CHANGED.format(f"a {type(error).__name__}")
            self.are_half_changed = True
            try:
                with outside_of_modes():
                    self.end(StoreClosedError(self.name, reason))
            except Exception:  # noqa: BLE001 - half changed books cannot always be taken apart; the store is closed
                pass
            if self.closed is None or self.closed.reason == reason:
                error.add_note(f"tierstore: {self._title} cannot be used: {reason}")  # no call: the stack may be full
            if self.closed is None:
                return  # no stack was left: whoever comes next closes it
        self.is_changing = False
        if self.jobs.has_news or self.jobs.has_progress:
            self.tell()

    def abandon(self, reason: str) -> None:
        """In a forked child: give up every record, free nothing.

        The thread that holds the lock may not exist here, and its change stays half done."""
        self._begin_lock()
        self.is_changing = False
        self.closed = StoreClosedError(self.name, reason)
        self._ledger.abandon()

    # --- under the lock --------------------------------------------------------------------------------------------

    def must_be_open(self) -> None:
        if self.closed is None and self.is_changing:  # a second interrupt came, or no stack was left, in `judge`
            self.are_half_changed = True
            self.end(StoreClosedError(self.name, _HALF_CHANGED.format("an interrupt")))
        if self.closed is not None:
            raise StoreClosedError(self.closed.store, self.closed.reason) from self.closed.__cause__

    def end(self, closed: StoreClosedError) -> None:
        try:
            if self.closed is None:
                self.closed = closed
                self._ledger.end_all()
        finally:
            self.progress.notify_all()

    def end_failed(self, error: BaseException) -> None:
        """The engine has failed. The store is closed before the lock is released.

        The engine needs some time to end. A thread that packs meanwhile would find no job under way that could make
        room, and would call the store full."""
        closed = StoreClosedError(self.name, f"its engine failed ({error!r})")
        closed.__cause__ = error
        traceback.clear_frames(error.__traceback__)  # they refer to tensors, and the store keeps the error
        self.end(closed)

    def tell(self) -> None:
        """Wake the worker if there is something for it, and the threads that wait if there was progress."""
        jobs = self.jobs
        if jobs.has_news:
            self._worker.wake()
            jobs.has_news = False
        if jobs.has_progress:
            if self.num_waiting:
                self.progress.notify_all()
            jobs.has_progress = False

    def drain(self) -> None:
        """Account for everything that has died; if there was anything, let others go on."""
        if any(self.unaccounted):
            was_changing, self.is_changing = self.is_changing, True
            if self._ledger.drain():
                self._ledger.advance()
            self.is_changing = was_changing

    def wait(self, cause: str, record: Record | None = None) -> None:
        """Wait for progress, a second at most: the caller looks whether there was any, and waits again.

        A condition that is notified just as its time ends says that it was not. Call this only while the books are
        whole, and the worker has a job, or another thread is about to release its bytes. `record`: the record whose
        bytes are waited for; None: the wait is for room. Raises what `refuse_to_wait` does."""
        self.jobs.hurry()
        began = time.perf_counter()
        was_changing, self.is_changing = self.is_changing, False
        was_held = False
        self.num_waiting += 1  # if an interrupt leaves it too high, that costs time and nothing else
        try:
            self.jobs.has_news = True  # something may have ended that the worker has not told yet
            self.tell()
            self.refuse_to_wait()
            was_held = CTRL_C.let_through()
            with _change_of_locks:
                WAITING.add(threading.get_ident())
                _look_inside()
            if not self.progress.wait(_LOOK_SECONDS) and self.closed is None and not self._worker.is_running:
                self.end(StoreClosedError(self.name, "its engine's thread has died"))  # and could not tell
        except BaseException:
            if not self.is_mine():  # an interrupt came as the condition began to wait
                self.mutex.acquire()
            raise
        finally:
            WAITING.discard(threading.get_ident())
            self.num_waiting -= 1
            if was_held:
                CTRL_C.hold()
        seconds = time.perf_counter() - began
        self._books.counters.stall_seconds[cause] += seconds
        if (observer := self._books.observer) is not None:
            observer.stalled(seconds, cause, None if record is None else record.key)
        self.must_be_open()
        self._ledger.device.ask_anew()
        self.drain()
        self.is_changing = was_changing

    def raise_spill_error(self) -> None:
        error = self._books.spill_error
        if error is not None:
            self._books.spill_error = None
            self.raise_as_told(error)

    def raise_as_told(self, error: BaseException) -> Never:
        """Raise an error of another thread. The books are whole."""
        self.is_changing = False
        if isinstance(error, TierStoreError):
            raise copy_of(error) from error
        raise error

    # --- waiting for room ------------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Wait until no record is blocked. Raises what `Saving.save` does."""
        books, has_collected = self._books, False
        while True:
            if books.blocked or books.spill_error is not None:
                self.raise_spill_error()
            needed = self._ledger.for_room(has_collected=has_collected)
            if needed is None:
                return
            if needed is ForRoom.WAIT:
                self.wait_for_room()
            else:
                has_collected = True
                self._collect_garbage()
            self._ledger.retry_blocked()

    def wait_for_room(self) -> None:
        self._books.num_packing += 1
        try:
            self.wait(_PACK_WAITS)
        finally:
            self._books.num_packing -= 1

    def _collect_garbage(self) -> None:
        """Collect garbage, without the lock: graphs in reference cycles may be all that fills the store."""
        was_changing, self.is_changing = self.is_changing, False
        was_held = CTRL_C.let_through()
        self.tell()
        self.mutex.release()
        try:
            gc.collect()
        finally:
            self.mutex.acquire()
            if was_held:
                CTRL_C.hold()
        self.drain()
        self.is_changing = was_changing
        self._books.disk_is_full = False  # try once more


def is_inside_any() -> bool:
    """Whether this thread is in a call of any store: it holds its lock, or waits for its progress.

    Those that hold a lock are found by calls of C alone, as a program may trace each line."""
    with _change_of_locks:
        _look_inside()  # others may have died
    if any(map(_is_owned, filter(None, map(call, list(LOCKS))))):
        return True
    return threading.get_ident() in WAITING and _is_waiting(sys._getframe())


def _look_inside() -> None:
    Guard.may_be_inside = len(LOCKS) > 1 or bool(WAITING)


def _is_waiting(frame: FrameType | None) -> bool:
    """Whether a wait is under way below the frame. Else an interrupt has ended one before its thread was struck off."""
    while frame is not None and frame.f_code is not Guard.wait.__code__:
        frame = frame.f_back
    if frame is None:
        WAITING.discard(threading.get_ident())
    return frame is not None


def copy_of(error: TierStoreError) -> TierStoreError:
    """Make a new exception for each raise: one that is raised twice drags its first traceback along.

    Frames of the engine and of the wait refer to the error that they raised, which makes a cycle. This cycle must not
    hold the frames of the training thread, and with them its tensors, until garbage is collected."""
    make, arguments = error.__reduce__()
    return make(*arguments)
