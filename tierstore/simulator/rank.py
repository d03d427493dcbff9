"""One rank: its training thread, which does what the workload says and waits as the store's `Residency` does."""

from __future__ import annotations

from ..disk.tier import Loaded, Stored
from ..errors import StoreFullError
from ..rules.counters import STALL_CAUSES
from ..rules.device import DeviceRules
from ..rules.device_window import FLIGHT_BYTES, RELOAD_BYTES, DeviceWindow
from ..rules.memory import Submissions
from ..rules.observer import Observer
from ..rules.pending import NUM_EXAMINED_PER_PACK
from ..rules.rules import NUM_PASSED, Rules
from ..rules.state import IN_MEMORY, State
from ..rules.windows import HostWindows
from .clock import Clock, Process, Resume
from .device import SimulatedDevice
from .hardware import Activity
from .memory import SimulatedMemory
from .record import GraphLog, SimulatedRecord
from .workload import Action, Compute, EndScope, LetGo, Pack, Release, Unpack, Workload

_PACK_WAITS, _UNPACK_WAITS = STALL_CAUSES
_ON_DISK_ALONE = frozenset({State.DISK, State.READING})


class Rank:
    """One rank's records, and the thread that trains. Methods as `Residency`'s; those that may wait are processes.

    `device_bytes`, `flight_bytes`, `reload_bytes`: how much may stay on the accelerator, be on its way out, and be
    copied back ahead.
    """

    def __init__(
        self,
        clock: Clock,
        windows: HostWindows,
        copies: SimulatedDevice,
        engine: Submissions[SimulatedRecord],
        disk_bytes: int,
        workload: Workload,
        observer: Observer,
        *,
        device_bytes: int,
        flight_bytes: int = FLIGHT_BYTES,
        reload_bytes: int = RELOAD_BYTES,
    ) -> None:
        window = DeviceWindow[SimulatedRecord](device_bytes, flight_bytes, reload_bytes)
        self.device = DeviceRules[SimulatedRecord](copies, window)
        self._memory = SimulatedMemory(windows, self.device)
        self.ledger = self._memory.ledger
        self.rules = Rules[SimulatedRecord](self.ledger, self._memory, self.device, engine, disk_bytes)
        self.rules.observer = observer
        self._clock = clock
        self._copies = copies
        self._workload = workload
        self._compute = Activity.KERNELS if workload.uses_device else Activity.COMPUTE
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
                yield self._clock.work(self._compute, seconds)
            case Pack(index):
                yield from self._pack_on_device(log, index) if log.saved[index].on_device else self._note(log, index)
            case Unpack(index):
                yield from self._unpack(log, index)
            case LetGo(index):
                log.held.discard(log.root_of(index))
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
        if index in log.tracked:
            self._memory.dead.append((log, index))
        record = log.records[index]
        if record is not None:
            record.users.remove(index)
            if not record.users:
                self.rules.released.append(record)
        if len(log.let_go) == len(log.saved):
            self._memory.ended.append(log)

    def _settle_earlier(self, log: GraphLog, index: int) -> None:
        if log.fresh and log.saved[index].node != log.fresh_node:
            self._settle_fresh(log)

    def _settle_fresh(self, log: GraphLog) -> None:
        self._drain()
        self.rules.pending.settle(log.fresh)
        log.fresh = []

    def _book(self, log: GraphLog, index: int, *, follows_plan: bool) -> Process:
        """See `OffloadScope._book` and `Residency.save`."""
        record = self._memory.join(log, index)
        is_new = record is None
        if record is None:
            self._drain()
            record = log.make_record(index)
        if log.leaving_bytes > self.rules.device_group_bytes:
            log.newest_node = log.saved[index].node
            self._memory.book_leaving(log, self.rules.device_group_bytes)
        self._settle_earlier(log, index)
        if is_new:
            self.ledger.register(record)
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
        if follows_plan and (log.plan is not None or index == 0):
            log.follow_plan(index)
        log.place(index, record)

    def _pack_on_device(self, log: GraphLog, index: int) -> Process:
        is_foreseen = log.tracks or (index > 0 and self.rules.may_gather(log.saved[index].nbytes))
        leaves = self._leaves(log, index) if is_foreseen else None
        if leaves is None:
            yield from self._book(log, index, follows_plan=not is_foreseen)
        else:
            self._settle_earlier(log, index)
            yield from self._track(log, index, leaves=leaves)

    def _leaves(self, log: GraphLog, index: int) -> bool | None:
        """See `OffloadScope._leaves` and `Residency.find_room_to_track`."""
        saved = log.saved[index]
        if index == 0:
            self._drain()
        if log.plan is not None or index == 0:
            log.follow_plan(index)
        if log.is_claimed(index):
            return None
        if not log.tracks or (log.plan is not None and log.plan.leaves(index)):
            return True if self.rules.may_gather(saved.nbytes) else None
        if self.device.window.fits(saved.nbytes) or log.root_of(index) in log.charged:
            return False
        self._settle_earlier(log, index)
        self._drain()
        if self.device.window.fits(saved.nbytes):
            return False
        log.newest_node = saved.node
        if log.leaving:
            self._memory.book_leaving(log, self.rules.device_group_bytes)
        if self.device.window.fits(saved.nbytes):
            return False
        log.tracks = False
        self._memory.book_tracked(log, self.rules.device_group_bytes)
        return None

    def _track(self, log: GraphLog, index: int, *, leaves: bool) -> Process:
        rules, saved = self.rules, log.saved[index]
        log.newest_node = saved.node
        must_act = rules.must_act()
        if leaves and log.leaving_bytes + saved.nbytes > rules.device_group_bytes:
            self._memory.book_leaving(log, rules.device_group_bytes)
            must_act = True
        if must_act:
            self._drain()
            rules.relieve(NUM_EXAMINED_PER_PACK)
            yield from self._make_room()
        self._memory.track(log, index)
        if leaves:
            log.let_leave(index)
        if self.device.flights:
            self.device.bound_flight()

    def _note(self, log: GraphLog, index: int) -> Process:
        rules, saved = self.rules, log.saved[index]
        self._settle_earlier(log, index)
        log.newest_node, log.is_settled = saved.node, False
        new_bytes = 0 if log.root_of(index) in log.num_noted else saved.nbytes
        is_short = rules.is_short_of(new_bytes)
        is_planned = log.plan is not None and not rules.may_wait
        is_short |= is_planned
        if is_short and (rules.must_examine() or log.unread_record_of(index) is None):
            self._drain()
            rules.relieve(NUM_EXAMINED_PER_PACK, is_planned=is_planned)
            yield from self._make_room()
            rules.is_short_of(new_bytes)
        new_bytes = self._memory.note(log, index)
        if rules.uses_staging:
            rules.charge_noted(new_bytes)
        if is_short:
            self._memory.join_if_booked(log, index)
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
            log.taken = log.root_of(index)
            self._ask(log, index)
            if log.saved[index].on_device:
                self._pass_by(log, index)
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
            self.rules.end_plan(log.records)
            self._survey(log)
            if any(record is not None and record.state is not State.PENDING for record in log.records):
                log.look_ahead()
            if log.order.is_followed and log.records[index] is None:
                self._drain()
                self.rules.ahead = log.order.lookahead
                self.rules.go_ahead()
        log.order.asked_for[index] = None

    def _pass_by(self, log: GraphLog, index: int) -> None:
        order = log.order
        if order.is_followed:
            if not log.num_passed % NUM_PASSED:
                self._drain()
                self.rules.pass_by(order.lookahead, order.reload_ahead, index)
            log.num_passed += 1

    def _survey(self, log: GraphLog) -> None:
        self._drain()
        if log.tracked and not (log.tracks and self.device.window.fits(0)):
            self._memory.book_tracked(log, self.rules.device_group_bytes)
        elif log.leaving:
            self._memory.book_leaving(log, self.rules.device_group_bytes, may_wait=False)
        self.rules.relieve(None)
        self._memory.survey(log)
        self.rules.pending.survey()

    def _fetch(self, log: GraphLog, record: SimulatedRecord, index: int) -> Process:
        rules, order = self.rules, log.order
        lookahead, reload_ahead = (order.lookahead, order.reload_ahead) if order.is_followed else (None, None)
        if record.num_members > 1 and lookahead is not None and rules.next_member(record, lookahead, index):
            return
        self._drain()
        rules.ask_for(record, lookahead, index)
        if record.state in IN_MEMORY:
            rules.hand_over(record, reload_ahead, index)
            return
        record.demanded += 1
        if record.state is State.QUEUED:
            rules.cancel_spill(record)
        while record.state not in IN_MEMORY:
            rules.hasten(record)
            yield from self._wait(_UNPACK_WAITS, record)
        rules.hand_over(record, reload_ahead, index)
        record.demanded -= 1
        rules.used(record)
        self._advance()
        if record.device is None and record.state in _ON_DISK_ALONE:
            self._memory.give_back_lent()  # whoever was given it is about to let go

    def _wait(self, cause: str, record: SimulatedRecord | None = None) -> Process:
        began_seconds = self._clock.now_seconds
        yield self._waiting.append
        seconds = self._clock.now_seconds - began_seconds
        self.ledger.counters.stall_seconds[cause] += seconds
        self.rules.observer.stalled(seconds, cause, None if record is None else record.key)
        self._drain()

    # --- the engine ---------------------------------------------------------------------------------------------------

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

    def _drain(self) -> None:
        if self.rules.drain():
            self._advance()

    def _advance(self) -> None:
        self.rules.advance()
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            self._clock.call_soon(resume)
