"""The way down: which records leave memory, and when. From where autograd left the bytes to the host, and to disk.

`examine` finds the pending records that are ours alone. `admit` gives each a place in the host window or sends it out
at once. `_spill` makes room by sending out what is needed last. The end of a write is in `ledger.py`.

The caller holds the store's lock; nothing here waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic

from ..disk.tier import Stored
from ..errors import StoreFullError
from .books import Books
from .by_hand import ByHand
from .device import DeviceRules
from .eviction import EvictionOrder as Eviction
from .lookahead import Lookahead
from .memory import Memory, Submissions
from .observer import Observer
from .plan import Place
from .record import R
from .state import State
from .windows import Window


class Down(Generic[R]):
    """The state that all rules share, and the way down.

    Attributes:
        observer: is told of every event; does nothing unless a trace is recorded.
        blocked: records that are ours, and for which there is no room; packs wait until it is empty.
        ahead: lookahead of the backward that asked last; None: none has.
        by_hand: records that were named to `TierStore.prefetch`.
        num_spills, num_restores, num_discards: jobs of the engine, queued or running, also of records that are gone.
        disk_is_full: a write found no room, and nothing was freed on disk since.
        disk_error: the disk tier's latest error for lack of room; None: it never was full.
        spill_error: the error of a failed write, which the next pack raises; None: it was raised, or no write failed.
        uses_staging, may_wait: of the pack that `is_short_of` was last asked about; see there.
    """

    def __init__(self, books: Books[R], memory: Memory[R], device: DeviceRules[R], engine: Submissions[R]) -> None:
        self.windows = books.windows
        self.pending = books.pending
        self.noted = books.noted
        self.counters = books.counters
        self.device = device
        self.observer = Observer()
        self.blocked: deque[R] = deque()
        self.ahead: Lookahead[R] | None = None
        self.by_hand = ByHand[R]()
        self.disk_bytes = 0
        self.disk_bytes_peak = 0
        self.num_spills = 0
        self.num_restores = 0
        self.num_discards = 0
        self.disk_is_full = False
        self.disk_error: StoreFullError | None = None
        self.spill_error: Exception | None = None
        self.uses_staging = self.may_wait = False
        self.is_closed = False
        self._books = books
        self._memory = memory
        self._pages = memory.pages
        self._engine = engine
        self._jobs: set[R] = set()  # records that a running job of the engine works on
        self.eviction = Eviction[R]()
        self._parked: dict[int, R] = {}  # in HOST, but charged to staging: they were on their way out

    @property
    def num_jobs(self) -> int:
        return self.num_spills + self.num_restores + self.num_discards

    # --- before anything leaves ---------------------------------------------------------------------------------

    def is_short_of(self, nbytes: int) -> bool:
        """Whether a pack of `nbytes` has something to do first: make room, move a record out, or raise an error.

        If not, `uses_staging` tells whether it takes room of staging: see NOTE [Small tensors] in `windows.py`; and
        `may_wait`, whether it may stay noted until a group is full, so that the plan sends it away a little later.
        """
        windows, pending, noted_bytes = self.windows, self.pending, self.noted.num_bytes
        self.uses_staging = False
        self.may_wait = nbytes <= windows.member_bytes and noted_bytes + nbytes <= windows.group_bytes
        if pending.must_be_examined or self.blocked or self.spill_error is not None:
            return True  # as `must_examine`, without its call
        limit_bytes = windows.host.limit_bytes
        held_bytes = windows.host.used_bytes + pending.num_bytes + noted_bytes - windows.noted_bytes
        if held_bytes + self._pages.cached_bytes + nbytes <= limit_bytes:
            return False
        # What others hold would free nothing if it were looked at again now.
        self.uses_staging = held_bytes - pending.shared_bytes <= limit_bytes and windows.may_stay_noted(nbytes)
        self.may_wait |= self.uses_staging
        return not self.uses_staging

    def must_examine(self) -> bool:
        """Whether a pack has something to do first, even if it needs no room."""
        return bool(self.pending.must_be_examined or self.blocked or self.spill_error is not None)

    def charge_noted(self, nbytes: int) -> None:
        windows = self.windows
        is_first = not windows.noted_bytes
        windows.noted_bytes += nbytes
        windows.staging.used_bytes += nbytes
        if is_first:
            self._memory.trim()  # for all that follow: `HostWindows.free_bytes`

    def relieve(self, how_many: int | None, *, is_planned: bool = False) -> None:
        """Admit what is ours, if not everything that may be ours fits: NOTE [No sooner than needed] in `pending.py`.

        Examines `how_many` (None: all) of the records that others held at the last look again. `is_planned`: the plan
        may send something away even if there is room.
        """
        if is_planned or self.pending.must_be_examined or not self._fits_uncharged():
            self.examine(how_many)
            self._charge_rest()
        self._memory.trim()

    def _fits_uncharged(self, nbytes: int = 0) -> bool:
        """Whether host memory has room for what no window is charged with yet, and `nbytes` more."""
        windows, host = self.windows, self.windows.host
        uncharged_bytes = self.pending.num_bytes + self.noted.num_bytes - windows.noted_bytes
        return host.used_bytes + uncharged_bytes + nbytes <= host.limit_bytes

    def _charge_rest(self) -> None:
        """What could not be booked stays noted: in staging, if nothing waits for room there."""
        nbytes, windows = self.noted.num_bytes, self.windows
        if self.blocked or not 0 < nbytes <= windows.group_bytes // 2 or self._fits_uncharged():
            return
        if windows.staging.fits(nbytes + windows.excess_bytes):
            self.charge_noted(nbytes)

    def examine(self, how_many: int | None = None) -> None:
        """Admit the records that are ours alone now, among all fresh ones and `how_many` (None: all) shared ones."""
        if self.windows.noted_bytes:
            self.windows.keep_noted(0)
        self._memory.book_settled()
        for record in self.pending.take(how_many):
            if record.state is not State.PENDING:
                continue
            if self._memory.is_ours(record):
                self.admit(record)
            else:
                self.pending.share(record)

    @staticmethod
    def end_plan(records: Iterable[R | None]) -> None:
        """Backward begins: the records that have not left by now need not leave any more."""
        for record in records:
            if record is not None:
                record.place = None

    # --- into the windows ---------------------------------------------------------------------------------------

    def admit(self, record: R) -> None:
        """Charge a record whose bytes are ours, or let it wait for room in `blocked`."""
        if record.device is not None:
            self.device.hold(record)
            self._offload_surplus()
        elif not self._try_admit(record):
            self.blocked.append(record)

    def admit_blocked(self, *, is_awaited: bool) -> None:
        """Try again to find room for blocked records; `is_awaited`: a thread waits for that.

        Bytes that backward is about to ask for make room only for a waiting thread. Otherwise prefetched bytes would be
        dropped, read again at once, dropped again, and so on; and records whose writes backward has cancelled would be
        written before anything else is read.
        """
        while self.blocked:
            record = self.blocked[0]
            if record.state in (State.PENDING, State.DEVICE):
                if not self._memory.is_ours(record):
                    self._hand_back(record)
                elif not self._try_admit(record, takes_from_backward=is_awaited):
                    return
            self.blocked.popleft()
            self._offload_surplus()

    def _offload_surplus(self) -> None:
        while (record := self.device.window.surplus()) is not None and record not in self.blocked:
            if not self._try_admit(record):
                self.blocked.append(record)

    def _try_admit(self, record: R, *, takes_from_backward: bool = True) -> bool:
        """Find room in host memory; to make it, other records begin to move out. False: there is none yet."""
        order = self.eviction
        next_to_spill = order.next_dirty if takes_from_backward else order.next_unasked
        next_to_drop = order.next_clean if takes_from_backward else order.next_used
        nbytes, host, staging = record.nbytes, self.windows.host, self.windows.staging
        if not host.fits(nbytes):
            self.windows.grow_staging(nbytes)
        window = staging if nbytes > host.limit_bytes or self._goes_at_once(record) else host
        while not (self._may_move(nbytes) if window is staging else host.fits(nbytes)):
            if not (self._spill(next_to_spill()) or self._drop(next_to_drop())):
                return False
        if record.device is None:
            record.move(State.HOST)
            self.windows.charge(record, window)
        elif not self._offload(record, window):
            return False
        self.eviction.add_dirty(record)
        if window is staging:
            self._queue_spill(record)
        return True

    def _goes_at_once(self, record: R) -> bool:
        """Whether the plan sends it to disk, or host memory is full and it is needed later than anything there."""
        if not self._may_move(record.nbytes):
            return False
        if record.place is Place.DISK:
            return self.eviction.next_leaving() is None
        victim = None if self.windows.host.fits(record.nbytes) else self.eviction.next_dirty()
        return victim is not None and record.worth < victim.worth

    def _offload(self, record: R, window: Window) -> bool:
        """False: the record has just died, and will be released."""
        alive = record.keep_alive()
        if alive is None:
            return False
        self._memory.prepare_offload(record)
        self.windows.charge(record, window)
        self.device.offload(record)
        self.counters.offloaded_bytes += record.nbytes
        self.observer.offloaded(record.key, record.nbytes)
        return True

    def _hand_back(self, record: R) -> None:
        """Return a record to PENDING: somebody else holds its storage again, so its removal would free nothing."""
        self.eviction.remove(record)
        self._parked.pop(record.key, None)
        self.device.window.leave(record)
        self.windows.charge(record, None)
        if record.state is not State.PENDING:
            record.move(State.PENDING)
        self.pending.share(record)

    # --- from host memory to disk -------------------------------------------------------------------------------

    def send_ahead(self) -> None:
        """Begin to move out the records that the plan sends to disk, as far as staging has room."""
        while (record := self.eviction.next_leaving()) is not None and self.windows.staging.fits(record.nbytes):
            if not self._spill(record):
                return

    def _spill(self, victim: R | None) -> bool:
        """Begin to move the victim out, or make another step towards that; False: nothing can be done now."""
        if victim is None or victim.demanded or self.disk_is_full or self.is_closed:
            return False
        if not self._memory.is_ours(victim):
            self._hand_back(victim)
        elif victim.window is self.windows.staging or self._may_move(victim.nbytes, from_host=True):
            self._queue_spill(victim)
        elif self._parked and not self.num_spills:
            self._queue_spill(next(iter(self._parked.values())))  # parked records hold the staging the victim needs
        else:
            return False
        return True

    def _may_move(self, nbytes: int, *, from_host: bool = False) -> bool:
        return not self.disk_is_full and self.windows.admits_move(nbytes, from_host=from_host)

    def _queue_spill(self, record: R) -> None:
        self._parked.pop(record.key, None)
        self.eviction.remove(record)
        self.windows.charge(record, self.windows.staging)
        record.move(State.QUEUED)
        self.num_spills += 1
        self.observer.spill_queued(record.key, record.nbytes)
        self._engine.submit_spill(record)

    def cancel_spill(self, record: R) -> None:
        """Take a QUEUED record that is asked for off the queue of writes; it becomes the last to leave."""
        self.num_spills -= 1
        self._stay(record)
        self.observer.spill_cancelled(record.key, record.nbytes)
        self.eviction.add_asked(record)

    @property
    def unwritten_bytes(self) -> int:
        """Bytes of records that stay in staging: they could not be written, or were asked for in time."""
        return sum(record.nbytes for record in self._parked.values())

    def retry_unwritten(self) -> None:
        for record in list(self._parked.values()):
            self._queue_spill(record)

    def _stay(self, record: R) -> None:
        """Keep a record that was on its way out: in the host window if it fits, else in its room in staging."""
        record.move(State.HOST)
        if self.windows.host.fits(record.nbytes):
            self.windows.charge(record, self.windows.host)
        else:
            self._parked[record.key] = record

    def _drop(self, record: R | None, *, is_for_read: bool = False) -> bool:
        """Free the memory of a record whose bytes are on disk too. False: `record` is None.

        `is_for_read`: it makes way for a read. Then a record that was prefetched by hand is prefetched again.
        """
        if record is None:
            return False
        self.eviction.remove(record)
        if self.ahead is not None:
            self.ahead.come_back_for(record)
        if is_for_read:
            self.by_hand.come_back_for(record)
        else:
            self.by_hand.forget_fetched(record)
        record.nbytes = record.span_bytes
        record.fetched = record.wanted = False
        self.device.unload(record)
        self._memory.let_go(record)
        self._free_memory(record)
        self._memory.take_back()  # so that the next user of this room gets these very pages
        record.move(State.DISK)
        self.observer.freed(record.key, record.nbytes)
        return True

    def _free_memory(self, record: R) -> None:
        self._parked.pop(record.key, None)
        self.windows.charge(record, None)
        self._memory.free(record)

    def _note_written(self, record: R, stored: Stored) -> None:
        record.stored_bytes = stored.stored_bytes
        self.disk_bytes += stored.stored_bytes
        self.disk_bytes_peak = max(self.disk_bytes_peak, self.disk_bytes)
        self.counters.spilled_bytes += record.span_bytes
        self.counters.written_bytes += stored.stored_bytes
