"""One rank: its training thread, which does what the workload says and waits as the store's `Residency` does."""

from __future__ import annotations

from ..disk.tier import Loaded, Stored
from ..errors import StoreFullError
from ..ledger.counters import STALL_CAUSES
from ..ledger.device import DeviceRules
from ..ledger.device_window import DeviceWindow
from ..ledger.ledger import Ledger
from ..ledger.memory import Submissions
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
        engine: Submissions[SimulatedRecord],
        disk_bytes: int,
        workload: Workload,
        observer: Observer,
    ) -> None:
        no_device = DeviceRules[SimulatedRecord](None, DeviceWindow(0, 0, 0))  # type: ignore[arg-type]
        self._memory = SimulatedMemory(windows)
        self.books = self._memory.books
        self.ledger = Ledger[SimulatedRecord](self.books, self._memory, no_device, engine, disk_bytes)
        self.ledger.observer = observer
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

    def _let_go(self, log: GraphLog, index: int) -> None:
        """The graph lets go of a saved tensor: with the last one of a record, that is in the queue to be released."""
        if index in log.let_go:
            return
        log.release(index)
        record = log.records[index]
        if record is not None:
            record.users.remove(index)
            if not record.users:
                self.ledger.released.append(record)
        if len(log.let_go) == len(log.saved):
            self._memory.ended.append(log)

    def _note(self, log: GraphLog, index: int) -> Process:
        ledger, saved = self.ledger, log.saved[index]
        log.newest_node, log.is_settled = saved.node, False
        new_bytes = 0 if log.root_of(index) in log.num_noted else saved.nbytes
        is_short = ledger.is_short_of(new_bytes)
        is_planned = log.plan is not None and not ledger.may_wait
        is_short |= is_planned
        if is_short and (ledger.must_examine() or log.unread_record_of(index) is None):
            self._drain()
            ledger.relieve(NUM_EXAMINED_PER_PACK, is_planned=is_planned)
            yield from self._make_room()
            ledger.is_short_of(new_bytes)
        new_bytes = self._memory.note(log, index)
        if ledger.uses_staging:
            ledger.charge_noted(new_bytes)
        if is_short:
            self._memory.join_if_booked(log, index)
        if log.plan is not None or index == 0:
            log.follow_plan(index)

    def _make_room(self) -> Process:
        ledger = self.ledger
        collected = False
        while ledger.blocked:
            if ledger.num_jobs:
                ledger.num_packing += 1
                yield from self._wait(_PACK_WAITS)
                ledger.num_packing -= 1
            elif not collected:
                collected = True
                self._drain()
                ledger.disk_is_full = False
            else:
                raise ledger.full_error(ledger.blocked[0].nbytes)
            ledger.admit_blocked(is_awaited=True)

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
            self.ledger.end_plan(log.records)
            self._survey(log)
            if any(record is not None and record.state is not State.PENDING for record in log.records):
                log.look_ahead()
            if log.order.is_followed and log.records[index] is None:
                self._drain()
                self.ledger.ahead = log.order.lookahead
                self.ledger.go_ahead()
        log.order.asked_for[index] = None

    def _survey(self, log: GraphLog) -> None:
        self._drain()
        self.ledger.relieve(None)
        self._memory.survey(log)
        self.ledger.pending.survey()

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
            ledger.cancel_spill(record)
        while record.state not in IN_MEMORY:
            ledger.hasten(record)
            yield from self._wait(_UNPACK_WAITS, record)
        ledger.hand_over(record, None, index)
        record.demanded -= 1
        ledger.used(record)
        self._advance()
        if record.state in _ON_DISK_ALONE:
            self._memory.give_back_lent()  # whoever was given it is about to let go

    def _wait(self, cause: str, record: SimulatedRecord | None = None) -> Process:
        began_seconds = self._clock.now_seconds
        yield self._waiting.append
        seconds = self._clock.now_seconds - began_seconds
        self.books.counters.stall_seconds[cause] += seconds
        self.ledger.observer.stalled(seconds, cause, None if record is None else record.key)
        self._drain()

    # --- the engine ---------------------------------------------------------------------------------------------------

    def begin_spill(self, record: SimulatedRecord) -> bool:
        self._drain()
        return self.ledger.begin_write(record)

    def end_spill(self, record: SimulatedRecord, outcome: Stored | StoreFullError) -> None:
        self.ledger.end_write(record, outcome)
        self._advance()

    def begin_restore(self, record: SimulatedRecord) -> bool:
        self._drain()
        return self.ledger.begin_read(record)

    def end_restore(self, record: SimulatedRecord, outcome: Loaded) -> None:
        self.ledger.end_read(record, outcome)
        self._advance()

    def end_discard(self, num_records: int) -> None:
        self.ledger.end_discards(num_records)
        self._advance()

    def _drain(self) -> None:
        if self.ledger.drain():
            self._advance()

    def _advance(self) -> None:
        self.ledger.advance()
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            self._clock.call_soon(resume)
