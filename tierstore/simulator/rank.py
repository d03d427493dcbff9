"""One rank: its training thread, which does what the workload says and waits as the store's `Residency` does."""

from __future__ import annotations

from ..disk.tier import Loaded, Stored
from ..errors import StoreFullError
from ..rules.counters import STALL_CAUSES
from ..rules.ledger import Ledger
from ..rules.memory import Submissions
from ..rules.observer import Observer
from ..rules.pending import NUM_EXAMINED_PER_PACK
from ..rules.rules import Rules
from ..rules.state import IN_MEMORY, State
from ..rules.windows import HostWindows
from .clock import Clock, Process, Progress
from .copies import VirtualCopies
from .device import SimulatedDevice
from .hardware import Activity
from .memory import SimulatedBooking, SimulatedMemory, SimulatedNoted, is_sole_owner
from .record import GraphLog, SimulatedRecord
from .workload import Action, Compute, EndScope, LetGo, Pack, Release, Unpack, Workload

__all__ = ["Rank"]

_PACK_WAITS, _UNPACK_WAITS = STALL_CAUSES
_ON_DISK_ALONE = frozenset({State.DISK, State.READING})


class Rank:
    """One rank's records, and the thread that trains. Methods as `Residency`'s; those that may wait are processes.

    Args:
        clock: what it waits by.
        windows: the windows of host memory.
        device: its accelerator.
        copies: of that accelerator.
        engine: moves its bytes.
        disk_bytes: its budget on disk.
        workload: what a step does.
        observer: is told of every move.

    Attributes:
        rules: what is decided, and the state of it.
        ledger: what is booked.
        device: as above.
    """

    def __init__(
        self,
        clock: Clock,
        windows: HostWindows,
        device: SimulatedDevice,
        copies: VirtualCopies,
        engine: Submissions[SimulatedRecord],
        disk_bytes: int,
        workload: Workload,
        observer: Observer,
    ) -> None:
        self.device = device
        noted = SimulatedNoted(windows)
        self.ledger = Ledger[SimulatedRecord](windows, noted, is_sole_owner)
        self._booking = SimulatedBooking(self.ledger, noted)
        self._memory = SimulatedMemory(self._booking, device)
        self.rules = Rules[SimulatedRecord](self.ledger, self._memory, device, engine, disk_bytes)
        self.rules.observer = observer
        self._noted = noted
        self._clock = clock
        self._copies = copies
        self._workload = workload
        self._compute = Activity.KERNELS if workload.uses_device else Activity.COMPUTE
        self._progress = Progress(clock)

    # --- the training thread ------------------------------------------------------------------------------------------

    def begin(self, log: GraphLog) -> None:
        """A graph begins."""
        log.held.update(log.root_of(action.saved) for action in self._workload.actions if isinstance(action, LetGo))
        self._booking.begin_graph(log)

    def end(self, log: GraphLog) -> None:
        """All of the graph is gone. As in the store, that is noticed only when something is drained."""
        for index in range(len(log.records)):
            self._let_go(log, index)

    def act(self, log: GraphLog, action: Action) -> Process:
        """Do what the workload says next; may wait."""
        match action:
            case Compute(seconds):
                yield self._clock.work(self._compute, seconds)
            case Pack(index):
                yield from self._pack(log, index)
            case Unpack(index):
                yield from self._unpack(log, index)
            case LetGo(index):
                log.others_let_go(index)
            case Release(index):
                self._let_go(log, index)
            case EndScope():
                self._settle_fresh(log)
                log.is_settled = True
                self._survey(log)
        yield from self._copies.catch_up()

    def _let_go(self, log: GraphLog, index: int) -> None:
        """The graph lets go of a saved tensor: with the last one of a record, that is in the queue to be released."""
        if index in log.let_go:
            return
        log.release(index)
        record = log.records[index]
        if record is not None:
            record.users.remove(index)
            if not record.users:
                self.rules.released.append(record)
        if len(log.let_go) == len(log.saved):
            self._noted.ended.append(log)

    def _pack(self, log: GraphLog, index: int) -> Process:
        saved = log.saved[index]
        if log.fresh and saved.node != log.fresh_node:
            self._settle_fresh(log)
        if saved.on_device:
            yield from self._book(log, index)
        else:
            yield from self._note(log, index)

    def _settle_fresh(self, log: GraphLog) -> None:
        self._drain()
        self.rules.pending.settle(log.fresh)
        log.fresh = []

    def _book(self, log: GraphLog, index: int) -> Process:
        """See `OffloadScope._book` and `Residency.track`."""
        record = self._booking.join(log, index)
        if record is None:
            self._drain()
            record = self._booking.register(log, index)
            self.rules.relieve(NUM_EXAMINED_PER_PACK)
            try:
                yield from self._make_room()
            except StoreFullError:
                self.rules.withdraw(record)
                self._advance()
                raise
            log.fresh.append(record)
            log.fresh_node = log.saved[index].node
        log.enter(index, record)
        if log.plan is not None or index == 0:
            log.follow_plan(index)
            log.place(index, record)

    def _note(self, log: GraphLog, index: int) -> Process:
        rules, saved = self.rules, log.saved[index]
        log.newest_node, log.is_settled = saved.node, False
        is_short = rules.is_short_of(saved.nbytes)
        is_planned = log.plan is not None and not rules.uses_staging
        is_short |= is_planned
        if is_short:
            self._drain()
            rules.relieve(NUM_EXAMINED_PER_PACK, is_planned=is_planned)
            yield from self._make_room()
        self._booking.note(log, index)
        if is_short:
            self._booking.join_if_booked(log, index)
        elif rules.uses_staging:
            rules.charge_noted(saved.nbytes)
        if log.plan is not None or index == 0:
            log.follow_plan(index)

    def _make_room(self) -> Process:
        rules = self.rules
        collected = False
        while rules.blocked:
            if rules.num_jobs:
                rules.num_packing += 1
                yield from self._wait(_PACK_WAITS)
                rules.num_packing -= 1
            elif not collected:
                collected = True
                self._drain()
                rules.disk_is_full = False
            else:
                raise rules.full_error(rules.blocked[0].nbytes)
            rules.admit_blocked(is_awaited=True)

    def _unpack(self, log: GraphLog, index: int) -> Process:
        """See `SavedTensor.unpack` and `PackLog.fetch`."""
        record = log.records[index]
        if record is None:
            log.begin_to_take(index)
            self._ask(log, index)
            log.end_to_take()
            return
        self._ask(log, index)
        if not log.order.is_followed and record.state is not State.PENDING:
            log.look_ahead()
        yield from self._fetch(log, record, index)

    def _ask(self, log: GraphLog, index: int) -> None:
        if not log.is_started:
            self._start(log)
            if log.order.is_followed and log.records[index] is None:
                self._drain()
                self.rules.ahead = log.order.lookahead
                self.rules.go_ahead()
        log.ask_for(index)

    def _start(self, log: GraphLog) -> None:
        log.is_started = True
        log.plan = None
        self.rules.end_plan(log.records)
        self._survey(log)
        if any(record is not None and record.state is not State.PENDING for record in log.records):
            log.look_ahead()

    def _survey(self, log: GraphLog) -> None:
        self._drain()
        self.rules.relieve(None)
        self._booking.survey(log)
        self.rules.pending.survey()

    def _fetch(self, log: GraphLog, record: SimulatedRecord, index: int) -> Process:
        rules, lookahead = self.rules, log.order.lookahead if log.order.is_followed else None
        self._drain()
        rules.ask_for(record, lookahead, index)
        if record.state in IN_MEMORY:
            self._hand_over(log, record, index)
            return
        record.demanded += 1
        yield from self._await_bytes(record)
        self._hand_over(log, record, index)
        record.demanded -= 1
        rules.used(record)
        self._advance()
        if record.device is None and record.state in _ON_DISK_ALONE:
            self._memory.give_back_lent()  # whoever was given it is about to let go

    def _hand_over(self, log: GraphLog, record: SimulatedRecord, index: int) -> None:
        self.rules.hand_over(record, log.order.reload_ahead if log.order.is_followed else None, index)

    def _await_bytes(self, record: SimulatedRecord) -> Process:
        if record.state is State.QUEUED:
            self.rules.cancel_spill(record)
        while record.state not in IN_MEMORY:
            self.rules.hasten(record)
            yield from self._wait(_UNPACK_WAITS, record)

    def _wait(self, cause: str, record: SimulatedRecord | None = None) -> Process:
        began_seconds = self._clock.now_seconds
        yield self._progress.wait
        seconds = self._clock.now_seconds - began_seconds
        self.ledger.counters.stall_seconds[cause] += seconds
        self.rules.observer.stalled(seconds, cause, None if record is None else record.key)
        self._drain()

    # --- the engine --------------------------------------------------------------------------------------------------

    def begin_spill(self, record: SimulatedRecord) -> bool:
        self._drain()
        return self.rules.begin_write(record)

    def end_spill(self, record: SimulatedRecord, outcome: Stored | StoreFullError) -> None:
        self.rules.end_write(record, outcome)
        self._advance()

    def begin_restore(self, record: SimulatedRecord) -> bool:
        self._drain()
        return self.rules.begin_read(record)

    def end_restore(self, record: SimulatedRecord, outcome: Loaded) -> None:
        self.rules.end_read(record, outcome)
        self._advance()

    def end_discard(self, num_records: int) -> None:
        self.rules.end_discards(num_records)
        self._advance()

    # --- both ---------------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        if self.rules.drain():
            self._advance()

    def _advance(self) -> None:
        self.rules.advance()
        self._progress.notify_all()
