"""The way down: which records leave memory, and when. From where autograd left the bytes to the host, and to disk.

`scan_pending` finds the pending records of which the store is the sole owner. `admit` gives each a place in the host
window or sends it out at once. `_spill` makes room by sending out what is needed last: it enters a write. The end of a
write is in `ledger.py`.

The caller holds the store's lock; nothing here waits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic

from ..disk.tier import Stored
from .books import Books
from .device import DeviceRules
from .memory import Memory
from .plan import PlannedTier
from .record import R
from .state import State
from .windows import Window


class Down(Generic[R]):
    """Decides what leaves, and changes the books accordingly."""

    def __init__(self, books: Books[R], memory: Memory[R], device: DeviceRules[R]) -> None:
        self._books = books
        self._windows = books.windows
        self._pending = books.pending
        self._tracked = books.tracked
        self._blocked = books.blocked
        self._eviction = books.eviction
        self._unspilled = books.unspilled
        self._jobs = books.jobs
        self._device = device
        self._memory = memory
        self._pages = memory.pages

    # --- before anything leaves ---------------------------------------------------------------------------------

    def room_for(self, nbytes: int) -> tuple[bool, bool, bool, int]:
        """(is_short, uses_staging, may_wait, room_bytes): a plain tuple, as each pack asks, and a class costs a call.

        `is_short`: a pack of `nbytes` has something to do first: make room, move a record out, or raise an error. If
        not, `uses_staging` tells whether it takes room of staging: see NOTE [Small tensors] in `windows.py`; and
        `room_bytes`, how much room is left then, where it takes none of staging. `may_wait`: it may stay tracked until
        a group is full, so that the plan sends it away a little later."""
        windows, pending, tracked_bytes = self._windows, self._pending, self._tracked.num_bytes
        may_wait = nbytes <= windows.member_bytes and tracked_bytes + nbytes <= windows.group_bytes
        if pending.must_be_scanned or self._blocked or self._books.spill_error is not None:
            return True, False, may_wait, 0  # as `Books.must_act`, without its call
        limit_bytes = windows.host.limit_bytes
        held_bytes = windows.host.used_bytes + pending.num_bytes + tracked_bytes - windows.tracked_bytes
        held_bytes += self._tracked.granted_bytes
        room_bytes = limit_bytes - held_bytes - self._pages.cached_bytes - nbytes
        if room_bytes >= 0:
            return False, False, may_wait, room_bytes
        # What others hold would free nothing if it were looked at again now.
        uses_staging = held_bytes - pending.shared_bytes <= limit_bytes and windows.may_stay_tracked(nbytes)
        return not uses_staging, uses_staging, may_wait or uses_staging, 0

    def charge_tracked(self, nbytes: int) -> None:
        windows = self._windows
        is_first = not windows.tracked_bytes
        windows.tracked_bytes += nbytes
        windows.staging.used_bytes += nbytes
        if is_first:
            self._memory.trim()  # for all that follow: `HostWindows.free_bytes`

    def reclaim(self, how_many: int | None, *, is_planned: bool = False) -> None:
        """Admit what is solely owned, if not everything that may be solely owned fits: NOTE [No sooner than needed] in
        `books.py`. First what has a record. What is tracked only if that does not do: its small ones wait for others.

        Scans `how_many` (None: all) of the records that others held at the last look again. `is_planned`: the plan
        sends away what is tracked even if there is room."""
        if self._pending.must_be_scanned or not self.fits_uncharged():
            self._admit_pending(how_many)
        if self._tracked.num_bytes and (
            is_planned or self._blocked or not (self.fits_uncharged() or self._fits_in_staging())
        ):
            self.scan_pending(0)
            self._charge_rest()
        self._memory.trim()

    def fits_uncharged(self, nbytes: int = 0) -> bool:
        """Whether host memory has room for what no window is charged with yet, and `nbytes` more."""
        windows, host = self._windows, self._windows.host
        uncharged_bytes = self._pending.num_bytes + self._tracked.num_bytes - windows.tracked_bytes
        uncharged_bytes += self._tracked.granted_bytes
        return host.used_bytes + uncharged_bytes + nbytes <= host.limit_bytes

    def _fits_in_staging(self) -> bool:
        """Charge staging for the small tensors that took room of host until now, if it has room for them."""
        nbytes = self._tracked.num_bytes - self._windows.tracked_bytes
        if nbytes <= 0 or not self._windows.may_stay_tracked(nbytes):
            return False
        self.charge_tracked(nbytes)
        return self.fits_uncharged()

    def _charge_rest(self) -> None:
        """What could not be registered stays tracked: in staging, if nothing waits for room there."""
        nbytes, windows = self._tracked.num_bytes, self._windows
        if self._blocked or not 0 < nbytes <= windows.group_bytes // 2 or self.fits_uncharged():
            return
        if windows.staging.fits(nbytes + windows.excess_bytes):
            self.charge_tracked(nbytes)

    def scan_pending(self, how_many: int | None = None) -> None:
        """Admit the solely owned records, among all fresh ones and `how_many` (None: all) shared ones."""
        if self._windows.tracked_bytes:
            self._windows.keep_tracked(0)
        if self._tracked.num_bytes:
            self._memory.register_settled()
        self._admit_pending(how_many)

    def _admit_pending(self, how_many: int | None) -> None:
        for record in self._pending.take(how_many):
            if record.state is not State.PENDING:
                continue
            if self._memory.has_sole_owner(record):
                self.admit(record)
            else:
                self._pending.share(record)

    @staticmethod
    def end_plan(records: Iterable[R | None]) -> None:
        """Backward begins: the records that have not left by now need not leave any more."""
        for record in records:
            if record is not None:
                record.planned = None

    # --- into the windows ---------------------------------------------------------------------------------------

    def admit(self, record: R) -> None:
        """Charge a record of which the store is the sole owner, or let it wait for room in `blocked`."""
        if record.device is not None:
            self._device.hold(record)
            self._offload_surplus()
        elif not self._try_admit(record):
            self._blocked.append(record)

    def admit_blocked(self, *, is_awaited: bool) -> None:
        """Try again to find room for blocked records; `is_awaited`: a thread waits for that.

        Bytes that backward is about to ask for make room only for a waiting thread. Otherwise prefetched bytes would be
        dropped, read again at once, dropped again, and so on; and records whose writes backward has cancelled would be
        written before anything else is read."""
        while self._blocked:
            record = self._blocked[0]
            if record.state in (State.PENDING, State.DEVICE):
                if not self._memory.has_sole_owner(record):
                    self.hand_back(record)
                elif not self._try_admit(record, takes_from_backward=is_awaited):
                    return
            self._blocked.popleft()
            self._offload_surplus()

    def _offload_surplus(self) -> None:
        while (record := self._device.window.surplus()) is not None and record not in self._blocked:
            if not self._try_admit(record):
                self._blocked.append(record)

    def _try_admit(self, record: R, *, takes_from_backward: bool = True) -> bool:
        """Find room in host memory; to make it, other records begin to move out. False: there is none yet."""
        order = self._eviction
        next_to_drop = order.next_clean if takes_from_backward else order.next_used
        nbytes, host, staging = record.nbytes, self._windows.host, self._windows.staging
        if host.used_bytes + nbytes > host.limit_bytes:
            self._windows.grow_staging(nbytes)
        goes_at_once = nbytes <= host.limit_bytes and self._goes_at_once(record)
        window = staging if goes_at_once or nbytes > host.limit_bytes else host
        while not goes_at_once:
            if window is host:
                has_room = host.used_bytes + nbytes <= host.limit_bytes  # as `host.fits`, without its calls
            else:
                has_room = not self._books.disk_is_full and self._windows.admits_move(nbytes)
            if has_room:
                break
            if not (self._spill(order.next_dirty(may_be_asked=takes_from_backward)) or self.drop(next_to_drop())):
                return False
        if record.device is None:
            record.move(State.HOST)
            self._windows.charge(record, window)
        elif not self._offload(record, window):
            return False
        if window is staging:
            self._queue_spill(record)
        else:
            self._eviction.add_dirty(record)
        return True

    def _goes_at_once(self, record: R) -> bool:
        """Whether the plan sends it to disk, or host memory is full and it is needed later than anything there."""
        host = self._windows.host
        if record.planned is PlannedTier.DISK:
            goes_first = self._eviction.next_leaving() is None
        elif host.used_bytes + record.nbytes <= host.limit_bytes:
            goes_first = False
        else:
            victim = self._eviction.next_dirty()
            goes_first = victim is not None and record.priority < victim.priority
        return goes_first and not self._books.disk_is_full and self._windows.admits_move(record.nbytes)

    def _offload(self, record: R, window: Window) -> bool:
        """False: the record has just died, and will be released."""
        alive = record()  # kept until the end: garbage collection may let go of a graph at any moment
        if alive is None:
            return False
        self._memory.prepare_offload(record)
        self._windows.charge(record, window)
        self._device.offload(record)
        self._books.counters.offloaded_bytes += record.nbytes
        if (observer := self._books.observer) is not None:
            observer.offloaded(record.key, record.nbytes)
        return True

    def hand_back(self, record: R) -> None:
        """Return a record to PENDING: somebody else holds its storage again, so its removal would free nothing."""
        self._eviction.remove(record)
        self._unspilled.pop(record.key, None)
        self._device.window.leave(record)
        self._windows.charge(record, None)
        if record.state is not State.PENDING:
            record.move(State.PENDING)
        self._pending.share(record)

    # --- from host memory to disk -------------------------------------------------------------------------------

    def write_behind(self) -> None:
        """Begin to move out the records that the plan sends to disk, as far as staging has room."""
        while (record := self._eviction.next_leaving()) is not None and self._windows.staging.fits(record.nbytes):
            if not self._spill(record):
                return

    def _spill(self, victim: R | None) -> bool:
        """Begin to move the victim out, or make another step towards that; False: nothing can be done now."""
        if victim is None or victim.demanded or self._books.disk_is_full or self._books.is_closed:
            return False
        if not self._memory.has_sole_owner(victim):
            self.hand_back(victim)
            return True
        if victim.window is not self._windows.staging and not self._windows.admits_move(victim.nbytes, from_host=True):
            if not self._unspilled or self._jobs.num_writes:
                return False
            victim = next(iter(self._unspilled.values()))  # these hold the staging that the victim needs
        self._eviction.remove(victim)
        self._queue_spill(victim)
        return True

    def _queue_spill(self, record: R) -> None:
        """The caller has removed it from the eviction order, if it was there."""
        if self._unspilled:
            self._unspilled.pop(record.key, None)
        if record.window is not self._windows.staging:
            self._windows.charge(record, self._windows.staging)
        record.move(State.QUEUED)
        self._jobs.write(record)
        if (observer := self._books.observer) is not None:
            observer.spill_queued(record.key, record.nbytes)

    def cancel_spill(self, record: R) -> None:
        """Take a QUEUED record that is asked for off the queue of writes; it becomes the last to leave."""
        self._jobs.withdraw_write(record)
        self.stay(record)
        if (observer := self._books.observer) is not None:
            observer.spill_cancelled(record.key, record.nbytes)
        self._eviction.add_asked(record)

    @property
    def unwritten_bytes(self) -> int:
        """Bytes of records that stay in staging: they could not be written, or were asked for in time."""
        return sum(record.nbytes for record in self._unspilled.values())

    def retry_unwritten(self) -> None:
        for record in list(self._unspilled.values()):
            self._eviction.remove(record)
            self._queue_spill(record)

    def stay(self, record: R) -> None:
        """Keep a record that was on its way out: in the host window if it fits, else in its room in staging."""
        record.move(State.HOST)
        if self._windows.host.fits(record.nbytes):
            self._windows.charge(record, self._windows.host)
        else:
            self._unspilled[record.key] = record

    def drop(self, record: R | None, *, is_for_read: bool = False) -> bool:
        """Free the memory of a record whose bytes are on disk too. False: `record` is None.

        `is_for_read`: it makes way for a read. Then a record that was prefetched explicitly is prefetched again."""
        if record is None:
            return False
        self._eviction.remove(record)
        if self._books.ahead is not None:
            self._books.ahead.come_back_for(record)
        if self._books.explicit_prefetch.is_used:
            if is_for_read:
                self._books.explicit_prefetch.come_back_for(record)
            else:
                self._books.explicit_prefetch.remove_fetched(record)
        record.nbytes = record.span_bytes
        record.fetched = record.wanted = False
        if record.device is not None:
            self._device.unload(record)
        self._memory.empty_tensors(record)
        self.free_memory(record)
        self._memory.take_back()  # so that the next user of this room gets these very pages
        record.move(State.DISK)
        if (observer := self._books.observer) is not None:
            observer.freed(record.key, record.nbytes)
        return True

    def free_memory(self, record: R) -> None:
        if self._unspilled:
            self._unspilled.pop(record.key, None)
        if record.window is not None:
            self._windows.charge(record, None)
        if record.slot is not None:
            self._memory.free(record)

    def note_written(self, record: R, stored: Stored) -> None:
        books = self._books
        record.stored_bytes = stored.stored_bytes
        books.disk_bytes += stored.stored_bytes
        books.disk_bytes_peak = max(books.disk_bytes_peak, books.disk_bytes)
        books.counters.spilled_bytes += record.span_bytes
        books.counters.written_bytes += stored.stored_bytes
