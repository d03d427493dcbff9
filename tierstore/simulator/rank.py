"""One rank: its training thread, which does what the workload says and waits as `residency.py` does, and its books."""

from __future__ import annotations

from ..disk.tier import Loaded, Stored
from ..errors import StoreFullError
from ..handle import IN_MEMORY, State
from ..pending import NUM_EXAMINED_PER_PACK
from ..stats import STALL_CAUSES
from .clock import Clock, Process, Progress
from .copies import Copies
from .hardware import Activity
from .moves import SimulatedMoves
from .record import GraphLog, SimulatedRecord
from .workload import Action, Compute, EndScope, LetGo, Pack, Release, Unpack, Workload

__all__ = ["Rank"]

_PACK_WAITS, _UNPACK_WAITS = STALL_CAUSES
_ON_DISK_ALONE = frozenset({State.DISK, State.READING})


class Rank:
    """Drives the moves of one rank. Methods as `Residency`'s; those that may wait are processes.

    Args:
        clock: what it waits by.
        moves: its records.
        copies: of its accelerator.
        workload: what a step does.
    """

    def __init__(self, clock: Clock, moves: SimulatedMoves, copies: Copies, workload: Workload) -> None:
        self._clock = clock
        self._moves = moves
        self._copies = copies
        self._workload = workload
        self._compute = Activity.KERNELS if workload.uses_device else Activity.COMPUTE
        self._progress = Progress(clock)
        self._num_packing = 0

    # --- the training thread ------------------------------------------------------------------------------------------

    def begin(self, log: GraphLog) -> None:
        """A graph begins."""
        log.held.update(log.root_of(action.saved) for action in self._workload.actions if isinstance(action, LetGo))
        self._moves.begin_graph(log)

    def end(self) -> None:
        """All of the graph is gone."""
        self._moves.end_graph()

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
                self._moves.let_go(index)
            case EndScope():
                self._settle_fresh(log)
                log.is_settled = True
                self._survey()
        yield from self._copies.catch_up()

    def _pack(self, log: GraphLog, index: int) -> Process:
        """See `OffloadScope.pack`."""
        saved = log.saved[index]
        if log.fresh and saved.node != log.fresh_node:
            self._settle_fresh(log)
        if saved.on_device:
            yield from self._book(log, index)
        else:
            yield from self._note(log, index)

    def _settle_fresh(self, log: GraphLog) -> None:
        self._drain()
        self._moves.pending.settle(log.fresh)
        log.fresh = []

    def _book(self, log: GraphLog, index: int) -> Process:
        """See `OffloadScope._book` and `Residency.track`."""
        moves = self._moves
        record = moves.join(index)
        if record is None:
            self._drain()
            record = log.make_record(index)
            moves.counters.packed_tensors += 1
            self._drain()
            moves.relieve(NUM_EXAMINED_PER_PACK)
            try:
                yield from self._make_room()
            except StoreFullError:
                moves.withdraw(record)
                self._advance()
                raise
            log.fresh.append(record)
            log.fresh_node = log.saved[index].node
        log.enter(index, record)
        if log.plan is not None or index == 0:
            log.follow_plan(index)
            log.place(index, record)

    def _note(self, log: GraphLog, index: int) -> Process:
        """See `Residency.note`."""
        moves, saved = self._moves, log.saved[index]
        log.newest_node, log.is_settled = saved.node, False
        is_short = moves.is_short_of(saved.nbytes)
        is_planned = log.plan is not None and not moves.uses_staging
        is_short |= is_planned
        if is_short:
            self._drain()
            moves.relieve(NUM_EXAMINED_PER_PACK, is_planned=is_planned)
            yield from self._make_room()
        moves.note(index, is_short=is_short)
        if log.plan is not None or index == 0:
            log.follow_plan(index)

    def _make_room(self) -> Process:
        moves = self._moves
        collected = False
        while moves.blocked:
            if moves.num_jobs:
                self._num_packing += 1
                yield from self._wait(_PACK_WAITS)
                self._num_packing -= 1
            elif not collected:
                collected = True
                self._drain()
                moves.disk_is_full = False
            else:
                raise self._full_error()
            moves.admit_blocked(is_awaited=True)

    def _unpack(self, log: GraphLog, index: int) -> Process:
        """See `SavedTensor.unpack` and `PackLog.fetch`."""
        record = log.records[index]
        if record is None:
            log.begin_to_take(index)
            self._ask(log, index)
            log.end_to_take()
            return
        self._ask(log, index)
        if not log.has_trace and record.state is not State.PENDING:
            log.look_ahead()
        yield from self._fetch(log, record, index)

    def _ask(self, log: GraphLog, index: int) -> None:
        """See `PackLog.asked_for`."""
        if not log.is_started:
            self._start(log)
            if log.has_trace and log.records[index] is None:
                self._drain()
                self._moves.ahead = log.lookahead
                self._go_ahead()
        log.ask_for(index)

    def _start(self, log: GraphLog) -> None:
        """See `PackLog._start`."""
        log.is_started = True
        log.plan = None
        for record in log.records:
            if record is not None:
                record.place = None
        self._survey()
        if any(record is not None and record.state is not State.PENDING for record in log.records):
            log.look_ahead()

    def _survey(self) -> None:
        self._drain()
        self._moves.relieve(None)
        self._moves.survey()

    def _fetch(self, log: GraphLog, record: SimulatedRecord, index: int) -> Process:
        """See `Residency.fetch`."""
        moves = self._moves
        self._drain()
        self._count_request(record)
        if record.state is State.DISK:
            moves.start_restore(record, demanded=True)
        if log.has_trace:
            moves.ahead = log.lookahead
            log.lookahead.asked_for(index)
            log.lookahead.reach.asked_for(record.nbytes)
            if record.state is State.DISK or record.state is State.READING:
                log.lookahead.reach.wait()
            self._go_ahead()
        if record.state in IN_MEMORY:
            self._hand_over(log, record, index)
            return
        record.demanded += 1
        yield from self._await_bytes(record)
        self._hand_over(log, record, index)
        record.demanded -= 1
        moves.used(record)
        self._advance()
        if record.device is None and record.state in _ON_DISK_ALONE:
            moves.has_returned = True  # lent: whoever was given it is about to let go

    def _hand_over(self, log: GraphLog, record: SimulatedRecord, index: int) -> None:
        """See `Residency`."""
        moves = self._moves
        if record.device is not None:
            moves.reload(record)
            moves.device.hand_over(record)
            if log.has_trace:
                log.reload_ahead.asked_for(index)
                moves.reload_ahead(log.reload_ahead)
        moves.used(record)

    def _await_bytes(self, record: SimulatedRecord) -> Process:
        moves = self._moves
        if record.state is State.QUEUED:
            moves.cancel_spill(record)
        while record.state not in IN_MEMORY:
            if record.state is State.DISK:
                moves.start_restore(record, demanded=True)
            elif record.state is State.READING and not record.urgent:
                record.urgent = True
                moves.engine.submit_restore(record, demanded=True)
            yield from self._wait(_UNPACK_WAITS, record)

    def _count_request(self, record: SimulatedRecord) -> None:
        counters = self._moves.counters
        if record.state is State.DISK:
            counters.prefetch_misses += 1
        elif record.state is State.READING:
            counters.prefetch_late += 1
        elif record.state is State.CLEAN and record.fetched:
            counters.prefetch_hits += 1
            record.fetched = False
        elif record.state in (State.QUEUED, State.WRITING):
            counters.forwarded_bytes += record.nbytes

    def _wait(self, cause: str, record: SimulatedRecord | None = None) -> Process:
        began_seconds = self._clock.now_seconds
        yield self._progress.wait
        seconds = self._clock.now_seconds - began_seconds
        self._moves.counters.stall_seconds[cause] += seconds
        self._moves.observer.stalled(seconds, cause, None if record is None else record.key)
        self._drain()

    def _full_error(self) -> StoreFullError:
        moves, books = self._moves, self._moves.books
        disk_budget_bytes = 0 if moves.full_error is None else moves.full_error.disk_budget_bytes
        held_bytes = books.used_bytes[0]
        return StoreFullError(
            moves.blocked[0].nbytes, moves.disk_bytes, disk_budget_bytes, held_bytes, books.host_bytes
        )

    # --- the engine: `Transfers` --------------------------------------------------------------------------------------

    @property
    def disk_bytes(self) -> int:
        """Taken by records, written or being written."""
        return self._moves.disk_bytes

    @disk_bytes.setter
    def disk_bytes(self, nbytes: int) -> None:
        self._moves.disk_bytes = nbytes
        self._moves.disk_bytes_peak = max(self._moves.disk_bytes_peak, nbytes)

    def begin_spill(self, record: SimulatedRecord) -> bool:
        """See `Transfers`."""
        self._drain()
        return self._moves.begin_spill(record)

    def end_spill(self, record: SimulatedRecord, outcome: Stored | StoreFullError) -> None:
        """See `Transfers`."""
        self._moves.spilled(record, outcome)
        self._advance()

    def begin_restore(self, record: SimulatedRecord) -> bool:
        """See `Transfers`."""
        self._drain()
        return self._moves.begin_restore(record)

    def end_restore(self, record: SimulatedRecord, outcome: Loaded) -> None:
        """See `Transfers`."""
        self._moves.restored(record, outcome)
        self._advance()

    def end_discard(self, num_records: int) -> None:
        """See `Transfers`."""
        self._moves.discarded(num_records)
        self._advance()

    # --- both ---------------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        if self._moves.drain():
            self._moves.observer.changed()
            self._advance()

    def _advance(self) -> None:
        self._moves.admit_blocked(is_awaited=self._num_packing > 0)
        self._moves.send_ahead()
        self._go_ahead()
        self._progress.notify_all()

    def _go_ahead(self) -> None:
        if self._moves.ahead is not None and not self._num_packing:
            self._moves.prefetch(self._moves.ahead)
