"""One rank: its training thread, which does what the workload says and waits as the store's `Residency` does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from ..ledger.books import NUM_SCANNED_PER_PACK
from ..ledger.counters import STALL_CAUSES
from ..ledger.device import DeviceRules
from ..ledger.device_window import DeviceWindow
from ..ledger.graph_order import Budgets, GraphOrder
from ..ledger.jobs import Job, Room
from ..ledger.ledger import ForRoom, Ledger
from ..ledger.lookahead import LearnedOrders, Lookahead
from ..ledger.observer import Observer
from ..ledger.state import IN_MEMORY, State
from ..ledger.windows import HostWindows, Window
from .clock import Clock, Process, Resume
from .hardware import Activity
from .memory import SimulatedMemory
from .record import SimulatedLog, SimulatedRecord, SimulatedStorage, SimulatedTensor
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
        no_device = DeviceRules[SimulatedRecord](None, DeviceWindow(Window(0), 0, 0))  # type: ignore[arg-type]
        self._memory = SimulatedMemory(windows)
        self.books = self._memory.books
        self.ledger = Ledger[SimulatedRecord](self.books, self._memory, no_device, disk_bytes)
        self.books.observer = observer
        self._wake = wake  # the worker
        self._clock = clock
        self._workload = workload
        self._log: SimulatedLog | None = None
        self._graph: dict[int, SimulatedTensor] = {}
        self._storages: dict[int, SimulatedStorage] = {}  # by the first saved tensor of each
        self._keys = count()
        self._fresh: list[SimulatedRecord] = []  # as `OffloadScope._fresh`
        self._fresh_node = -1
        self._waiting: list[Resume] = []  # for progress, as training threads wait for a condition

    # --- the training thread ------------------------------------------------------------------------------------------

    def begin(self, orders: LearnedOrders | None, lookahead_bytes: int | None) -> None:
        """A step begins. `orders`: None: the reverse-topological order is followed."""
        host_bytes, staging_bytes = self.books.windows.limits
        budgets = Budgets(host_bytes, 0, staging_bytes)
        order = GraphOrder[SimulatedRecord](orders, budgets, lookahead_bytes, host_bytes + staging_bytes)
        self._log = SimulatedLog(self, order, self._memory.tracked.begin)
        held = {self._root_of(action.saved) for action in self._workload.actions if isinstance(action, LetGo)}
        self._storages = {
            index: SimulatedStorage(is_shared=saved.is_shared, is_held=index in held)
            for index, saved in enumerate(self._workload.saved)
            if saved.record is None
        }

    def end(self) -> None:
        """All of the graph is gone. As in the store, that is noticed only when something is drained."""
        self._graph.clear()
        self._log = None

    def act(self, action: Action) -> Process:
        match action:
            case Compute(seconds):
                yield self._clock.work(Activity.COMPUTE, seconds)
            case Pack(index):
                yield from self._track(index)
            case Unpack(index):
                yield from self._unpack(self._graph[index])
            case LetGo(index):
                self._storages[self._root_of(index)].let_go()
            case Release(index):
                self._graph.pop(index, None)
                if self._log is not None and not self._graph and self._log.num_packs == len(self._workload.saved):
                    self._log = None  # nobody else holds it
            case EndScope():
                self._settle_fresh()
                if self._log is not None:
                    self._log.settle()
                    self._scan_owners(self._log)
        self._tell()

    def _root_of(self, index: int) -> int:
        """The first saved tensor of the same storage."""
        root = self._workload.saved[index].record
        return index if root is None else root

    def _track(self, index: int) -> Process:
        down, registration = self.ledger.down, self._memory.registration
        log, saved = self._log, self._workload.saved[index]
        if log is None:
            raise RuntimeError(f"tensor {index} is packed after its graph")
        tracked = SimulatedTensor(saved, self._storages[self._root_of(index)], next(self._keys), log)
        is_large, is_new = saved.nbytes > self.books.windows.large_bytes, not registration.may_be_registered(tracked)
        is_new = is_new and (tracked.storage_id, saved.nbytes) not in log.num_tracked
        if log.registers_large and is_large and is_new:
            yield from self._register(index, tracked)
            return
        if self._fresh and saved.node != self._fresh_node:
            self._settle_fresh()
        log.newest_node = saved.node
        new_bytes = 0 if (tracked.storage_id, saved.nbytes) in log.num_tracked else saved.nbytes
        is_short, uses_staging, may_wait, _ = down.room_for(new_bytes)
        is_planned = log.plan is not None and not may_wait
        is_short |= is_planned
        if is_short and (self.books.must_act() or not registration.is_registered(tracked)):
            self._drain()
            down.reclaim(NUM_SCANNED_PER_PACK, is_planned=is_planned)
            yield from self._make_room()
            is_short_still, uses_staging, _, _ = down.room_for(new_bytes)
            log.registers_large |= (is_short_still or is_planned) and is_large
        self.books.counters.packed_tensors += 1
        new_bytes = self._memory.tracked.add(tracked, saved.node, saved.nbytes)
        tracked.storage.tensors.append(weakref.ref(tracked))
        self._graph[index] = tracked
        if uses_staging:
            down.charge_tracked(new_bytes)
        if is_short:
            registration.join_if_registered(tracked)
        if log.plan is not None or index == 0:
            log.follow_plan(index, ((saved.node, saved.nbytes),))

    def _register(self, index: int, tracked: SimulatedTensor) -> Process:
        """As `OffloadScope._register` and `Saving.save` do, for a new record."""
        log, node, books = tracked.log, tracked.saved.node, self.books
        fresh = self._fresh if node != self._fresh_node else []
        tracked.handle = self._memory.registration.new_handle(tracked)
        record = tracked.handle.record
        self._drain()
        log.newest_node = node
        books.pending.settle(fresh)
        fresh.clear()
        books.records[record.key] = record
        books.counters.packed_tensors += 1
        self.ledger.down.reclaim(NUM_SCANNED_PER_PACK, is_planned=log.plan is not None)
        yield from self._make_room()
        tracked.index = log.append_registered(record, node)
        self._fresh.append(record)
        self._fresh_node = node
        self._graph[index] = tracked
        log.follow_plan(index, ((node, tracked.saved.nbytes),))
        log.assign(record, index)

    def _settle_fresh(self) -> None:
        self._drain()
        self.books.pending.settle(self._fresh)
        self._fresh = []

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

    def _unpack(self, saved: SimulatedTensor) -> Process:
        log, index, is_tracked = saved.log, saved.index, saved.handle is None
        saved.storage.is_taken = is_tracked
        if not log.started:
            log.start(index)
        log.asked[index] = None
        saved.storage.is_taken = False
        record = log.records[index]
        if is_tracked or record is None:
            return
        if not log.order.is_followed and record.state is not State.PENDING:
            log.look_ahead()
        yield from self._fetch(log, record, index)

    def begin_backward(self, log: SimulatedLog) -> None:
        self.ledger.down.end_plan(log.records)
        self._scan_owners(log)

    def look_ahead(self, lookahead: Lookahead[SimulatedRecord]) -> None:
        self._drain()
        self.books.ahead = lookahead
        self.ledger.go_ahead()

    def _scan_owners(self, log: SimulatedLog) -> None:
        self._drain()
        self.ledger.down.reclaim(None)
        self._memory.registration.scan_owners(log)
        self.books.pending.scan_owners()

    def _fetch(self, log: SimulatedLog, record: SimulatedRecord, index: int) -> Process:
        ledger, lookahead = self.ledger, log.order.lookahead if log.order.is_followed else None
        if record.num_members > 1 and lookahead is not None and ledger.next_member(record, lookahead, index):
            return
        ledger.ask_for(record, lookahead, index)
        if record.state in IN_MEMORY:
            ledger.hand_over(record, None, index)
            return
        record.demanded += 1
        if record.state is State.QUEUED:
            ledger.down.cancel_spill(record)
        while record.state not in IN_MEMORY:
            ledger.up.raise_priority(record)
            yield from self._wait(_UNPACK_WAITS, record)
        ledger.hand_over(record, None, index)
        record.demanded -= 1
        ledger.up.used(record)
        self._advance()
        if record.state in _ON_DISK_ALONE:
            self._memory.give_back_outstanding()  # whoever was given it is about to let go

    def _wait(self, cause: str, record: SimulatedRecord | None = None) -> Process:
        self._tell()
        began_seconds = self._clock.now_seconds
        yield self._waiting.append
        seconds = self._clock.now_seconds - began_seconds
        self.books.counters.stall_seconds[cause] += seconds
        if (observer := self.books.observer) is not None:
            observer.stalled(seconds, cause, None if record is None else record.key)
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
