"""A simulated store that is taken through a script, step by step, as `stepped_store.py` takes a real one."""

from __future__ import annotations

from typing import Any

from tests.simulator.scripts import (
    FULL,
    Decision,
    Decisions,
    Drive,
    FollowedScript,
    Script,
    finish_transfer,
)
from tests.simulator.scripts import Job as TheirJob
from tierstore.disk.tier import Loaded, Stored
from tierstore.errors import StoreFullError
from tierstore.ledger.counters import Counters
from tierstore.ledger.jobs import Discard, Read, Room, Write
from tierstore.ledger.lookahead import LearnedOrders
from tierstore.ledger.windows import HostWindows
from tierstore.simulator import Action, Settings, Workload
from tierstore.simulator.clock import Clock
from tierstore.simulator.rank import Rank
from tierstore.simulator.record import SimulatedRecord


class _SteppedEngine:
    """The simulated engine, whose jobs end when they are told to."""

    def __init__(self, decisions: Decisions, script: FollowedScript, drive: Drive) -> None:
        self.rank: Rank
        self._drive = drive
        self._decisions = decisions
        self._script = script
        self._is_awake = False
        self._records: dict[TheirJob, SimulatedRecord] = {}
        self._discard: Discard | None = None

    def wake(self) -> None:
        self._is_awake = True

    def settle(self) -> bool:
        """See `Stepper`, in `stepped_store.py`."""
        has_discarded = False
        self._come_to_rest()
        while self._discard is not None:
            discard, self._discard = self._discard, None
            has_discarded = True
            self._drive.free(discard.keys)
            self._take_turn([(discard, None)])
            self._come_to_rest()
        return has_discarded

    def _come_to_rest(self) -> None:
        while self._is_awake:
            self._is_awake = False
            self._take_turn([])

    def _take_turn(self, ended: list[tuple[Any, Any]]) -> None:
        idle = self._decisions.num_idle
        freed = [{Write: "spill", Read: "restore"}.get(type(job)) for job, _ in ended]
        writes, reads = (idle(what) + freed.count(what) for what in ("spill", "restore"))
        for job in self.rank.exchange(ended, Room(writes, reads, int(self._discard is None))):
            match job:
                case Write(record, _):
                    self._records[TheirJob("spill", record.key)] = record
                case Read(record, _):
                    self._records[TheirJob("restore", record.key)] = record
                case Discard():
                    self._discard = job

    def finish_one(self) -> TheirJob | None:
        """See `Stepper`, in `stepped_store.py`."""
        self.settle()
        if not self._decisions.running:
            return None
        job = self._script.choose(self._decisions.running)
        self._end(job)
        self.settle()
        return job

    def _end(self, job: TheirJob) -> None:
        record = self._records.pop(job)
        if job.what == "restore":
            self._take_turn([(Read(record), Loaded(record.stored_bytes))])
        elif self._drive.has_taken(record.key):
            self._take_turn([(Write(record), Stored(record.nbytes, "none"))])
        else:
            self._take_turn([(Write(record), StoreFullError(record.nbytes, 0, 0))])


def simulated_decisions(
    workload: Workload, settings: Settings, script: Script, num_steps: int
) -> tuple[list[Decision], Counters]:
    """What the simulated one decides."""
    drive = Drive(settings)
    followed, decisions = FollowedScript(script), Decisions(drive)
    clock = Clock(lambda counts: {})
    engine = _SteppedEngine(decisions, followed, drive)
    books = HostWindows(settings.host_bytes, settings.staging_bytes, grows=settings.staging_grows)
    rank = engine.rank = Rank(clock, books, engine.wake, 0, workload, decisions)
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
        rank.ledger.validate()
        for _ in range(script.num_after_action()):
            engine.finish_one()
            clock.run()
            rank.ledger.validate()
    rank.end()
