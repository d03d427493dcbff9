"""A simulated store that is taken through a script, step by step, as `stepped_store.py` takes a real one."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from typing import Any

from tests.simulator.scripts import (
    FULL,
    NUM_LANES,
    Decision,
    Decisions,
    Drive,
    FollowedScript,
    Job,
    Script,
    finish_transfer,
)
from tierstore.disk.tier import Loaded, Stored
from tierstore.errors import StoreFullError
from tierstore.ledger.counters import Counters
from tierstore.ledger.lookahead import LearnedOrders
from tierstore.ledger.windows import HostWindows
from tierstore.simulator import Action, Settings, Workload
from tierstore.simulator.clock import Clock
from tierstore.simulator.rank import Rank
from tierstore.simulator.record import SimulatedRecord


class _SteppedEngine:
    """The lanes of the simulated engine, which end a job when they are told to."""

    def __init__(self, decisions: Decisions, script: FollowedScript, drive: Drive) -> None:
        self.transfers: Rank
        self._drive = drive
        self._decisions = decisions
        self._script = script
        self._inbox: list[tuple[str, int, SimulatedRecord]] = []
        self._queues: dict[str, list[tuple[int, int, SimulatedRecord]]] = {what: [] for what in NUM_LANES}
        self._numbers = count()
        self._records: dict[Job, SimulatedRecord] = {}
        self._discards: list[int] = []

    def submit_spill(self, record: SimulatedRecord) -> None:
        self._inbox.append(("spill", 1, record))

    def submit_restore(self, record: SimulatedRecord, *, demanded: bool) -> None:
        self._inbox.append(("restore", 0 if demanded else 1, record))

    def submit_discard(self, key: int) -> None:
        self._discards.append(key)

    def settle(self) -> bool:
        """See `Stepper`, in `stepped_store.py`."""
        has_discarded = False
        self._deliver()
        while self._discards:
            keys, self._discards = self._discards, []
            has_discarded = True
            self._drive.free(keys)
            self.transfers.end_discard(len(keys))
            self._deliver()
        return has_discarded

    def _deliver(self) -> None:
        """What is in the inbox wakes a lane each; see `Engine`."""
        while self._inbox:
            delivered, self._inbox = self._inbox, []
            for what, urgency, record in delivered:
                heappush(self._queues[what], (urgency, next(self._numbers), record))
            for what, _, _ in delivered:
                self._begin_next(what)

    def _begin_next(self, what: str) -> None:
        """A lane looks for something that is still wanted."""
        queue = self._queues[what]
        begin = self.transfers.begin_spill if what == "spill" else self.transfers.begin_restore
        while queue and self._decisions.num_idle(what):
            record = heappop(queue)[2]
            if begin(record):
                job = Job(what, record.key)
                self._records[job] = record
                return

    def finish_one(self) -> Job | None:
        """See `Stepper`, in `stepped_store.py`."""
        self.settle()
        if not self._decisions.running:
            return None
        job = self._script.choose(self._decisions.running)
        self._end(job)
        self.settle()
        return job

    def _end(self, job: Job) -> None:
        record = self._records.pop(job)
        if job.what == "restore":
            self.transfers.end_restore(record, Loaded(record.stored_bytes))
        elif self._drive.has_taken(record.key):
            self.transfers.end_spill(record, Stored(record.nbytes, "none"))
        else:
            self.transfers.end_spill(record, StoreFullError(record.nbytes, 0, 0))
        self._begin_next(job.what)


def simulated_decisions(
    workload: Workload, settings: Settings, script: Script, num_steps: int
) -> tuple[list[Decision], Counters]:
    """What the simulated one decides."""
    drive = Drive(settings)
    followed, decisions = FollowedScript(script), Decisions(drive)
    clock = Clock(lambda counts: {})
    engine = _SteppedEngine(decisions, followed, drive)
    books = HostWindows(settings.host_bytes, settings.staging_bytes, grows=settings.staging_grows)
    rank = engine.transfers = Rank(clock, books, engine, 0, workload, decisions)
    orders = LearnedOrders() if settings.prefetch == "learned" else None
    try:
        for _ in range(num_steps):
            rank.begin(orders, settings.scope_lookahead_bytes)
            _step(rank, clock, engine, workload, followed)
        rank._drain()
        engine.settle()
        while decisions.running or decisions.waiting:
            engine.finish_one()
    except StoreFullError:
        decisions.seen.append(FULL)
    return decisions.seen, rank.books.counters


def _step(rank: Rank, clock: Clock, engine: _SteppedEngine, workload: Workload, script: FollowedScript) -> None:
    done: list[bool] = []

    def whole(action: Action) -> Any:
        yield from rank.act(action)
        done.append(True)

    for number, action in enumerate(workload.actions, 1):
        clock.begin(whole(action))
        clock.run()
        while len(done) < number:
            if not engine.settle():
                finish_transfer(engine.finish_one)
            clock.run()
        engine.settle()
        for _ in range(script.num_after_action()):
            engine.finish_one()
            clock.run()
    rank.end()
