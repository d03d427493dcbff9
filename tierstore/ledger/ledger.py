"""What a store decides: requests, jobs that begin and end, and the end of records. Events in, jobs out.

The state is in `books.py`. The way down is in `down.py`, the way up in `up.py`. The worker calls `exchange`: it tells
what has ended, and gets what comes next. `advance` is called whenever room was freed: it lets the blocked records in,
and enters the next writes and reads. The caller holds the store's lock; nothing here waits.

A handle that dies puts its record into the queue `Books.released`; `drain` does the rest at the start of every call:
see NOTE [No finalizers] in `base/remains.py`."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic

from ..disk.tier import Loaded, Stored
from ..errors import CorruptDataError, StoreFullError
from .books import Books
from .device import NUM_SPARED, DeviceRules
from .down import Down
from .grants import MOST_PACKS, SHARE_GRANTED, Grant, OnDevice
from .groups import DEVICE_ALIGNMENT_BYTES, Grouping
from .jobs import Discard, Job, Read, Room, Write
from .log import GraphLog
from .lookahead import Lookahead
from .memory import Memory
from .record import R
from .state import State
from .up import Up
from .validation import validate
from .windows import NUM_MEMBERS

NUM_PASSED = 8
"""Tracked tensors that backward asks for before it looks ahead again."""


_AT_REST = frozenset({State.OFFLOADING, State.HOST, State.CLEAN})
"""States in which one more member is handed out, and nothing else changes."""


class ForRoom(enum.Enum):
    """What a pack has to do while records are blocked."""

    WAIT = enum.auto()
    COLLECT_GARBAGE = enum.auto()


class Ledger(Generic[R]):
    """All decisions of one store. It owns both ways, and is what the residency calls.

    `unaccounted`: as long as all of these are empty, `drain` has nothing to do."""

    def __init__(self, books: Books[R], memory: Memory[R], device: DeviceRules[R], disk_budget_bytes: int) -> None:
        self.books = books
        self.down = Down[R](books, memory, device)
        self.up = Up[R](books, memory, device, self.down)
        self.device = device
        self._jobs = books.jobs
        self._memory = memory
        self._disk_budget_bytes = disk_budget_bytes
        self.unaccounted = (
            books.released, books.tracked.grants, device.flights, device.busy, *memory.unaccounted
        )  # fmt: skip
        self._is_abandoned = False

    # --- groups on an accelerator ---------------------------------------------------------------------------------

    def device_grouping(self) -> Grouping[Any]:
        """How tensors on accelerators become groups and batches, from nothing."""
        windows, most_bytes = self.books.windows, self.device.window.group_bytes
        group_bytes = min(windows.device_group_bytes, most_bytes)
        batch_bytes = min(windows.device_batch_bytes, most_bytes)
        return Grouping(group_bytes, group_bytes // NUM_MEMBERS, DEVICE_ALIGNMENT_BYTES, batch_bytes)

    def may_gather(self, nbytes: int) -> bool:
        """Whether a tensor on an accelerator, of a storage of `nbytes`, may leave in a group or a batch: two fit."""
        return 2 * nbytes <= self.books.windows.device_batch_bytes and 2 * nbytes <= self.device.window.group_bytes

    def leaves_now(self, log: GraphLog[Any, Any], nbytes: int) -> bool:
        """Whether what waits in the log to leave its accelerator has to leave before one more of `nbytes` waits."""
        windows, most_bytes = self.books.windows, self.device.window.group_bytes  # no calls: each pack asks
        group_bytes, waiting_bytes = windows.device_group_bytes, log.leaving_bytes + nbytes
        if nbytes * NUM_MEMBERS > group_bytes or nbytes * NUM_MEMBERS > most_bytes:
            log.leaves_in_batches = True
        limit_bytes = windows.device_batch_bytes if log.leaves_in_batches else group_bytes
        return waiting_bytes > limit_bytes or waiting_bytes > most_bytes

    def grant_on_device(self, log: GraphLog[Any, Any], tracked: Any, nbytes: int, *, leaves: bool) -> None:
        """Let packs after that one, of `nbytes`, stay on its device, or leave it, without the lock: NOTE [Grants]."""
        index, most_bytes, windows = tracked.index, self.device.window.group_bytes, self.books.windows
        num_packs, plan = MOST_PACKS, log.plan
        if plan is not None and log.tracks_on_device:
            num_packs = plan.num_alike(index + 1) if plan.leaves(index + 1) is leaves else 0
        if self.device.flights or self.device.busy:
            num_packs = min(num_packs, NUM_SPARED)
        if not leaves:
            room_bytes = self.device.window.unlent_bytes() // SHARE_GRANTED
            largest_bytes = room_bytes
        elif log.leaves_in_batches:
            room_bytes = min(windows.device_batch_bytes, most_bytes) - log.leaving_bytes
            largest_bytes = min(windows.device_batch_bytes, most_bytes) // 2  # as `may_gather` has it
        else:
            room_bytes = min(windows.device_group_bytes, most_bytes) - log.leaving_bytes
            largest_bytes = min(windows.device_group_bytes, most_bytes) // NUM_MEMBERS  # as `leaves_now` has it
        if num_packs and room_bytes >= nbytes:
            on_device = OnDevice(tracked.device, tracked.stream, leaves, largest_bytes)
            self.books.tracked.grant(log, Grant(room_bytes, num_packs, on_device))
            self.device.count_spared(num_packs)

    # --- requests -----------------------------------------------------------------------------------------------

    def ask_for(self, record: R, ahead: Lookahead[R] | None = None, index: int = 0) -> None:
        """A thread asks for the record, which is pack `index` of the graph that `ahead` is of; enter its read.

        Accounts for what has died before, and uses its room after: the read comes first, and what lies ahead is looked
        for once."""
        has_changed = any(self.unaccounted) and self.drain()
        counters, state = self.books.counters, record.state
        if state is State.DISK:
            counters.prefetch_misses += 1
            self.up.start_restore(record, demanded=True)
        elif state is State.READING:
            counters.prefetch_late += not record.demanded
        elif state is State.CLEAN and record.fetched:
            counters.prefetch_hits += 1
            record.fetched = False
        elif state in (State.QUEUED, State.WRITING):
            counters.forwarded_bytes += record.nbytes // record.num_members
        if ahead is not None:
            knows_dropped, self.books.ahead = self.books.ahead is ahead, ahead  # as `_follow`, without its call
            ahead.asked_for(index, record.nbytes // record.num_members, knows_dropped=knows_dropped)
            if record.state is State.DISK or record.state is State.READING:
                ahead.depth.wait()
        looks_ahead = ahead is not None or self.books.explicit_prefetch.remove(record)
        if has_changed and (self.books.blocked or self.books.eviction.leaving):
            self._move_out()
        if has_changed or looks_ahead:
            self.go_ahead()

    def _follow(self, ahead: Lookahead[R]) -> bool:
        """From now on, bring back what that graph asks for. Whether it was so before: who is followed is told of what
        is dropped."""
        before, self.books.ahead = self.books.ahead, ahead
        return before is ahead

    def next_member(self, record: R, ahead: Lookahead[R], index: int) -> bool:
        """A thread asks for pack `index`, a member of a group of which others were asked for. False: `ask_for` it.

        The last member of a group that is on disk too is asked for: then its room may be used for what comes next."""
        if record.fetched or record.state not in _AT_REST:
            return False
        if record.device is not None and not self.device.hand_over_again(record):
            return False
        if record.state is State.CLEAN and ahead.is_last(index, record):
            return False
        knows_dropped, self.books.ahead = self.books.ahead is ahead, ahead  # as `_follow`, without its call
        ahead.asked_for(index, record.nbytes // record.num_members, knows_dropped=knows_dropped)
        return True

    def hand_over(self, record: R, reload_ahead: Lookahead[R] | None, index: int) -> bool:
        """Of a record on an accelerator. False: its device has no room for a whole group."""
        has_room = self.up.reload_demanded(record, reload_ahead)
        if has_room:
            self.device.hand_over(record)
            if reload_ahead is not None:
                reload_ahead.asked_for(index)
                self.up.reload_ahead(reload_ahead)
        self.up.used(record)
        return has_room

    def pass_by(self, ahead: Lookahead[R], reload_ahead: Lookahead[R], index: int) -> None:
        """Backward has asked for pack `index`, which is tracked: bring back what comes next."""
        ahead.asked_for(index, knows_dropped=self._follow(ahead))
        reload_ahead.asked_for(index)
        self.go_ahead()
        self.up.reload_ahead(reload_ahead)

    def go_ahead(self) -> None:
        """Restore what lies ahead of backward, then what was named explicitly, if backward wants nothing more for now.

        Not while a pack waits: a prefetch would take the room that it waits for."""
        books = self.books
        if books.is_closed or books.num_packing:
            return
        ahead = books.ahead
        if ahead is not None:
            self.up.prefetch(ahead)
        if books.explicit_prefetch.waiting and not books.blocked and (ahead is None or ahead.peek() is None):
            self.up.prefetch(books.explicit_prefetch)

    def advance(self) -> None:
        """Use the room of what was freed: for blocked records, writes and prefetches. Who waits will be told of it."""
        self._jobs.has_progress = True
        if self.books.blocked or self.books.eviction.leaving:
            self._move_out()
        self.go_ahead()

    def _move_out(self) -> None:
        self.down.admit_blocked(is_awaited=self.books.num_packing > 0)
        self.down.write_behind()
        self._memory.trim()

    def for_room(self, *, has_collected: bool) -> ForRoom | None:
        """What a pack does next: None: it has room. Raises StoreFullError: there is none, nor will be.

        `has_collected`: garbage was collected for it already: graphs in reference cycles may be all that fills a store.
        """
        books = self.books
        if not books.blocked:
            return None
        if self._jobs.num_all or books.num_getting:
            return ForRoom.WAIT
        if has_collected:
            raise self.full_error(books.blocked[0].nbytes) from books.disk_error
        books.windows.keep_tracked(0)  # small tensors give way
        return ForRoom.COLLECT_GARBAGE

    def retry_blocked(self) -> None:
        """A pack has waited, or garbage was collected for it."""
        self.down.admit_blocked(is_awaited=True)
        self._memory.trim()

    def full_error(self, needed_bytes: int) -> StoreFullError:
        found = self.books.disk_error or StoreFullError(needed_bytes, self.books.disk_bytes, self._disk_budget_bytes)
        return replace(
            found,
            needed_bytes=needed_bytes,
            host_bytes=self.books.windows.used_bytes[0],
            host_budget_bytes=self.books.windows.host_bytes,
        )

    # --- the worker's jobs --------------------------------------------------------------------------------------

    def exchange(self, ended: Sequence[tuple[Job[R], Any]], room: Room) -> Sequence[Job[R]]:
        """These jobs of the worker have ended, and it has room for others: return those that it has to begin now.

        With each job that has ended comes its outcome: of a write `Stored`, of a read `Loaded`, or the error."""
        self.device.ask_anew()
        # While a record still holds its job's memory: by that a release knows of the job.
        has_changed = any(self.unaccounted) and self.drain()
        for job, outcome in ended:
            match job:
                case Write(record, _):
                    self._end_write(record, outcome)
                case Read(record, _):
                    self._end_read(record, outcome)
                case Discard(keys):
                    self._end_discard(len(keys))
        if has_changed or ended:
            self.advance()
        reads, writes, keys = self._jobs.take(room)
        begun: list[Job[R]] = []
        for record in reads:
            begun.append(Read(record, self._memory.begin_read(record)))
            self._jobs.running.add(record)
            if (observer := self.books.observer) is not None:
                observer.restore_began(record.key)
        for record in writes:
            self._begin_write(record, begun)
        if keys:
            begun.append(Discard(keys))
        return begun

    def _begin_write(self, record: R, begun: list[Job[R]]) -> None:
        memory = self._memory.begin_write(record)
        if memory is None:  # its handle is dying on another thread, and nobody is told
            self.withdraw(record)
            self.advance()
            return
        record.move(State.WRITING)
        self._jobs.running.add(record)
        if (observer := self.books.observer) is not None:
            observer.spill_began(record.key, record.span_bytes)
        begun.append(Write(record, memory))

    def _end_write(self, record: R, outcome: Stored | Exception) -> None:
        has_moved = self._memory.has_moved(record)
        self._jobs.running.discard(record)
        record.held = None
        self._jobs.num_writes -= 1
        if isinstance(outcome, Stored):
            self.down.note_written(record, outcome)
        if (observer := self.books.observer) is not None:
            observer.spill_ended(record.key, outcome)
        if record.state is not State.WRITING:
            self._end_orphaned_job(record)
        elif has_moved:
            self._leave_moved(record)
        elif isinstance(outcome, Stored):
            record.move(State.CLEAN)
            if record.wanted:
                self.books.eviction.add_clean(record)
            else:
                self.down.drop(record)
        else:
            self.down.stay(record)
            record.planned = None  # not again before it must
            self.books.eviction.add_dirty(record)
            self._note_failure(outcome)

    def _leave_moved(self, record: R) -> None:
        """Discard what was written, which may be other bytes; whoever moved the memory manages it from now on."""
        record.move(State.HOST)
        record.forced = False
        record.claims = None  # the store is never its sole owner again
        if record.stored_bytes:
            self._discard(record)
        self.down.hand_back(record)

    def _note_failure(self, error: Exception) -> None:
        if isinstance(error, StoreFullError):
            self.books.disk_is_full = True
            self.books.disk_error = error
        elif self.books.spill_error is None:
            self.books.spill_error = error

    def _end_read(self, record: R, outcome: Loaded | Exception) -> None:
        self._jobs.running.discard(record)
        self._jobs.num_reads -= 1
        record.held = None
        if self.books.ahead is not None:
            self.books.ahead.depth.read_ended(record.key)
        if (observer := self.books.observer) is not None:
            is_wanted = record.state is State.READING and record.is_alive
            observer.restore_ended(record.key, outcome, is_wanted=is_wanted)
        if record.state is not State.READING:
            self._end_orphaned_job(record)
        elif isinstance(outcome, Exception):
            self._leave_unread(record, outcome)
        elif not self._memory.attach(record):
            record.move(State.DOOMED)  # its handle dies just now, on another thread
            self._bury(record)
        else:
            self._begin_to_use(record)
            self.books.counters.restored_bytes += record.nbytes
            self.books.counters.read_bytes += outcome.read_bytes

    def _begin_to_use(self, record: R) -> None:
        record.fetched = not record.demanded
        record.move(State.CLEAN)
        if not record.demanded:  # else it may not leave before the waiting thread has it
            self.books.eviction.add_clean(record)

    def _leave_unread(self, record: R, error: Exception) -> None:
        self.down.free_memory(record)
        if isinstance(error, CorruptDataError):
            record.move(State.FAILED)
            record.cause = error
        else:
            record.move(State.DISK)
            record.cause = error if record.demanded else None

    def _end_orphaned_job(self, record: R) -> None:
        if record.state is State.CLOSED:
            self.down.free_memory(record)
            self._discard(record)
        else:
            self._bury(record)

    @property
    def has_doomed(self) -> bool:
        return any(record.state is State.DOOMED for record in self._jobs.running)

    def end_jobs(self) -> None:
        """Free the memory of all jobs. The engine has ended: no job runs any more, and none reports back."""
        for record in self._jobs.running:
            record.held = None
            self.down.free_memory(record)
        self._jobs.running.clear()
        self.drain()

    # --- the end of records -------------------------------------------------------------------------------------

    def drain(self) -> bool:
        """Account for what was packed without the lock, for what has died, and for finished copies; returns whether
        there was anything of the last two."""
        device, released = self.device, self.books.released
        if self.books.tracked.grants:
            self.books.end_grants()
        if self._is_abandoned:
            return False
        has_died = bool(released)
        while released:
            self._release(released.popleft())
        has_died |= self._memory.catch_up()
        if device.flights or device.busy:
            device.poll(seldom=True)
        elif not has_died:
            return False
        self._jobs.has_progress = True
        if (observer := self.books.observer) is not None:
            observer.changed()
        return True

    def withdraw(self, record: R) -> None:
        """Remove a record that was refused, or whose handle is dying, whether the handle lives on or not."""
        if record in self.books.blocked:
            self.books.blocked.remove(record)
        self._release(record)

    def _release(self, record: R) -> None:
        """Release a record whose handle is gone; a running job ends it later."""
        if self.books.records.pop(record.key, None) is None:
            return  # it was never registered: the store refused it
        if self.books.explicit_prefetch.is_used:
            self.books.explicit_prefetch.remove(record)
        state = record.state
        if state is State.FREED or (state is State.CLOSED and record.held is not None):
            return  # its job has ended it, or will
        if record.held is not None:
            record.move(State.DOOMED)
            return
        if state is State.QUEUED:
            self.books.counters.cancelled_bytes += record.nbytes
            self._jobs.withdraw_write(record)
            if (observer := self.books.observer) is not None:
                observer.spill_cancelled(record.key, record.nbytes)
        elif state is State.READING:
            self._jobs.withdraw_read(record)
            if (observer := self.books.observer) is not None:
                observer.restore_cancelled(record.key, record.nbytes)
        elif state is State.PENDING:
            self.books.pending.remove(record)
            if record.shared:
                self.books.counters.kept_bytes["alive elsewhere"] += record.nbytes
        self.books.eviction.remove(record)
        self._bury(record)

    def _bury(self, record: R) -> None:
        """Free all that a record still has, on every tier. Its handle is gone, and no job works on it."""
        if record.device is not None:
            self.device.remove(record)
        record.claims = None
        self.down.free_memory(record)
        if record.stored_bytes:
            self._discard(record)
        record.move(State.FREED)

    def _discard(self, record: R) -> None:
        """Its bytes on disk are needed no more. In a closed store they go with all others."""
        self.books.disk_bytes -= record.stored_bytes
        record.stored_bytes = 0
        if not self.books.is_closed:
            self._jobs.discard(record.key)

    def _end_discard(self, num_records: int) -> None:
        self._jobs.num_discards -= num_records
        self.books.disk_is_full = False

    def end_all(self) -> None:
        """Close all records, because the store closes. Running jobs keep the memory that they hold."""
        self.books.is_closed = True
        self.device.stop_asking()
        self.drain()
        for record in self.books.records.values():
            self.books.eviction.remove(record)
            self.device.remove(record)
            self._memory.empty_tensors(record)
            if record.held is None:
                self.down.free_memory(record)
            self._discard(record)
            if record.state is not State.CLOSED:
                record.move(State.CLOSED)
        self._memory.give_up()
        self.books.windows.keep_tracked(0)
        self.books.pending.clear()
        self.books.blocked.clear()
        self.books.explicit_prefetch.clear()
        self._jobs.clear()
        self.drain()

    def validate(self) -> None:
        """Raise InvalidBooksError if the books are not whole; changes nothing. See `validation.py`."""
        if not self._is_abandoned:
            validate(self)

    def abandon(self) -> None:
        """In a forked child: close all records, and free nothing."""
        self.books.is_closed = self._is_abandoned = True
        self.books.tracked.abandon_grants()
        for record in list(self.books.records.values()):
            if record.state is not State.CLOSED:
                record.move(State.CLOSED)
