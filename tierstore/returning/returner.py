"""The fallback where there is no caching allocator (`caching.py`): a thread that returns freed memory to the system.
While the store keeps something or has a limit, it looks at the process's resident memory, asks `policy` whether to
return some, and has the allocator do it."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from weakref import WeakSet

from ..base.config import Mode
from ..base.system_words import words_of
from ..base.threads import start_thread
from .advice import FreedMemory
from .allocator import Allocator, allocator_of_process
from .policy import ReturnPolicy
from .room import Room, find_room, resident_bytes, tightest

_ROOM_LASTS_SECONDS = 0.1  # the room is estimated meanwhile; to ask the system takes up to a millisecond
_IDLE_SECONDS = 0.25
_IDLE_AFTER_SECONDS = 2.0  # not between two steps: the next may take all of the room within a tenth of a second
_one_at_a_time = threading.Lock()  # held by the store that returns memory: others need not return it again
_telling = threading.RLock()  # held where `_returners` are asked; a signal handler may close a store meanwhile
_returners: WeakSet[Returner] = WeakSet()  # of this process: the allocator is told what all of them want


class Returner(FreedMemory):
    """Returns freed memory for one store. `start` and `stop` belong to the owner; `stop` waits for a return that is on
    its way. Nothing else blocks. `is_busy`: whether the store keeps anything; asked on the thread, takes no lock."""

    def __init__(self, mode: Mode, is_busy: Callable[[], bool], allocator: Allocator | None = None) -> None:
        super().__init__(mode)
        self._allocator = allocator or allocator_of_process()
        self._is_busy, self._policy = is_busy, ReturnPolicy(mode)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._room: tuple[float, int, Room] | None = None  # when it was asked for, and what was resident then
        self._trouble: str | None = None  # why the last look saw nothing
        self.returned_bytes = 0
        self._is_in_use = self._keeps_freed = False
        with _telling:
            _returners.add(self)

    def limit(self, nbytes: int | None) -> None:
        """Treat `nbytes` of resident memory as a limit of this process, beside those of the system; None: no more.
        While there is one, memory is returned even if the store keeps nothing, and only when it is short, and heaps are
        filled by small pages: a huge page is resident as a whole. After the thread has failed there is no limit."""
        self._limit_bytes = nbytes if self._failure is None else None
        if nbytes is not None and not self._stopped.is_set():
            try:
                self.start()
            except OSError as error:
                self._failure = f"its thread cannot be started ({words_of(error)})"  # told by `why_memory_stays`
                self._limit_bytes = None
        self._tell_allocator()

    def _tell_allocator(self) -> None:
        """Have it return nothing by itself while memory is returned when it is short: the end of a heap is free once in
        a step or more, and glibc would return it each time."""
        with _telling:
            is_short_alone = self._limit_bytes is not None or (self._is_in_use and self._mode == "auto")
            if self._keeps_freed is (keeps := self.is_on and is_short_alone):
                return
            self._keeps_freed = keeps
            if self._allocator.keep_freed is not None:
                self._allocator.keep_freed(any(each._keeps_freed for each in _returners))

    @property
    def left_alone(self) -> str:  # type: ignore[override]
        return "" if self.is_on else self._allocator.left_alone

    @property
    def description(self) -> str:
        if self._mode == "never":
            return "never"
        if not self.is_on or self._failure is not None:
            return f"off: {self._failure if self.is_on else self._allocator.left_alone}"
        return self._mode if self._trouble is None else f"{self._mode}; not now: {self._trouble}"

    @property
    def is_on(self) -> bool:
        """What the user asks for, "always" or a limit, wins over the environment; the default does not."""
        if self._mode == "never" or self._allocator.release is None:
            return False
        return not self._allocator.left_alone or self._mode == "always" or self._limit_bytes is not None

    def start(self) -> None:
        """Begin to look, unless it does. Raises OSError: no more threads can be started."""
        if self.is_on and self._thread is None:
            self._thread = start_thread(self._run, "tierstore-memory", nice=0)  # lack of memory does not wait

    def request_stop(self) -> None:
        self._stopped.set()

    def stop(self, deadline_seconds: float) -> None:
        """End the thread and wait for it. Idempotent."""
        self._stopped.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(deadline_seconds)
            self._thread = None  # dropped here: its end runs Python code, which must not run where a store dies

    def _free_bytes(self, resident_bytes: int, mapped_bytes: int) -> int | None:
        if self._allocator.measure is None:
            return None
        heap = self._allocator.measure()
        return max(0, min(heap.free_bytes, resident_bytes - heap.used_bytes - mapped_bytes))

    def _run(self) -> None:
        pause, was_busy_at = 0.0, -math.inf
        try:
            while not self._stopped.wait(pause):
                if self._is_busy() or self._limit_bytes is not None:
                    was_busy_at = time.monotonic()
                self._is_in_use = time.monotonic() - was_busy_at <= _IDLE_AFTER_SECONDS
                self._tell_allocator()
                pause = self._look() if self._is_in_use else _IDLE_SECONDS
        except BaseException as error:  # noqa: BLE001 - told by `why_memory_stays`, on the thread that trains
            self._failure = f"its thread ended with {error!r}"
        finally:
            self._is_in_use = False
            self.limit(None)

    def _look(self) -> float:
        """Return memory if that is due; gives the seconds until the next look."""
        try:
            resident = resident_bytes()
            room = self._room_at(resident)
            if self._policy.is_due(time.monotonic(), resident, room):
                self._return(resident)
                room = self._room_at(resident_bytes(), at_most_seconds=0.0)
        except OSError as error:
            self._trouble = f"the memory in use cannot be read ({error})"
            return _IDLE_SECONDS
        self._trouble = None
        return self._policy.seconds_to_next_look(room)

    def _room_at(self, resident: int, at_most_seconds: float = _ROOM_LASTS_SECONDS) -> Room:
        now = time.monotonic()
        if self._room is None or now - self._room[0] >= at_most_seconds:
            self._room = now, resident, find_room()
        _, resident_then, room = self._room
        room = room._replace(left_bytes=max(room.left_bytes - (resident - resident_then), 0))
        limit = self._limit_bytes
        return room if limit is None else tightest([room, Room(limit, max(limit - resident, 0))])

    def _return(self, decided_at_bytes: int) -> None:
        with _one_at_a_time:
            before, began = resident_bytes(), time.monotonic()
            if before < decided_at_bytes:  # another store's thread has done it meanwhile
                self._policy.returned(began, 0.0, before)
                return
            if self._allocator.release is not None:
                self._allocator.release()
            if self._allocator.prefer_huge_pages is not None:
                with _telling:
                    is_limited = any(each._limit_bytes is not None for each in _returners)
                self._allocator.prefer_huge_pages(not is_limited)
            ended, after = time.monotonic(), resident_bytes()
        self.num_returns += 1
        self.returned_bytes += max(before - after, 0)
        self.return_seconds += ended - began
        self._policy.returned(ended, ended - began, after)


def _in_child() -> None:
    """A fork may come while the thread of a store holds a lock, and there is no such thread in the child, whose
    allocator returns by itself what is free, as before."""
    global _one_at_a_time, _telling, _returners
    of_parent, _returners = list(_returners), WeakSet()
    _one_at_a_time, _telling = threading.Lock(), threading.RLock()
    for each in of_parent:
        if each._keeps_freed and each._allocator.keep_freed is not None:
            each._allocator.keep_freed(False)


os.register_at_fork(after_in_child=_in_child)
