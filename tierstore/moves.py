"""Every move of a record between states. The caller holds the store's lock; nothing here waits.

The way down: `examine` finds the `pending` records that are ours alone. `admit` gives each a place in the host budget
or sends it out at once. `_spill` makes room by sending out what is needed last. `spilled` ends a write.
The way up: `start_restore`, `restored`. The end: `_release` when a handle has died, `end_all` when the store is closed.

NOTE [Who owns the bytes]
A saved CPU tensor is not copied: its record keeps a detached alias (`source`). Restored bytes lie in a slot of the
slab, and the alias is pointed at them (`source.data = ...`). So one tensor serves a record for its whole life: it
refers to the bytes, wherever they are, and shares its version counter with the saved tensor and with every tensor that
was handed out. `source._version != version` is autograd's own test for in-place changes.
When the bytes leave memory, the alias is pointed at an empty storage. A tensor over the slot that was handed out may
still be in use then: the slot is *lent* until the storage over it dies.
Device memory of an accelerator is handled likewise; the slot then holds a copy that nobody else ever sees.

A handle that dies takes its alias along, and its record goes into the queue `released`. When the storage over a slot
dies, the slot goes into a queue of `slots.py`; when a log dies, its remains go into a queue of `noted.py`. `drain`
does the rest at the start of every call: see NOTE [No finalizers] in `remains.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from .booking import Booking
from .by_hand import ByHand
from .copies import AcceleratorCopies, Copies
from .device import DeviceTier
from .disk.tier import Loaded, Stored
from .errors import CorruptDataError, StorageIOError, StoreFullError
from .eviction import EvictionOrder
from .handle import Record, State
from .host import HostBooks, Window
from .interrupts import is_interrupt
from .layout import in_dtype, span_of, storage_address
from .lent import LentViews
from .lookahead import Lookahead
from .ownership import claim, is_sole_owner, unclaim
from .pending import Pending
from .plan import Place
from .slab import Slot
from .slots import Slots
from .stats import Counters
from .tracing.observer import Observer

if TYPE_CHECKING:
    from .noted import NotedLog
    from .transfers import Submissions

__all__ = ["Moves"]

_PAGE_BYTES = 4096
_BLOCK_BYTES = 512
"""Alignment of blocks in the allocators of accelerators (torch's for CUDA). A tensor comes back at the same address
modulo this: alignment takes part in the choice of a kernel, and so in the order of its additions."""
_IN_HOST_MEMORY = frozenset({State.OFFLOADING, State.HOST, State.WRITING, State.CLEAN})


class _Memory(NamedTuple):
    """Memory of torch that a write reads, and its address and size when the write began."""

    storage: torch.UntypedStorage
    address: int
    nbytes: int


class Moves:
    """The records of one store, where their bytes are, and which window is charged with them.

    Args:
        host_bytes, staging_bytes: the limits of the two windows of host memory.
        staging_grows: see NOTE [Large tensors] in `host.py`.
        copies: the copy engine for accelerators.

    Attributes:
        engine: executes the jobs queued here. Set once, after construction.
        books: the windows of host memory and their charges. (`books` of a store is its `Residency`.)
        slots: memory for restored bytes, and for copies from accelerators.
        devices: records with bytes on accelerators.
        lent_views: tensors that were handed out and are still in use after their record's bytes have left memory.
        counters: totals since the store was opened.
        disk_bytes, disk_bytes_peak: bytes taken on disk, now and at most so far.
        released: records whose handle is gone; `drain` accounts for them.
        booking, pending, noted: records and saved tensors before they are charged.
        observer: is told of every event; does nothing unless a trace is recorded.
        ahead: lookahead of the backward that asked last; None: none has.
        by_hand: records that were named to `TierStore.prefetch`.
        blocked: records that are ours, and for which there is no room; packs wait until it is empty.
        num_spills, num_restores, num_discards: jobs of the engine, queued or running.
        disk_is_full: a write found no room, and nothing was freed on disk since.
        full_error: the disk tier's latest error for lack of room; None: it never was full.
        spill_error: the error of a failed write, which the next pack raises; None: it was raised, or no write failed.
        uses_staging: whether the pack that `is_short_of` was last asked about takes room of staging.
        is_closed, is_abandoned: nothing can be stored any more; the latter in a forked child.
    """

    def __init__(
        self, *, host_bytes: int, staging_bytes: int, staging_grows: bool = False, copies: Copies | None = None
    ) -> None:
        self.engine: Submissions
        self.books = HostBooks(host_bytes, staging_bytes, grows=staging_grows)
        self.slots = Slots(self.books, host_bytes + staging_bytes, self.uncharged_bytes)
        self.lent_views = LentViews()
        self.devices = DeviceTier(copies or AcceleratorCopies(), lent_views=self.lent_views)
        self.counters = Counters()
        self.disk_bytes = 0
        self.disk_bytes_peak = 0
        self.released: deque[Record] = deque()
        self.pending = Pending[Record](is_sole_owner)
        self.booking = Booking(self.pending, self.counters, self.lent_views, self.books)
        self.noted = self.booking.noted
        self.observer = Observer()
        self.ahead: Lookahead[Record] | None = None
        self.by_hand = ByHand[Record]()
        self.blocked: deque[Record] = deque()
        self.num_spills = 0  # includes jobs whose handle is gone
        self.num_restores = 0
        self.num_discards = 0
        self.disk_is_full = False
        self.full_error: StoreFullError | None = None
        self.spill_error: Exception | None = None
        self.uses_staging = False
        self.is_closed = False
        self.is_abandoned = False
        self._records = self.booking.records
        self._jobs: set[Record] = set()  # records that a running job of the engine works on
        self._eviction = EvictionOrder[Record]()
        self._parked: dict[int, Record] = {}  # in HOST, but charged to staging: they were on their way out
        self._empty = torch.empty(0, dtype=torch.uint8, device="cpu")

    # --- the beginning ----------------------------------------------------------------------------------------

    def register(self, record: Record) -> None:
        """Take a new record, in state PENDING, into the books."""
        self._records[record.key] = record
        self.counters.packed_tensors += 1
        self.counters.packed_bytes += record.nbytes
        if record.device is not None:
            self.slots.slab.begin_to_pin(record.device)
            self.devices.note_stream(record)

    def is_short_of(self, nbytes: int) -> bool:
        """Whether a pack of `nbytes` has something to do first: make room, move a record out, or raise an error.

        If not, `uses_staging` tells whether it takes room of staging: see NOTE [Small tensors] in `host.py`.
        """
        self.uses_staging = False
        host, pending = self.books.host, self.pending
        if pending.must_be_examined or self.blocked or self.spill_error is not None:
            return True
        held_bytes = host.used_bytes + pending.num_bytes + self.noted.num_bytes - self.books.noted_bytes
        if held_bytes + self.slots.slab.cached_bytes + nbytes <= (host.limit_bytes or 0):
            return False
        self.uses_staging = held_bytes <= (host.limit_bytes or 0) and self.books.may_stay_noted(nbytes)
        return not self.uses_staging

    def charge_noted(self, nbytes: int) -> None:
        """Charge `nbytes` that were just noted to staging."""
        self.books.charge_noted(nbytes)
        self.slots.trim()

    def uncharged_bytes(self) -> int:
        """Bytes of pending and noted tensors that no window is charged with yet."""
        return self.pending.num_bytes + self.noted.num_bytes - self.books.noted_bytes

    def levels(self) -> tuple[int, ...]:
        """Bytes that each tier holds, in the order of `tracing.events.Levels`."""
        host_bytes, staging_bytes = self.books.used_bytes
        lent_bytes = self.books.lent.used_bytes
        uncharged_bytes = self.uncharged_bytes()
        return self.devices.held_bytes, uncharged_bytes, host_bytes, staging_bytes, lent_bytes, self.disk_bytes

    def survey(self, log: NotedLog) -> None:
        """Find the storages that others also hold. Noted tensors of the log over such a storage are booked."""
        self.booking.survey(log)
        self.pending.survey()

    def relieve(self, how_many: int | None, *, is_planned: bool = False) -> None:
        """Admit what is ours, if not everything that may be ours fits.

        See NOTE [No sooner than needed] in `pending.py`.

        Examines `how_many` (None: all) of the records that others held at the last look again. `is_planned`: the plan
        may send something away even if there is room.
        """
        if is_planned or self.pending.must_be_examined or not self.books.host.fits(self.uncharged_bytes()):
            self.examine(how_many)
        self.slots.trim()

    def examine(self, how_many: int | None = None) -> None:
        """Admit the records that are ours alone now, among all fresh ones and `how_many` (None: all) shared ones."""
        if self.books.noted_bytes:
            self.books.keep_noted(0)
        self.booking.book_all()
        for record in self.pending.take(how_many):
            if record.state is not State.PENDING:
                continue
            if is_sole_owner(record):
                self.admit(record)
            else:
                self.pending.share(record)

    def admit(self, record: Record) -> None:
        """Charge a record whose bytes are ours, or let it wait for room in `blocked`."""
        if record.device is not None:
            self.devices.hold(record)
            self._offload_surplus()
        elif not self._try_admit(record):
            self.blocked.append(record)
        self.slots.trim()

    def admit_blocked(self, *, is_awaited: bool) -> None:
        """Try again to find room for blocked records; `is_awaited`: a thread waits for that.

        Bytes that backward is about to ask for make room only for a waiting thread. Otherwise prefetched bytes would be
        dropped, read again at once, dropped again, and so on; and records whose writes backward has cancelled would be
        written before anything else is read.
        """
        while self.blocked:
            record = self.blocked[0]
            if record.state in (State.PENDING, State.DEVICE):
                if not (record.forced or is_sole_owner(record)):
                    self._hand_back(record)
                elif not self._try_admit(record, takes_from_backward=is_awaited):
                    return
            self.blocked.popleft()
            self._offload_surplus()

    def _offload_surplus(self) -> None:
        """Begin to copy out the records beyond the device's limit."""
        while (record := self.devices.surplus()) is not None and record not in self.blocked:
            if not self._try_admit(record):
                self.blocked.append(record)

    def _try_admit(self, record: Record, *, takes_from_backward: bool = True) -> bool:
        """Find room in host memory; to make it, other records begin to move out. False: there is none yet."""
        order = self._eviction
        next_to_spill = order.next_dirty if takes_from_backward else order.next_unasked
        next_to_drop = order.next_clean if takes_from_backward else order.next_used
        nbytes, host = record.nbytes, self.books.host
        if not host.fits(nbytes):
            self.books.grow_staging(nbytes)
        window = self.books.staging if nbytes > (host.limit_bytes or 0) or self._goes_at_once(record) else host
        while not (self._may_move(nbytes) if window is self.books.staging else host.fits(nbytes)):
            if not (self._spill(next_to_spill()) or self._drop(next_to_drop())):
                return False
        if record.device is not None:
            self._offload(record, window)
        else:
            if record.state is not State.HOST:
                record.move(State.HOST)
            self.books.charge(record, window)
            self._eviction.add_dirty(record)
        if window is self.books.staging:
            self._queue_spill(record)
        return True

    def _goes_at_once(self, record: Record) -> bool:
        """Whether the plan sends it to disk, or host memory is full and it is needed later than anything there."""
        if not self._may_move(record.nbytes):
            return False
        if record.place is Place.DISK:
            return self._eviction.next_leaving() is None
        victim = None if self.books.host.fits(record.nbytes) else self._eviction.next_dirty()
        return victim is not None and record.worth < victim.worth

    def _offload(self, record: Record, window: Window) -> None:
        source = record.source
        if source is None:
            raise RuntimeError(f"handle {record.key}: offloaded after its release")
        first, end = self._cut_span(record, source)
        record.nbytes = end - first
        record.first_byte = first
        record.slot = self.slots.allocate(record.nbytes)
        self.books.charge(record, window)
        self.devices.offload(record, source, record.slot, first, end)
        self.counters.offloaded_bytes += record.nbytes
        self._note_pageable(record.slot)
        self.observer.offloaded(record.key, record.nbytes)
        self._eviction.add_dirty(record)

    def _hand_back(self, record: Record) -> None:
        """Return a record to PENDING: somebody else holds its storage again, so its removal would free nothing."""
        self._eviction.remove(record)
        self._parked.pop(record.key, None)
        self.devices.leave(record)
        self.books.charge(record, None)
        if record.state is not State.PENDING:
            record.move(State.PENDING)
        self.pending.share(record)

    # --- down: host memory to disk ----------------------------------------------------------------------------

    def send_ahead(self) -> None:
        """Begin to move out the records that the plan sends to disk, as far as staging has room."""
        while (record := self._eviction.next_leaving()) is not None and self.books.staging.fits(record.nbytes):
            if not self._spill(record):
                return

    def _spill(self, victim: Record | None) -> bool:
        """Begin to move the victim out, or make another step towards that; False: nothing can be done now."""
        if victim is None or victim.demanded or self.disk_is_full or self.is_closed:
            return False
        if not (victim.forced or victim.slot is not None or is_sole_owner(victim)):
            self._hand_back(victim)
        elif victim.window is self.books.staging or self._may_move(victim.nbytes, from_host=True):
            self._queue_spill(victim)
        elif self._parked and not self.num_spills:
            self._queue_spill(next(iter(self._parked.values())))  # parked records hold the staging the victim needs
        else:
            return False
        return True

    def _may_move(self, nbytes: int, *, from_host: bool = False) -> bool:
        return not self.disk_is_full and self.books.admits_move(nbytes, from_host=from_host)

    def _queue_spill(self, record: Record) -> None:
        self._parked.pop(record.key, None)
        self._eviction.remove(record)
        self.books.charge(record, self.books.staging)
        self.slots.trim()
        record.move(State.QUEUED)
        self.num_spills += 1
        self.observer.spill_queued(record.key, record.nbytes)
        self.engine.submit_spill(record)

    def cancel_spill(self, record: Record) -> None:
        """Take a QUEUED record that is asked for off the queue of writes; it becomes the last to leave."""
        self.num_spills -= 1
        self._stay(record)
        self.observer.spill_cancelled(record.key, record.nbytes)
        self._eviction.add_asked(record)

    def span_to_write(self, record: Record, source: torch.Tensor) -> tuple[int, int]:
        """Begin the write: returns (address, length) of the bytes in memory, which the record keeps for the job."""
        record.move(State.WRITING)
        self._jobs.add(record)
        if record.slot is not None:
            record.held = record.slot
            self.observer.spill_began(record.key, record.slot.nbytes)
            return record.slot.address, record.slot.nbytes
        storage, address = source.untyped_storage(), storage_address(source)
        record.held = _Memory(storage, address, storage.nbytes())  # handle and alias may go while the job runs
        first, end = self._cut_span(record, source)
        self.observer.spill_began(record.key, end - first)
        return address + first, end - first

    def spilled(self, record: Record, outcome: Stored | Exception) -> None:
        """End a write."""
        self.drain()  # while the record still holds the job's memory: by that a release knows of the job
        has_moved = _has_moved(record)
        self._end_job(record)
        self.num_spills -= 1
        if isinstance(outcome, Stored):
            self._count_written(record, outcome)
        self.observer.spill_ended(record.key, outcome)
        if record.state is not State.WRITING:
            self._end_orphaned_job(record)
        elif has_moved:
            self._leave_moved(record)
        elif isinstance(outcome, Stored):
            record.move(State.CLEAN)
            if record.wanted:
                self._eviction.add_clean(record)
            else:
                self._drop(record)
        else:
            self._stay(record)
            record.place = None  # not again before it must
            self._eviction.add_dirty(record)
            self._note_failure(outcome)

    def _leave_moved(self, record: Record) -> None:
        """Discard what was written, which may be other bytes; whoever moved the memory manages it from now on."""
        record.move(State.HOST)
        record.forced = False
        unclaim(record)  # it is never ours again
        if record.stored_bytes:
            self._discard(record)
        self._hand_back(record)

    def _note_failure(self, error: Exception) -> None:
        if isinstance(error, StoreFullError):
            self.disk_is_full = True
            self.full_error = error
        elif self.spill_error is None:
            self.spill_error = error

    @property
    def num_jobs(self) -> int:
        """Jobs that the engine was given and has not reported back."""
        return self.num_spills + self.num_restores + self.num_discards

    @property
    def has_doomed(self) -> bool:
        """Whether a job still holds memory of a record whose handle is gone."""
        return any(record.state is State.DOOMED for record in self._jobs)

    @property
    def unwritten_bytes(self) -> int:
        """Bytes of records that stay in staging: they could not be written, or were asked for in time."""
        return sum(record.nbytes for record in self._parked.values())

    def retry_unwritten(self) -> None:
        """Queue the writes of those records again."""
        for record in list(self._parked.values()):
            self._queue_spill(record)

    def _stay(self, record: Record) -> None:
        """Keep a record that was on its way out: in the host budget if it fits, else in its room in staging."""
        record.move(State.HOST)
        if self.books.host.fits(record.nbytes):
            self.books.charge(record, self.books.host)
        else:
            self._parked[record.key] = record

    def _count_written(self, record: Record, stored: Stored) -> None:
        record.stored_bytes = stored.stored_bytes
        self.disk_bytes += stored.stored_bytes
        self.disk_bytes_peak = max(self.disk_bytes_peak, self.disk_bytes)
        first, end = record.span or (0, 0)
        self.counters.spilled_bytes += end - first
        self.counters.written_bytes += stored.stored_bytes

    def _cut_span(self, record: Record, source: torch.Tensor) -> tuple[int, int]:
        """Decide which bytes of the storage are stored; after this no other view can join the record."""
        if record.span is None:
            first, end = span_of((record.layout, *record.joined), source.untyped_storage().nbytes())
            if record.device is None:
                record.phase = (storage_address(source) + first) % _PAGE_BYTES
            else:
                first -= first % _BLOCK_BYTES
            record.span = first, end
            record.joined = ()
        return record.span

    def _drop(self, record: Record | None, *, is_for_read: bool = False) -> bool:
        """Free the memory of a record whose bytes are on disk too. False: `record` is None.

        `is_for_read`: it makes way for a read. Then a record that was prefetched by hand is prefetched again.
        """
        if record is None:
            return False
        self._eviction.remove(record)
        if self.ahead is not None:
            self.ahead.come_back_for(record)
        if is_for_read:
            self.by_hand.come_back_for(record)
        else:
            self.by_hand.forget_fetched(record)
        first, end = record.span or (0, 0)
        record.nbytes = end - first
        record.first_byte = first
        record.fetched = record.wanted = False
        self._let_go(record)
        self._free_memory(record)
        self.slots.take_back()  # so that the next user of this room gets these very pages
        record.move(State.DISK)
        self.observer.freed(record.key, record.nbytes)
        return True

    # --- up: disk to host memory, host memory to the device -----------------------------------------------------

    def start_restore(self, record: Record, *, demanded: bool, is_far: bool = True) -> bool:
        """Give the record a slot and queue its read; False: there is no room, and it is not demanded.

        `is_far`: it may take room of the host window too, not only of staging.

        Raises:
            StorageIOError: the system has no memory for a demanded record, which stays on disk.
        """
        if self.books.noted_bytes or not self.books.host.fits(self.uncharged_bytes() + record.nbytes):
            self.examine(0)
        window = self.books.window_for_prefetch(record.nbytes, is_far=is_far)
        if window is None:
            if not demanded:
                return False
            while (window := self.books.window_for_prefetch(record.nbytes)) is None:
                if not self._drop(self._eviction.next_clean(), is_for_read=True):
                    break
            window = window or self.books.staging  # overdrawn, by one tensor for each thread that waits
        try:
            record.slot = self.slots.allocate(record.nbytes, record.phase)
        except OSError as error:
            if is_interrupt(error):  # a time limit's TimeoutError is an OSError too
                raise
            if not demanded:
                return False
            place = f"{record.nbytes} bytes of host memory"
            raise StorageIOError("read", place, str(error), "the record is on disk") from error
        self.books.charge(record, window)
        self.slots.trim()
        record.move(State.READING)
        record.urgent = demanded
        self.num_restores += 1
        self.observer.restore_queued(record.key, record.nbytes, demanded=demanded)
        self.engine.submit_restore(record, demanded=demanded)
        return True

    def restored(self, record: Record, outcome: Loaded | Exception) -> None:
        """End a read."""
        self.drain()  # see `spilled`
        self._end_job(record)
        self.num_restores -= 1
        if self.ahead is not None:
            self.ahead.reach.read_ended(record.key)
        source, slot = record.source, record.slot
        is_wanted = record.state is State.READING and source is not None
        self.observer.restore_ended(record.key, outcome, is_wanted=is_wanted)
        if record.state is not State.READING:
            self._end_orphaned_job(record)
        elif source is None or slot is None:
            record.move(State.DOOMED)  # its handle dies just now, on another thread
            self._bury(record)
        elif isinstance(outcome, Exception):
            self._restore_failed(record, outcome)
        else:
            self._begin_to_use(record, source, slot)
            self.counters.restored_bytes += record.nbytes
            self.counters.read_bytes += outcome.read_bytes

    def _begin_to_use(self, record: Record, source: torch.Tensor, slot: Slot) -> None:
        if record.device is None:
            base = self.slots.hand_out(slot)
            source.data = in_dtype(base, record.layout.dtype)
            record.address = base.data_ptr()
            claim(record, base.untyped_storage())
        record.fetched = not record.demanded
        record.move(State.CLEAN)
        if not record.demanded:  # else it may not leave before the waiting thread has it
            self._eviction.add_clean(record)

    def _restore_failed(self, record: Record, error: Exception) -> None:
        self._free_memory(record)
        if isinstance(error, CorruptDataError):
            record.move(State.FAILED)
            record.cause = error
        else:
            record.move(State.DISK)
            record.cause = error if record.demanded else None

    def name(self, records: Iterable[Record]) -> None:
        """Add the records to the list for prefetching by hand, in this order."""
        for record in records:
            is_known = record.key in self._records  # else its handle is gone
            if is_known and (record.state is State.DISK or not self.by_hand.has_fetched(record)):
                self.by_hand.name(record)

    def go_ahead(self) -> None:
        """Restore what lies ahead of backward, then what was named by hand, if backward wants nothing more for now."""
        if self.ahead is not None:
            self.prefetch(self.ahead)
        if self.by_hand.peek() is not None and not self.blocked and (self.ahead is None or self.ahead.peek() is None):
            self.prefetch(self.by_hand)

    def prefetch(self, ahead: Lookahead[Record] | ByHand[Record]) -> None:
        """Restore what lies ahead, and keep what is on its way out, as far as there is room for it."""
        while (record := ahead.peek()) is not None:
            fetched_bytes = record.nbytes
            if record.state is State.DISK:
                while not self.start_restore(record, demanded=False, is_far=ahead.reach.is_far):
                    if not self._make_way(ahead):
                        return
                if isinstance(ahead, Lookahead):
                    ahead.reach.read_began(record.key)
            elif record.state is State.QUEUED:
                self.cancel_spill(record)
                self.counters.forwarded_bytes += record.nbytes
            elif record.state is State.WRITING:
                record.wanted = True
            else:
                fetched_bytes = 0
                if isinstance(ahead, ByHand):
                    self._eviction.want_again(record)
            ahead.advance(fetched_bytes)

    def _make_way(self, ahead: Lookahead[Record] | ByHand[Record]) -> bool:
        """Drop a record that was asked for already, to make room for what lies ahead; False: there is none.

        For backward, a record that was prefetched by hand may also go, if nothing else can.
        """
        if isinstance(ahead, ByHand):
            return self._drop(self._eviction.first_used(self._is_free_of_backward), is_for_read=True)
        used = self._eviction.next_used()
        if used is None or ahead.needs_first(used):
            used = self.by_hand.last_fetched(self._eviction.is_clean)
            if used is None:
                return False
        return (ahead.reach.is_far or used.window is self.books.staging) and self._drop(used, is_for_read=True)

    def _is_free_of_backward(self, record: Record) -> bool:
        return self.ahead is None or not self.ahead.needs_first(record)

    def reload_demanded(self, record: Record) -> None:
        """Copy a record's bytes, which are in host memory, to its device now.

        If the device has no room, all its other copies are dropped, and the copy is tried once more.

        Raises:
            torch.OutOfMemoryError: there is no room even so; the bytes are still in host memory.
        """
        try:
            self.reload(record)
            return
        except torch.OutOfMemoryError:
            pass  # do not keep the error: its frames would hold on to tensors
        self.devices.make_room()
        try:
            self.reload(record)
        except torch.OutOfMemoryError as error:
            error.add_note(f"tierstore: {record.nbytes} bytes that backward asks for are in host memory still")
            raise

    def reload(self, record: Record) -> None:
        """Copy a record's bytes, which are in host memory, to its device, unless they are there.

        Raises:
            torch.OutOfMemoryError: the device has no room; nothing was changed.
        """
        source, slot = record.source, record.slot
        if record.device is None or source is None or slot is None or self.devices.has_bytes(record):
            return
        self.devices.reload(record, source, slot)
        self.counters.reloaded_bytes += record.nbytes
        self._note_pageable(slot)
        self.observer.reloaded(record.key, record.nbytes)

    def _note_pageable(self, slot: Slot) -> None:
        """Count a copy to or from a slot that is not pinned: the host, and with it compute, waits for such a copy."""
        slab = self.slots.slab
        if not slab.is_pinned(slot):
            self.counters.pageable_copy_bytes += slot.nbytes
            if slab.is_being_pinned:
                self.devices.spoil_times()  # later steps are faster

    def reload_ahead(self, ahead: Lookahead[Record]) -> None:
        """Copy what lies ahead to the device, as far as its bytes are in host memory and there is room.

        Stops for good once the device has refused: each try would empty the allocator's cache, and wait for the device.
        """
        while (record := ahead.peek()) is not None:
            fetched_bytes = 0
            if record.device is not None and not self.devices.has_bytes(record) and record.source is not None:
                if record.state not in _IN_HOST_MEMORY or not self.devices.has_room_to_reload(record.nbytes):
                    return
                try:
                    self.reload(record)
                except torch.OutOfMemoryError:
                    ahead.give_up()
                    return
                fetched_bytes = record.nbytes
            ahead.advance(fetched_bytes)

    def used(self, record: Record) -> None:
        """Note that the record was handed over."""
        if record.state is State.CLEAN and not record.demanded:
            self._eviction.use(record)

    # --- the end ------------------------------------------------------------------------------------------------

    def drain(self) -> bool:
        """Account for what has died, and for finished copies; returns whether there was anything to do."""
        if self.is_abandoned:
            return False
        self.lent_views.take_back()
        if not (self.released or self.noted.ended or self.slots.has_returned or self.devices.is_busy):
            return False
        is_changing = True
        while self.released:
            self._release(self.released.popleft())
        self.noted.drop_ended()
        self.slots.take_back()
        self.devices.poll()
        self.observer.changed()
        is_changing = False  # noqa: F841 - see `interrupts.is_half_changed`
        return True

    def _release(self, record: Record) -> None:
        """Release a record whose handle is gone; a running job ends it later."""
        if self._records.pop(record.key, None) is None:
            return  # it was never registered: the store refused it
        state = record.state
        if state is State.FREED or (state is State.CLOSED and record.held is not None):
            return  # its job has ended it, or will
        if record.held is not None:
            self.by_hand.forget(record)
            record.move(State.DOOMED)
            return
        if state is State.QUEUED:
            self.counters.cancelled_bytes += record.nbytes
            self.num_spills -= 1
            self.observer.spill_cancelled(record.key, record.nbytes)
        elif state is State.READING:
            self.num_restores -= 1
            self.observer.restore_cancelled(record.key, record.nbytes)
        elif state is State.PENDING:
            self.pending.forget(record)
            if record.shared:
                self.counters.kept_bytes["alive elsewhere"] += record.nbytes
        self._eviction.remove(record)
        self.by_hand.forget(record)
        self._bury(record)

    def _bury(self, record: Record) -> None:
        """Free all that a record still has, on every tier. Its handle is gone, and no job works on it."""
        self.devices.release(record)
        unclaim(record)
        self._free_memory(record)
        if record.stored_bytes:
            self._discard(record)
        record.move(State.FREED)

    def _discard(self, record: Record) -> None:
        """Free a record's bytes on disk."""
        self._forget_stored(record)
        if not self.is_closed:
            self.num_discards += 1
            self.engine.submit_discard(record.key)

    def discarded(self, num_records: int) -> None:
        """Note that the bytes on disk of `num_records` records have been freed."""
        self.num_discards -= num_records
        self.disk_is_full = False

    def withdraw(self, record: Record) -> None:
        """Remove a record that was refused, or whose handle is dying, whether the handle lives on or not."""
        if record in self.blocked:
            self.blocked.remove(record)
        self._release(record)

    def slot_to_fill(self, record: Record) -> Slot | None:
        """Begin the read: returns the slot. None: it is not wanted, or another submission has begun it."""
        if record.state is not State.READING or record.held is not None:
            return None
        self._jobs.add(record)
        record.held = record.slot
        self.observer.restore_began(record.key)
        return record.slot

    def _end_job(self, record: Record) -> None:
        self._jobs.discard(record)
        record.held = None

    def end_jobs(self) -> None:
        """Free the memory of all jobs. The engine has ended: no job runs any more, and none reports back."""
        for record in list(self._jobs):
            self._end_job(record)
            self._free_memory(record)
        self.drain()

    def _end_orphaned_job(self, record: Record) -> None:
        """End a record that was released or closed while its job ran."""
        if record.state is State.CLOSED:
            self._free_memory(record)
            self._forget_stored(record)
        else:
            self._bury(record)

    def _let_go(self, record: Record) -> None:
        """Take the bytes in memory away from the record's alias."""
        source = record.source
        self.lent_views.let_go(record)
        self.devices.unload(record)
        unclaim(record)
        if source is not None:
            source.data = self._empty if record.device is None else torch.empty(0, device=record.device)

    def _free_memory(self, record: Record) -> None:
        self._parked.pop(record.key, None)
        self.books.charge(record, None)
        slot, record.slot = record.slot, None
        if slot is None:
            return
        if record.ready is not None:
            self.devices.when_copied(record.ready, partial(self.slots.free, slot))
        else:
            self.slots.let_go(slot)

    def _forget_stored(self, record: Record) -> None:
        self.disk_bytes -= record.stored_bytes
        record.stored_bytes = 0

    def end_all(self) -> None:
        """Close all records, because the store closes. Running jobs keep the memory that they hold."""
        self.is_closed = True
        self.devices.stop_asking()
        self.drain()
        for record in self._records.values():
            self._eviction.remove(record)
            self.devices.release(record)
            self._let_go(record)
            if record.held is None:
                self._free_memory(record)
            self._forget_stored(record)
            if record.state is not State.CLOSED:
                record.move(State.CLOSED)
        self.lent_views.forget()
        self.noted.give_up()
        self.books.keep_noted(0)
        self.pending.clear()
        self.blocked.clear()
        self.by_hand.clear()
        self.drain()

    def abandon(self) -> None:
        """In a forked child: close all records, and free nothing."""
        self.is_closed = self.is_abandoned = True
        for record in list(self._records.values()):
            if record.state is not State.CLOSED:
                record.move(State.CLOSED)


def _has_moved(record: Record) -> bool:
    """Whether the memory that a write reads was moved, or resized, while it ran.

    A reference to a storage does not keep its memory in place: `share_memory_`, a queue of `torch.multiprocessing` and
    `UntypedStorage.resize_` replace it.
    """
    held, source = record.held, record.source
    if source is None or not isinstance(held, _Memory):
        return False
    return storage_address(source) != held.address or held.storage.nbytes() != held.nbytes
