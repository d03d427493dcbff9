"""The rules of `tierstore/moves.py`, in virtual time.

Methods have the names that they have there and do the same in the same order; what differs is that there is no tensor,
no slot and no lock, and that a graph tells when it lets go. The decisions themselves (`EvictionOrder`, `Lookahead`,
`HostBooks`, `Pending`, the plan) are the store's own.

NOTE [Why the rules are here twice]
`Moves` is one half rules and one half tensors: aliases, storages and their owners, slots of real memory, streams. A
seam between the halves would have some thirty methods, which only a simulation needs. What is repeated here are the
rules alone, and `tests/simulator/test_same_decisions.py` runs both and compares every decision.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from ..disk.tier import Loaded, Stored
from ..errors import StoreFullError
from ..eviction import EvictionOrder
from ..handle import State
from ..host import HostBooks
from ..lookahead import Lookahead
from ..pending import Pending
from ..plan import Place
from ..stats import Counters
from ..tracing.observer import Observer
from .device import SimulatedDevice
from .record import GraphLog, SimulatedRecord

__all__ = ["SimulatedMoves", "Submissions"]

_IN_HOST_MEMORY = frozenset({State.OFFLOADING, State.HOST, State.WRITING, State.CLEAN})


class Submissions(Protocol):
    """The simulated engine, as the rules see it."""

    def submit_spill(self, record: SimulatedRecord) -> None:
        """Have the record written."""

    def submit_restore(self, record: SimulatedRecord, *, demanded: bool) -> None:
        """Have the record read; again with `demanded` to let it overtake what nobody waits for."""

    def submit_discard(self, key: int) -> None:
        """Have the record's bytes on disk freed."""


class SimulatedMoves:
    """The records of one rank. Attributes as `Moves`'s.

    Args:
        host_bytes, staging_bytes: the limits of the two windows of host memory.
        staging_grows: see NOTE [Large tensors] in `host.py`.
        device: the accelerator.
        observer: is told of every move.
    """

    def __init__(
        self,
        *,
        host_bytes: int,
        staging_bytes: int,
        device: SimulatedDevice,
        observer: Observer,
        staging_grows: bool = False,
    ) -> None:
        self.engine: Submissions
        self.books = HostBooks(host_bytes, staging_bytes, grows=staging_grows)
        self.device = device
        self.counters = Counters()
        self.observer = observer
        self.pending = Pending[SimulatedRecord](self._is_sole_owner)
        self.log: GraphLog
        self.noted_bytes = 0
        self.ahead: Lookahead[SimulatedRecord] | None = None
        self.released: deque[SimulatedRecord] = deque()
        self.ended: deque[GraphLog] = deque()
        self.blocked: deque[SimulatedRecord] = deque()
        self.num_spills = 0
        self.num_restores = 0
        self.num_discards = 0
        self.has_returned = False  # lent memory has come back
        self.disk_bytes = 0
        self.disk_bytes_peak = 0
        self.disk_is_full = False
        self.full_error: StoreFullError | None = None
        self.uses_staging = False
        self._eviction = EvictionOrder[SimulatedRecord]()
        self._parked: dict[int, SimulatedRecord] = {}

    # --- the beginning ----------------------------------------------------------------------------------------

    def begin_graph(self, log: GraphLog) -> None:
        """A step begins."""
        self.log = log

    def end_graph(self) -> None:
        """All of the graph is gone. As in the store, that is noticed only when something is drained."""
        for index in range(len(self.log.records)):
            self.let_go(index)

    def drop_ended(self) -> None:
        """See `NotedTensors`: what was only noted is not counted any more, and what was seen is learned."""
        while self.ended:
            log = self.ended.popleft()
            self.noted_bytes -= sum(log.saved[index].nbytes for index in log.noted)
            self.books.keep_noted(self.noted_bytes)
            log.end()

    def uncharged_bytes(self) -> int:
        """See `Moves`."""
        return self.pending.num_bytes + self.noted_bytes - self.books.noted_bytes

    def is_short_of(self, nbytes: int) -> bool:
        """See `Moves`."""
        self.uses_staging = False
        if self.pending.must_be_examined or self.blocked:
            return True
        held_bytes = self.books.host.used_bytes + self.uncharged_bytes()
        limit_bytes = self.books.host.limit_bytes or 0
        if held_bytes + nbytes <= limit_bytes:
            return False
        self.uses_staging = held_bytes <= limit_bytes and self.books.may_stay_noted(nbytes)
        return not self.uses_staging

    def note(self, index: int, *, is_short: bool) -> None:
        """See `NotedTensors.add`, and `Booking.join_if_booked`."""
        saved = self.log.saved[index]
        if not self.log.noted:
            self.drop_ended()
        self.log.note(index)
        self.noted_bytes += saved.nbytes
        self.counters.packed_tensors += 1
        if is_short:
            if self.log.unread_record_of(index) is not None:
                self.book(index)
        elif self.uses_staging:
            self.books.charge_noted(saved.nbytes)

    def book(self, index: int) -> None:
        """See `Booking._book`."""
        log, saved = self.log, self.log.saved[index]
        log.take_out(index)
        self.noted_bytes -= saved.nbytes
        self.books.keep_noted(self.noted_bytes)
        if index in log.let_go:
            return
        record = log.unread_record_of(index)
        if record is not None:
            record.users.add(index)
            log.come_in(index, record)
            return
        record = log.make_record(index)
        log.place(index, record)
        self.pending.settle((record,))
        log.come_in(index, record)

    def join(self, index: int) -> SimulatedRecord | None:
        """See `join_record`: the record that a tensor on the device, just packed, is a view of; None: of none."""
        record = self.log.unread_record_of(index)
        if record is None or not record.users:
            return None
        self.counters.packed_tensors += 1
        return record

    def book_all(self) -> None:
        """See `Booking`."""
        for index in self.log.settled():
            self.book(index)

    def survey(self) -> None:
        """See `Moves`: what others hold is booked, so that it is known to be."""
        log = self.log
        for index in log.settled():
            if index not in log.let_go and (log.is_held(index) or log.has_record_in_place(index)):
                self.book(index)
        self.pending.survey()

    def relieve(self, how_many: int | None, *, is_planned: bool = False) -> None:
        """See `Moves`."""
        if is_planned or self.pending.must_be_examined or not self.books.host.fits(self.uncharged_bytes()):
            self.examine(how_many)

    def examine(self, how_many: int | None = None) -> None:
        """See `Moves`."""
        self.books.keep_noted(0)
        self.book_all()
        for record in self.pending.take(how_many):
            if record.state is not State.PENDING:
                continue
            if self._is_sole_owner(record):
                self.admit(record)
            else:
                self.pending.share(record)

    def admit(self, record: SimulatedRecord) -> None:
        """See `Moves`."""
        if record.device is not None:
            self.device.hold(record)
            self._offload_surplus()
        elif not self._try_admit(record):
            self.blocked.append(record)

    def admit_blocked(self, *, is_awaited: bool) -> None:
        """See `Moves`."""
        while self.blocked:
            record = self.blocked[0]
            if record.state in (State.PENDING, State.DEVICE):
                if not self._is_sole_owner(record):
                    self._hand_back(record)
                elif not self._try_admit(record, takes_from_backward=is_awaited):
                    return
            self.blocked.popleft()
            self._offload_surplus()

    def _offload_surplus(self) -> None:
        while (record := self.device.surplus()) is not None and record not in self.blocked:
            if not self._try_admit(record):
                self.blocked.append(record)

    def _try_admit(self, record: SimulatedRecord, *, takes_from_backward: bool = True) -> bool:
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
        self.books.charge(record, window)
        if record.device is not None:
            self._offload(record)
        else:
            record.move(State.HOST)
        self._eviction.add_dirty(record)
        if window is self.books.staging:
            self._queue_spill(record)
        return True

    def _goes_at_once(self, record: SimulatedRecord) -> bool:
        if not self._may_move(record.nbytes):
            return False
        if record.place is Place.DISK:
            return self._eviction.next_leaving() is None
        victim = None if self.books.host.fits(record.nbytes) else self._eviction.next_dirty()
        return victim is not None and record.worth < victim.worth

    def _offload(self, record: SimulatedRecord) -> None:
        record.is_in_place, record.is_read, record.has_slot = False, True, True
        self.device.offload(record)
        self.counters.offloaded_bytes += record.nbytes
        self.observer.offloaded(record.key, record.nbytes)

    def _hand_back(self, record: SimulatedRecord) -> None:
        self._eviction.remove(record)
        self._parked.pop(record.key, None)
        self.device.leave(record)
        self.books.charge(record, None)
        if record.state is not State.PENDING:
            record.move(State.PENDING)
        self.pending.share(record)

    # --- down -------------------------------------------------------------------------------------------------------

    def send_ahead(self) -> None:
        """See `Moves`."""
        while (record := self._eviction.next_leaving()) is not None and self.books.staging.fits(record.nbytes):
            if not self._spill(record):
                return

    def _spill(self, victim: SimulatedRecord | None) -> bool:
        if victim is None or victim.demanded or self.disk_is_full:
            return False
        if victim.is_in_place and not self._is_sole_owner(victim):
            self._hand_back(victim)
        elif victim.window is self.books.staging or self._may_move(victim.nbytes, from_host=True):
            self._queue_spill(victim)
        elif self._parked and not self.num_spills:
            self._queue_spill(next(iter(self._parked.values())))
        else:
            return False
        return True

    def _may_move(self, nbytes: int, *, from_host: bool = False) -> bool:
        return not self.disk_is_full and self.books.admits_move(nbytes, from_host=from_host)

    def _queue_spill(self, record: SimulatedRecord) -> None:
        self._parked.pop(record.key, None)
        self._eviction.remove(record)
        self.books.charge(record, self.books.staging)
        record.move(State.QUEUED)
        self.num_spills += 1
        self.observer.spill_queued(record.key, record.nbytes)
        self.engine.submit_spill(record)

    def cancel_spill(self, record: SimulatedRecord) -> None:
        """See `Moves`."""
        self.num_spills -= 1
        self._stay(record)
        self.observer.spill_cancelled(record.key, record.nbytes)
        self._eviction.add_asked(record)

    def begin_spill(self, record: SimulatedRecord) -> bool:
        """See `Moves.span_to_write`; False: it is not wanted any more."""
        if record.state is not State.QUEUED:
            return False
        record.move(State.WRITING)
        record.is_running = record.is_read = True
        self.observer.spill_began(record.key, record.nbytes)
        return True

    def spilled(self, record: SimulatedRecord, outcome: Stored | StoreFullError) -> None:
        """See `Moves`."""
        self.drain()
        record.is_running = False
        self.num_spills -= 1
        if isinstance(outcome, Stored):
            record.stored_bytes = outcome.stored_bytes
            self.counters.spilled_bytes += record.nbytes
            self.counters.written_bytes += outcome.stored_bytes
        self.observer.spill_ended(record.key, outcome)
        if record.state is not State.WRITING:
            self._bury(record)
        elif isinstance(outcome, Stored):
            record.move(State.CLEAN)
            if record.wanted:
                self._eviction.add_clean(record)
            else:
                self._drop(record)
        else:
            self._stay(record)
            record.place = None
            self._eviction.add_dirty(record)
            self.disk_is_full = True
            self.full_error = outcome

    @property
    def num_jobs(self) -> int:
        """See `Moves`."""
        return self.num_spills + self.num_restores + self.num_discards

    def _stay(self, record: SimulatedRecord) -> None:
        record.move(State.HOST)
        if self.books.host.fits(record.nbytes):
            self.books.charge(record, self.books.host)
        else:
            self._parked[record.key] = record

    def _drop(self, record: SimulatedRecord | None) -> bool:
        if record is None:
            return False
        self._eviction.remove(record)
        if self.ahead is not None:
            self.ahead.come_back_for(record)
        record.fetched = record.wanted = record.is_in_place = False
        self.device.forget(record)
        self._free_memory(record)
        record.move(State.DISK)
        self.observer.freed(record.key, record.nbytes)
        return True

    # --- up ---------------------------------------------------------------------------------------------------------

    def start_restore(self, record: SimulatedRecord, *, demanded: bool, is_far: bool = True) -> bool:
        """See `Moves`."""
        if self.books.noted_bytes or not self.books.host.fits(self.uncharged_bytes() + record.nbytes):
            self.examine(0)
        window = self.books.window_for_prefetch(record.nbytes, is_far=is_far)
        if window is None:
            if not demanded:
                return False
            while (window := self.books.window_for_prefetch(record.nbytes)) is None:
                if not self._drop(self._eviction.next_clean()):
                    break
            window = window or self.books.staging
        self.books.charge(record, window)
        record.has_slot = True
        record.move(State.READING)
        record.urgent = demanded
        self.num_restores += 1
        self.observer.restore_queued(record.key, record.nbytes, demanded=demanded)
        self.engine.submit_restore(record, demanded=demanded)
        return True

    def begin_restore(self, record: SimulatedRecord) -> bool:
        """See `Moves.slot_to_fill`; False: it is not wanted, or was begun by another submission."""
        if record.state is not State.READING or record.is_running:
            return False
        record.is_running = True
        self.observer.restore_began(record.key)
        return True

    def restored(self, record: SimulatedRecord, outcome: Loaded) -> None:
        """See `Moves`."""
        self.drain()
        record.is_running = False
        self.num_restores -= 1
        if self.ahead is not None:
            self.ahead.reach.read_ended(record.key)
        is_wanted = record.state is State.READING
        self.observer.restore_ended(record.key, outcome, is_wanted=is_wanted)
        if not is_wanted:
            self._bury(record)
            return
        record.fetched = not record.demanded
        record.move(State.CLEAN)
        if not record.demanded:
            self._eviction.add_clean(record)
        self.counters.restored_bytes += record.nbytes
        self.counters.read_bytes += outcome.read_bytes

    def prefetch(self, ahead: Lookahead[SimulatedRecord]) -> None:
        """See `Moves`."""
        while (record := ahead.peek()) is not None:
            fetched_bytes = record.nbytes
            if record.state is State.DISK:
                while not self.start_restore(record, demanded=False, is_far=ahead.reach.is_far):
                    if not self._make_way(ahead):
                        return
                ahead.reach.read_began(record.key)
            elif record.state is State.QUEUED:
                self.cancel_spill(record)
                self.counters.forwarded_bytes += record.nbytes
            elif record.state is State.WRITING:
                record.wanted = True
            else:
                fetched_bytes = 0
            ahead.advance(fetched_bytes)

    def _make_way(self, ahead: Lookahead[SimulatedRecord]) -> bool:
        used = self._eviction.next_used()
        if used is None or ahead.needs_first(used):
            return False
        return (ahead.reach.is_far or used.window is self.books.staging) and self._drop(used)

    def reload(self, record: SimulatedRecord) -> None:
        """See `Moves`."""
        if record.device is not None and not record.has_device_bytes:
            self.device.reload(record)
            self.counters.reloaded_bytes += record.nbytes
            self.observer.reloaded(record.key, record.nbytes)

    def reload_ahead(self, ahead: Lookahead[SimulatedRecord]) -> None:
        """See `Moves`."""
        while (record := ahead.peek()) is not None:
            fetched_bytes = 0
            if record.device is not None and not record.has_device_bytes and record.users:
                if record.state not in _IN_HOST_MEMORY or not self.device.has_room_to_reload(record.nbytes):
                    return
                self.reload(record)
                fetched_bytes = record.nbytes
            ahead.advance(fetched_bytes)

    def used(self, record: SimulatedRecord) -> None:
        """See `Moves`."""
        if record.state is State.CLEAN and not record.demanded:
            self._eviction.use(record)

    # --- the end ----------------------------------------------------------------------------------------------------

    def let_go(self, index: int) -> None:
        """The graph lets go of a saved tensor: with the last one of a record, that is in the queue to be released."""
        log = self.log
        if index in log.let_go:
            return
        log.release(index)
        record = log.records[index]
        if record is not None:
            record.users.remove(index)
            if not record.users:
                self.released.append(record)
        if len(log.let_go) == len(log.saved):
            self.ended.append(log)

    def drain(self) -> bool:
        """See `Moves`."""
        if not (self.released or self.ended or self.has_returned or self.device.is_busy):
            return False
        while self.released:
            self._release(self.released.popleft())
        self.drop_ended()
        self.has_returned = False
        self.device.poll()
        return True

    def _release(self, record: SimulatedRecord) -> None:
        self.log.forget(record)
        if record.is_running:
            record.move(State.DOOMED)
            return
        if record.state is State.QUEUED:
            self.counters.cancelled_bytes += record.nbytes
            self.num_spills -= 1
            self.observer.spill_cancelled(record.key, record.nbytes)
        elif record.state is State.READING:
            self.num_restores -= 1
            self.observer.restore_cancelled(record.key, record.nbytes)
        elif record.state is State.PENDING:
            self.pending.forget(record)
        self._eviction.remove(record)
        self._bury(record)

    def _bury(self, record: SimulatedRecord) -> None:
        self.device.release(record)
        self._free_memory(record)
        if record.stored_bytes:
            self.disk_bytes -= record.stored_bytes
            record.stored_bytes = 0
            self.num_discards += 1
            self.engine.submit_discard(record.key)
        record.move(State.FREED)

    def withdraw(self, record: SimulatedRecord) -> None:
        """See `Moves`."""
        self._release(record)

    def discarded(self, num_records: int) -> None:
        """See `Moves`."""
        self.num_discards -= num_records
        self.disk_is_full = False

    def _free_memory(self, record: SimulatedRecord) -> None:
        self._parked.pop(record.key, None)
        self.books.charge(record, None)
        if record.has_slot and record.ready is not None:
            self.device.free_when_copied(record.ready)
        record.has_slot = False

    def _is_sole_owner(self, record: SimulatedRecord) -> bool:
        return self.log.is_sole_owner(record)
