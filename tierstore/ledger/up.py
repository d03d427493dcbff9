"""The way up: from disk to host memory, and from there to the device, on demand and ahead of it.

The caller holds the store's lock; nothing here waits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic

from ..base.interrupts import is_interrupt
from ..base.system_words import words_of
from ..errors import StorageIOError
from .books import Books
from .device import DeviceRules
from .down import Down
from .explicit_prefetch import ExplicitPrefetch
from .lookahead import Lookahead
from .memory import Memory
from .record import R
from .state import State

_IN_HOST_MEMORY = frozenset({State.OFFLOADING, State.HOST, State.WRITING, State.CLEAN})


class Up(Generic[R]):
    """The way up, which needs the way down to make room."""

    def __init__(self, books: Books[R], memory: Memory[R], device: DeviceRules[R], down: Down[R]) -> None:
        self._books = books
        self._windows = books.windows
        self._eviction = books.eviction
        self._explicit = books.explicit_prefetch
        self._jobs = books.jobs
        self._device = device
        self._memory = memory
        self._pages = memory.pages
        self._down = down

    # --- from disk to host memory -------------------------------------------------------------------------------

    def start_restore(self, record: R, *, demanded: bool, is_far: bool = True) -> bool:
        """Give the record a slot and queue its read; False: there is no room, and it is not demanded.

        `is_far`: it may take room of the host window too, not only of staging.

        Raises:
            StorageIOError: the system has no memory for a demanded record, which stays on disk.
        """
        windows = self._windows
        may_scan = self._books.tracked.num_bytes or self._books.pending.num_bytes
        if windows.tracked_bytes or (may_scan and not self._down.fits_uncharged(record.nbytes)):
            self._down.scan_pending(0)
        window = windows.window_for_prefetch(record.nbytes, is_far=is_far)
        if not demanded and (
            window is None or (self._pages.pinned_for is not None and not self._memory.has_room_for_read(record))
        ):
            return False  # what is freed next may give it room in one piece
        if window is None:
            while (window := windows.window_for_prefetch(record.nbytes)) is None:
                if not self._down.drop(self._eviction.next_clean(), is_for_read=True):
                    break
            window = window or windows.staging  # overdrawn, by one tensor for each thread that waits
        try:
            self._memory.prepare_read(record)
        except OSError as error:
            if is_interrupt(error):  # a time limit's TimeoutError is an OSError too
                raise
            if not demanded:
                return False
            place = f"{record.nbytes} bytes of host memory"
            raise StorageIOError("read", place, words_of(error), "the record is on disk") from error
        windows.charge(record, window)
        if self._pages.cached_bytes:
            self._memory.trim(is_for_read=True)
        record.move(State.READING)
        record.urgent = demanded
        self._jobs.read(record, demanded=demanded)
        if (observer := self._books.observer) is not None:
            observer.restore_queued(record.key, record.nbytes, demanded=demanded)
        return True

    def raise_priority(self, record: R) -> None:
        """Begin what brings a record to memory that a thread waits for, or let it overtake others."""
        if record.state is State.DISK:
            self.start_restore(record, demanded=True)
        elif record.state is State.READING and not record.urgent:
            record.urgent = True
            self._jobs.demand(record)  # overtakes what nobody waits for yet

    def name(self, records: Iterable[R]) -> None:
        for record in records:
            is_known = record.key in self._books.records  # else its handle is gone
            if is_known and (record.state is State.DISK or not self._explicit.has_fetched(record)):
                self._explicit.name(record)

    def prefetch(self, ahead: Lookahead[R] | ExplicitPrefetch[R]) -> None:
        """Restore what lies ahead, and keep what is on its way out, as far as there is room for it."""
        while (record := ahead.peek()) is not None:
            fetched_bytes = record.nbytes
            if record.state is State.DISK:
                while not self.start_restore(record, demanded=False, is_far=ahead.depth.is_far):
                    if not self._make_way(ahead):
                        return
                if isinstance(ahead, Lookahead):
                    ahead.depth.read_began(record.key)
            elif record.state is State.QUEUED:
                self._down.cancel_spill(record)
                self._books.counters.forwarded_bytes += record.nbytes
            elif record.state is State.WRITING:
                record.wanted = True
            else:
                fetched_bytes = 0
                if isinstance(ahead, ExplicitPrefetch):
                    self._eviction.want_again(record)
            ahead.advance(fetched_bytes)

    def _make_way(self, ahead: Lookahead[R] | ExplicitPrefetch[R]) -> bool:
        """Drop a record that was asked for already, to make room for what lies ahead; False: there is none.

        For backward, a record that was prefetched explicitly may also go, if nothing else can."""
        if isinstance(ahead, ExplicitPrefetch):
            return self._down.drop(self._eviction.first_used(self._is_free_of_backward), is_for_read=True)
        used = self._eviction.next_used()
        if used is None or ahead.needs_first(used):
            used = self._explicit.last_fetched(self._eviction.is_clean) if self._explicit.is_used else None
            if used is None:
                return False
        return (ahead.depth.is_far or used.window is self._windows.staging) and self._down.drop(used, is_for_read=True)

    def _is_free_of_backward(self, record: R) -> bool:
        return self._books.ahead is None or not self._books.ahead.needs_first(record)

    # --- from host memory to the device -------------------------------------------------------------------------

    def reload_demanded(self, record: R, ahead: Lookahead[R] | None = None) -> bool:
        """Copy a record's bytes, which are in host memory, to its device now.

        `ahead`: tells which other copies backward needs soon.
        If the device has no room, all its other copies are dropped, and the copy is tried once more. The error of that
        is raised; the bytes are still in host memory. For a group, False is returned instead."""
        if record.key in self._device.too_large:
            return False
        if self._reload(record, ahead):
            return True
        self._device.make_room()
        if self._reload(record, ahead, must=record.num_members == 1):
            return True
        self._device.too_large.add(record.key)  # each try would empty the allocator's cache
        return False

    def _reload(self, record: R, ahead: Lookahead[R] | None, *, must: bool = False) -> bool:
        alive = record()  # as in `Down._offload`
        if alive is None or record.device is None or record.slot is None or record.has_device_bytes:
            return True
        if not self._device.reload(record, must=must, next_rank=None if ahead is None else ahead.next_rank):
            return False
        self._books.counters.reloaded_bytes += record.nbytes
        if (observer := self._books.observer) is not None:
            observer.reloaded(record.key, record.nbytes)
        return True

    def reload_ahead(self, ahead: Lookahead[R]) -> None:
        """Copy what lies ahead to the device, as far as its bytes are in host memory and there is room.

        Stops for good once the device has refused: each try would empty the allocator's cache, and wait for the device.
        """
        while (record := ahead.peek()) is not None:
            fetched_bytes = 0
            if record.device is not None and not record.has_device_bytes and record() is not None:
                if record.state not in _IN_HOST_MEMORY:
                    return
                if not self._device.has_room_to_reload(record.nbytes, ahead.needs_first):
                    return
                if not self._reload(record, ahead):
                    ahead.give_up()
                    return
                fetched_bytes = record.nbytes
            ahead.advance(fetched_bytes)

    def used(self, record: R) -> None:
        if record.state is State.CLEAN and not record.demanded:
            ahead = self._books.ahead
            is_wanted_again = record.num_members > 1 and ahead is not None and ahead.is_behind(record)  # another member
            if is_wanted_again:
                self._eviction.add_next(record)
            else:
                self._eviction.use(record)
