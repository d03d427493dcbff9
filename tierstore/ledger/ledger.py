"""All rules of one store: requests, jobs that begin and end, and the end of records.

The way down is in `down.py`, the way up in `up.py`. `advance` is called whenever room was freed: it lets the blocked
records in, and the next writes and reads begin. The caller holds the store's lock; nothing here waits.

A handle that dies puts its record into the queue `Books.released`; `drain` does the rest at the start of every call:
see NOTE [No finalizers] in `base/remains.py`.
"""

from __future__ import annotations

from dataclasses import replace

from ..disk.tier import Loaded, Stored
from ..errors import CorruptDataError, StoreFullError
from .books import Books
from .device import DeviceRules
from .lookahead import Lookahead
from .memory import Memory, Submissions
from .record import R
from .state import State
from .up import Up
from .windows import NUM_MEMBERS

NUM_PASSED = 8
"""Tracked tensors that backward asks for before it looks ahead again."""


_AT_REST = frozenset({State.OFFLOADING, State.HOST, State.CLEAN})
"""States in which one more member is handed out, and nothing else changes."""


class Ledger(Up[R]):
    """See the module's docstring.

    Attributes:
        num_packing: how many threads wait for room.
    """

    def __init__(
        self,
        books: Books[R],
        memory: Memory[R],
        device: DeviceRules[R],
        engine: Submissions[R],
        disk_budget_bytes: int,
    ) -> None:
        super().__init__(books, memory, device, engine)
        self.released = books.released
        self.num_packing = 0
        self._disk_budget_bytes = disk_budget_bytes
        self._is_abandoned = False

    # --- groups on an accelerator ---------------------------------------------------------------------------------

    @property
    def device_group_bytes(self) -> int:
        return min(self.windows.device_group_bytes, self.device.window.group_bytes)

    def may_gather(self, nbytes: int) -> bool:
        """Whether a tensor on an accelerator, of a storage of `nbytes`, may leave in a group."""
        return nbytes * NUM_MEMBERS <= self.device_group_bytes

    # --- requests -----------------------------------------------------------------------------------------------

    def ask_for(self, record: R, ahead: Lookahead[R] | None = None, index: int = 0) -> bool:
        """A thread asks for the record, which is pack `index` of the graph that `ahead` is of; begin its read.

        True: a write was cancelled.
        """
        self._count_request(record)
        if record.state is State.DISK:
            self.start_restore(record, demanded=True)
        if ahead is None:
            return self.by_hand.forget(record) and self.go_ahead()
        self.ahead = ahead
        ahead.asked_for(index, record.nbytes // record.num_members)
        if record.state is State.DISK or record.state is State.READING:
            ahead.reach.wait()
        return self.go_ahead()

    def _count_request(self, record: R) -> None:
        counters = self.counters
        if record.state is State.DISK:
            counters.prefetch_misses += 1
        elif record.state is State.READING:
            counters.prefetch_late += not record.demanded
        elif record.state is State.CLEAN and record.fetched:
            counters.prefetch_hits += 1
            record.fetched = False
        elif record.state in (State.QUEUED, State.WRITING):
            counters.forwarded_bytes += record.nbytes // record.num_members

    def next_member(self, record: R, ahead: Lookahead[R], index: int) -> bool:
        """A thread asks for pack `index`, a member of a group of which others were asked for. False: `ask_for` it.

        Its last member is asked for: then its room may be used for what comes next.
        """
        if record.fetched or record.state not in _AT_REST:
            return False
        if record.device is not None and not self.device.hand_over_again(record):
            return False
        self.ahead = ahead
        return ahead.pass_member(index, record)

    def hand_over(self, record: R, reload_ahead: Lookahead[R] | None, index: int) -> bool:
        """False: its device has no room for a whole group."""
        if record.device is not None:
            if not self.reload_demanded(record, reload_ahead):
                self.used(record)
                return False
            self.device.hand_over(record)
            if reload_ahead is not None:
                reload_ahead.asked_for(index)
                self.reload_ahead(reload_ahead)
        self.used(record)
        return True

    def pass_by(self, ahead: Lookahead[R], reload_ahead: Lookahead[R], index: int) -> bool:
        """Backward has asked for pack `index`, which is tracked: bring back what comes next.

        True: a write was cancelled.
        """
        ahead.asked_for(index)
        reload_ahead.asked_for(index)
        self.ahead = ahead
        has_cancelled = self.go_ahead()
        self.reload_ahead(reload_ahead)
        return has_cancelled

    def go_ahead(self) -> bool:
        """Restore what lies ahead of backward, then what was named by hand, if backward wants nothing more for now.

        Not while a pack waits: a prefetch would take the room that it waits for.
        True: a write was cancelled, for which somebody may wait.
        """
        if self.is_closed or self.num_packing:
            return False
        num_spills = self.num_spills
        if self.ahead is not None:
            self._prefetch(self.ahead)
        if self.by_hand.waiting and not self.blocked and (self.ahead is None or self.ahead.peek() is None):
            self._prefetch(self.by_hand)
        return self.num_spills < num_spills

    def advance(self) -> None:
        """Use the room of what was freed: for blocked records, writes and prefetches."""
        if self.blocked or self.eviction.leaving:
            self.admit_blocked(is_awaited=self.num_packing > 0)
            self.send_ahead()
            self._memory.trim()
        self.go_ahead()

    def full_error(self, needed_bytes: int) -> StoreFullError:
        found = self.disk_error or StoreFullError(needed_bytes, self.disk_bytes, self._disk_budget_bytes)
        return replace(
            found,
            needed_bytes=needed_bytes,
            host_bytes=self.windows.used_bytes[0],
            host_budget_bytes=self.windows.host_bytes,
        )

    # --- the engine's jobs --------------------------------------------------------------------------------------

    def begin_write(self, record: R) -> bool:
        """A lane takes the record. False: it is not to be written any more."""
        if record.state is not State.QUEUED:
            return False
        nbytes = self._memory.begin_write(record)
        if nbytes is None:  # its handle is dying on another thread, and nobody is told
            self.withdraw(record)
            self.advance()
            return False
        record.move(State.WRITING)
        self._jobs.add(record)
        self.observer.spill_began(record.key, nbytes)
        return True

    def end_write(self, record: R, outcome: Stored | Exception) -> None:
        self.drain()  # while the record still holds the job's memory: by that a release knows of the job
        has_moved = self._memory.has_moved(record)
        self._end_job(record)
        self.num_spills -= 1
        if isinstance(outcome, Stored):
            self._note_written(record, outcome)
        self.observer.spill_ended(record.key, outcome)
        if record.state is not State.WRITING:
            self._end_orphaned_job(record)
        elif has_moved:
            self._leave_moved(record)
        elif isinstance(outcome, Stored):
            record.move(State.CLEAN)
            if record.wanted:
                self.eviction.add_clean(record)
            else:
                self._drop(record)
        else:
            self._stay(record)
            record.place = None  # not again before it must
            self.eviction.add_dirty(record)
            self._note_failure(outcome)

    def _leave_moved(self, record: R) -> None:
        """Discard what was written, which may be other bytes; whoever moved the memory manages it from now on."""
        record.move(State.HOST)
        record.forced = False
        self._memory.disown(record)  # it is never ours again
        if record.stored_bytes:
            self._discard(record)
        self._hand_back(record)

    def _note_failure(self, error: Exception) -> None:
        if isinstance(error, StoreFullError):
            self.disk_is_full = True
            self.disk_error = error
        elif self.spill_error is None:
            self.spill_error = error

    def begin_read(self, record: R) -> bool:
        """A lane takes the record. False: it is not wanted, or another submission has begun its read."""
        if record.state is not State.READING or record.held is not None:
            return False
        self._memory.begin_read(record)
        self._jobs.add(record)
        self.observer.restore_began(record.key)
        return True

    def end_read(self, record: R, outcome: Loaded | Exception) -> None:
        self.drain()  # see `end_write`
        self._end_job(record)
        self.num_restores -= 1
        if self.ahead is not None:
            self.ahead.reach.read_ended(record.key)
        is_wanted = record.state is State.READING and record.is_alive
        self.observer.restore_ended(record.key, outcome, is_wanted=is_wanted)
        if record.state is not State.READING:
            self._end_orphaned_job(record)
        elif isinstance(outcome, Exception):
            self._leave_unread(record, outcome)
        elif not self._memory.put_back(record):
            record.move(State.DOOMED)  # its handle dies just now, on another thread
            self._bury(record)
        else:
            self._begin_to_use(record)
            self.counters.restored_bytes += record.nbytes
            self.counters.read_bytes += outcome.read_bytes

    def _begin_to_use(self, record: R) -> None:
        record.fetched = not record.demanded
        record.move(State.CLEAN)
        if not record.demanded:  # else it may not leave before the waiting thread has it
            self.eviction.add_clean(record)

    def _leave_unread(self, record: R, error: Exception) -> None:
        self._free_memory(record)
        if isinstance(error, CorruptDataError):
            record.move(State.FAILED)
            record.cause = error
        else:
            record.move(State.DISK)
            record.cause = error if record.demanded else None

    def _end_job(self, record: R) -> None:
        self._jobs.discard(record)
        self._memory.end_job(record)

    def _end_orphaned_job(self, record: R) -> None:
        if record.state is State.CLOSED:
            self._free_memory(record)
            self._forget_stored(record)
        else:
            self._bury(record)

    @property
    def has_doomed(self) -> bool:
        return any(record.state is State.DOOMED for record in self._jobs)

    def end_jobs(self) -> None:
        """Free the memory of all jobs. The engine has ended: no job runs any more, and none reports back."""
        for record in list(self._jobs):
            self._end_job(record)
            self._free_memory(record)
        self.drain()

    # --- the end of records -------------------------------------------------------------------------------------

    def drain(self) -> bool:
        """Account for what has died, and for finished copies; returns whether there was anything to do."""
        device = self.device
        if not (self._memory.has_changed() or self.released or device.flights or device.busy) or self._is_abandoned:
            return False
        while self.released:
            self._release(self.released.popleft())
        self._memory.catch_up()
        self.device.poll()
        self.observer.changed()
        return True

    def withdraw(self, record: R) -> None:
        """Remove a record that was refused, or whose handle is dying, whether the handle lives on or not."""
        if record in self.blocked:
            self.blocked.remove(record)
        self._release(record)

    def _release(self, record: R) -> None:
        """Release a record whose handle is gone; a running job ends it later."""
        if self._books.records.pop(record.key, None) is None:
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
        self.eviction.remove(record)
        self.by_hand.forget(record)
        self._bury(record)

    def _bury(self, record: R) -> None:
        """Free all that a record still has, on every tier. Its handle is gone, and no job works on it."""
        self.device.release(record)
        self._memory.forget(record)
        self._free_memory(record)
        if record.stored_bytes:
            self._discard(record)
        record.move(State.FREED)

    def _discard(self, record: R) -> None:
        self._forget_stored(record)
        if not self.is_closed:
            self.num_discards += 1
            self._engine.submit_discard(record.key)

    def _forget_stored(self, record: R) -> None:
        self.disk_bytes -= record.stored_bytes
        record.stored_bytes = 0

    def end_discards(self, num_records: int) -> None:
        self.num_discards -= num_records
        self.disk_is_full = False

    def end_all(self) -> None:
        """Close all records, because the store closes. Running jobs keep the memory that they hold."""
        self.is_closed = True
        self.device.stop_asking()
        self.drain()
        for record in self._books.records.values():
            self.eviction.remove(record)
            self.device.release(record)
            self._memory.let_go(record)
            if record.held is None:
                self._free_memory(record)
            self._forget_stored(record)
            if record.state is not State.CLOSED:
                record.move(State.CLOSED)
        self._memory.give_up()
        self.windows.keep_noted(0)
        self.pending.clear()
        self.blocked.clear()
        self.by_hand.clear()
        self.drain()

    def abandon(self) -> None:
        """In a forked child: close all records, and free nothing."""
        self.is_closed = self._is_abandoned = True
        for record in list(self._books.records.values()):
            if record.state is not State.CLOSED:
                record.move(State.CLOSED)
