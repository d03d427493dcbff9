"""One rank: its training thread, which does what the workload says and waits as the store's `Residency` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..ledger.counters import STALL_CAUSES
from ..ledger.device import DeviceRules
from ..ledger.device_window import DeviceWindow
from ..ledger.jobs import Job, Room
from ..ledger.ledger import ForRoom, Ledger
from ..ledger.observer import Observer
from ..ledger.pending import NUM_EXAMINED_PER_PACK
from ..ledger.state import IN_MEMORY, State
from ..ledger.windows import HostWindows
from .clock import Clock, Process, Resume
from .hardware import Activity
from .memory import SimulatedMemory
from .record import GraphLog, SimulatedRecord
from .workload import Action, Compute, EndScope, LetGo, Pack, Release, Unpack, Workload

_PACK_WAITS, _UNPACK_WAITS = STALL_CAUSES
_ON_DISK_ALONE = frozenset({State.DISK, State.READING})


class Rank:
    """One rank's records, and the thread that trains. Methods as `Residency`'s; those that may wait are processes."""

    def __init__(
        self,
        clock: Clock,
        windows: HostWindows,
        wake: Callable[[], None],
        disk_bytes: int,
        workload: Workload,
        observer: Observer,
    ) -> None:
        no_device = DeviceRules[SimulatedRecord](None, DeviceWindow(0, 0, 0))  # type: ignore[arg-type]
        self._memory = SimulatedMemory(windows)
        self.books = self._memory.books
        self.ledger = Ledger[SimulatedRecord](self.books, self._memory, no_device, disk_bytes)
        self.books.observer = observer
        self._wake = wake  # the worker
        self._clock = clock
        self._workload = workload
        self._waiting: list[Resume] = []  # for progress, as training threads wait for a condition

    # --- the training thread ------------------------------------------------------------------------------------------

    def begin(self, log: GraphLog) -> None:
        log.held.update(log.root_of(action.saved) for action in self._workload.actions if isinstance(action, LetGo))
        self._memory.log = log

    def end(self, log: GraphLog) -> None:
        """All of the graph is gone. As in the store, that is noticed only when something is drained."""
        for index in range(len(log.records)):
            self._let_go(log, index)

    def act(self, log: GraphLog, action: Action) -> Process:
        match action:
            case Compute(seconds):
                yield self._clock.work(Activity.COMPUTE, seconds)
            case Pack(index):
                yield from self._note(log, index)
            case Unpack(index):
                yield from self._unpack(log, index)
            case LetGo(index):
                log.held.discard(log.root_of(index))
            case Release(index):
                self._let_go(log, index)
            case EndScope():
                log.is_settled = True
                self._survey(log)
        self._tell()

    def _let_go(self, log: GraphLog, index: int) -> None:
        """The graph lets go of a saved tensor: with the last one of a record, that is in the queue to be released."""
        if index in log.let_go:
            return
        log.release(index)
        record = log.records[index]
        if record is not None:
            record.users.remove(index)
            if not record.users:
                self.books.released.append(record)
        if len(log.let_go) == len(log.saved):
            self._memory.ended.append(log)

    def _note(self, log: GraphLog, index: int) -> Process:
        down, saved = self.ledger.down, log.saved[index]
        log.newest_node, log.is_settled = saved.node, False
        new_bytes = 0 if log.root_of(index) in log.num_noted else saved.nbytes
        is_short = down.is_short_of(new_bytes)
        is_planned = log.plan is not None and not down.may_wait
        is_short |= is_planned
        if is_short and (self.books.must_act() or log.unread_record_of(index) is None):
            self._drain()
            down.relieve(NUM_EXAMINED_PER_PACK, is_planned=is_planned)
            yield from self._make_room()
            down.is_short_of(new_bytes)
        new_bytes = self._memory.note(log, index)
        if down.uses_staging:
            down.charge_noted(new_bytes)
        if is_short:
            self._memory.join_if_booked(log, index)
        if log.plan is not None or index == 0:
            log.follow_plan(index)

    def _make_room(self) -> Process:
        has_collected = False
        while (needed := self.ledger.for_room(has_collected=has_collected)) is not None:
            if needed is ForRoom.WAIT:
                self.books.num_packing += 1
                yield from self._wait(_PACK_WAITS)
                self.books.num_packing -= 1
            else:
                has_collected = True
                self._drain()
                self.books.disk_is_full = False
            self.ledger.retry_blocked()

    def _unpack(self, log: GraphLog, index: int) -> Process:
        """See `SavedTensor.unpack` and `PackLog.fetch`."""
        record = log.records[index]
        if record is None:
            log.taken = log.root_of(index)
            self._ask(log, index)
            log.taken = None
            return
        self._ask(log, index)
        if not log.order.is_followed and record.state is not State.PENDING:
            log.look_ahead()
        yield from self._fetch(log, record, index)

    def _ask(self, log: GraphLog, index: int) -> None:
        if not log.is_started:
            log.is_started = True
            log.plan = None
            self.ledger.down.end_plan(log.records)
            self._survey(log)
            if any(record is not None and record.state is not State.PENDING for record in log.records):
                log.look_ahead()
            if log.order.is_followed and log.records[index] is None:
                self._drain()
                self.books.ahead = log.order.lookahead
                self.ledger.go_ahead()
        log.order.asked_for[index] = None

    def _survey(self, log: GraphLog) -> None:
        self._drain()
        self.ledger.down.relieve(None)
        self._memory.survey(log)
        self.books.pending.survey()

    def _fetch(self, log: GraphLog, record: SimulatedRecord, index: int) -> Process:
        ledger, lookahead = self.ledger, log.order.lookahead if log.order.is_followed else None
        if record.num_members > 1 and lookahead is not None and ledger.next_member(record, lookahead, index):
            return
        self._drain()
        ledger.ask_for(record, lookahead, index)
        if record.state in IN_MEMORY:
            ledger.hand_over(record, None, index)
            return
        record.demanded += 1
        if record.state is State.QUEUED:
            ledger.down.cancel_spill(record)
        while record.state not in IN_MEMORY:
            ledger.up.hasten(record)
            yield from self._wait(_UNPACK_WAITS, record)
        ledger.hand_over(record, None, index)
        record.demanded -= 1
        ledger.up.used(record)
        self._advance()
        if record.state in _ON_DISK_ALONE:
            self._memory.give_back_lent()  # whoever was given it is about to let go

    def _wait(self, cause: str, record: SimulatedRecord | None = None) -> Process:
        self._tell()
        began_seconds = self._clock.now_seconds
        yield self._waiting.append
        seconds = self._clock.now_seconds - began_seconds
        self.books.counters.stall_seconds[cause] += seconds
        self.books.observer.stalled(seconds, cause, None if record is None else record.key)
        self._drain()

    # --- the worker ---------------------------------------------------------------------------------------------------

    def exchange(self, ended: Sequence[tuple[Job[SimulatedRecord], Any]], room: Room) -> Sequence[Job[SimulatedRecord]]:
        begun = self.ledger.exchange(ended, room)
        self._notify()
        self._tell()
        return begun

    def _tell(self) -> None:
        if self.books.jobs.has_news:
            self.books.jobs.has_news = False
            self._wake()

    def _drain(self) -> None:
        if self.ledger.drain():
            self._advance()

    def _advance(self) -> None:
        self.ledger.advance()
        self._notify()

    def _notify(self) -> None:
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            self._clock.call_soon(resume)
