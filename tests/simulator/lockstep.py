"""A real store and a simulated one, taken through the same actions with the same completions in the same order.

The real disk tier writes and reads, but says so only when it is told to. Neither training nor the engine moves while
the other does, so a run depends on nothing but its script, and every decision of one can be compared with the other's.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from tierstore import TierStore, tiered_offload
from tierstore.device import Copies
from tierstore.disk.tier import DiskTier, DiskUsage, Kind, Loaded, Stored
from tierstore.engine import NUM_RESTORES, NUM_SPILLS, OpenDisk
from tierstore.errors import StoreFullError
from tierstore.hooks import offload
from tierstore.lookahead import LearnedOrders
from tierstore.simulator import Action, EndScope, LetGo, Pack, Release, Settings, Unpack, Workload
from tierstore.simulator.clock import Clock
from tierstore.simulator.flows import Flows
from tierstore.simulator.moves import SimulatedMoves
from tierstore.simulator.rank import Rank
from tierstore.simulator.record import GraphLog, SimulatedRecord
from tierstore.stats import Counters
from tierstore.tracing.observer import Observer

_WAIT_SECONDS = 20.0


class Decision(NamedTuple):
    """What was decided, of which record; numbered by saved tensor, on through all steps."""

    what: str
    record: int


_FULL = Decision("StoreFullError", -1)
"""The last one: training is told."""


class Job(NamedTuple):
    """A transfer that has only to be said to be done."""

    what: str
    record: int


@dataclass(frozen=True)
class Script:
    """Which jobs end when.

    Attributes:
        after_action: how many end after each action, in turn; none after the last of them.
        choices: of those that could end, which does, in turn and again from the beginning.
    """

    after_action: Sequence[int]
    choices: Sequence[int]


class Decisions(Observer):
    """Takes down what is decided, and what is on its way."""

    def __init__(self, first_key: int = 0, on_news: Callable[[], None] = lambda: None) -> None:
        self.seen: list[Decision] = []
        self.waiting: set[Job] = set()
        self.running: dict[Job, None] = {}  # in the order in which they began
        self._first_key = first_key
        self._on_news = on_news

    def spill_queued(self, record: int, nbytes: int) -> None:
        self.waiting.add(Job("spill", self._see("spill queued", record)))

    def spill_cancelled(self, record: int, nbytes: int) -> None:
        self.waiting.discard(Job("spill", self._see("spill cancelled", record)))

    def spill_began(self, record: int, nbytes: int) -> None:
        self._began(Job("spill", self._see("spill began", record)))

    def spill_ended(self, record: int, outcome: Stored | Exception) -> None:
        del self.running[Job("spill", self._see("spill ended", record))]

    def freed(self, record: int, nbytes: int) -> None:
        self._see("freed", record)

    def restore_queued(self, record: int, nbytes: int, *, demanded: bool) -> None:
        self.waiting.add(Job("restore", self._see("demand queued" if demanded else "prefetch queued", record)))

    def restore_cancelled(self, record: int, nbytes: int) -> None:
        self.waiting.discard(Job("restore", self._see("restore cancelled", record)))

    def restore_began(self, record: int) -> None:
        self._began(Job("restore", self._see("restore began", record)))

    def restore_ended(self, record: int, outcome: Loaded | Exception, *, is_wanted: bool) -> None:
        del self.running[Job("restore", self._see("restored" if is_wanted else "restored in vain", record))]

    def has_idle_lane_and_work(self) -> bool:
        """Whether some job is about to begin."""
        return any(
            any(job.what == what for job in self.waiting)
            and sum(1 for job in self.running if job.what == what) < num_lanes
            for what, num_lanes in (("spill", NUM_SPILLS), ("restore", NUM_RESTORES))
        )

    def _began(self, job: Job) -> None:
        self.waiting.discard(job)
        self.running[job] = None

    def _see(self, what: str, record: int) -> int:
        number = record - self._first_key
        self.seen.append(Decision(what, number))
        self._on_news()
        return number


class _Script:
    """A script while it is followed."""

    def __init__(self, script: Script) -> None:
        self._counts: Iterator[int] = iter(script.after_action)
        self._choices = script.choices
        self._numbers = count()

    def num_after_action(self) -> int:
        return next(self._counts, 0)

    def choose(self, jobs: Iterable[Job]) -> Job:
        """Every other time the read that began first, so that none is passed over for ever."""
        in_turn = list(jobs)
        number, is_fair = divmod(next(self._numbers), 2)
        if is_fair:
            return next((job for job in in_turn if job.what == "restore"), in_turn[0])
        return sorted(in_turn)[self._choices[number % len(self._choices)] % len(in_turn)]


class _Drive:
    """Takes so much and no more, of both alike."""

    def __init__(self, settings: Settings) -> None:
        self._limit_bytes = inf if settings.disk_bytes is None else settings.disk_bytes
        self._held: dict[int, int] = {}  # bytes, by key

    def takes(self, key: int, nbytes: int) -> bool:
        is_taken = sum(self._held.values()) + nbytes <= self._limit_bytes
        if is_taken:
            self._held[key] = nbytes
        return is_taken

    def free(self, keys: Iterable[int]) -> None:
        for key in keys:
            del self._held[key]


# --- the real one -----------------------------------------------------------------------------------------------------


class _SteppedDisk:
    """A `DiskTier` around a real one, which says that a job is done when it is told to."""

    def __init__(self, disk: DiskTier, stepper: Stepper) -> None:
        self._disk = disk
        self._stepper = stepper
        self.scratch_bytes = disk.scratch_bytes

    async def write(self, key: int, source: memoryview, kind: Kind) -> Stored:
        if not self._stepper.drive.takes(key, len(source)):
            await self._stepper.pass_gate("spill", key)
            raise StoreFullError(len(source), 0, 0)
        stored = await self._disk.write(key, source, kind)
        await self._stepper.pass_gate("spill", key)
        return stored

    async def read(self, key: int, destination: memoryview) -> Loaded:
        loaded = await self._disk.read(key, destination)
        await self._stepper.pass_gate("restore", key)
        return loaded

    def confirms(self, key: int, memory: memoryview) -> bool:
        return self._disk.confirms(key, memory)

    async def discard(self, keys: Sequence[int]) -> None:
        await self._disk.discard(keys)
        self._stepper.discarded += keys

    def usage(self) -> DiskUsage:
        return self._disk.usage()

    def codec_choices(self) -> Mapping[str, Mapping[str, int]]:
        return self._disk.codec_choices()

    def abandon_after_fork(self) -> None:
        self._disk.abandon_after_fork()

    async def close(self) -> None:
        await self._disk.close()


class _SteppedStore(TierStore):
    stepper: Stepper

    def _begin(self, name: str, open_disk: OpenDisk, copies: Copies | None) -> None:
        stepper = self.stepper = Stepper()

        async def open_stepped(executor: Executor) -> DiskTier:
            return _SteppedDisk(await open_disk(executor), stepper)

        super()._begin(name, open_stepped, copies)


class Stepper:
    """Lets the training thread and the engine's move by turns. In place of the condition that training waits on.

    Attributes:
        drive: what it takes.
        discarded: keys of which the engine will be told that they are.
    """

    drive: _Drive

    def __init__(self) -> None:
        self._news = threading.Event()
        self._resting = threading.Event()
        self.discarded: list[int] = []
        self._gates: dict[Job, Any] = {}

    def take_over(self, store: TierStore, script: _Script, first_key: int, drive: _Drive) -> Decisions:
        """From now on nothing moves unless it is told to."""
        self.drive = drive
        books = self._books = store.books
        self._script, self._first_key = script, first_key
        self.decisions = Decisions(first_key, self._news.set)
        engine = books.moves.engine
        deliver, self._end_discard = engine._deliver, books.end_discard

        def deliver_at_rest() -> None:
            if not self._resting.wait(_WAIT_SECONDS):
                raise TimeoutError("training does not rest")
            deliver()

        def put_off(num_records: int) -> None:
            self._news.set()  # `settle` tells

        engine._deliver = deliver_at_rest  # type: ignore[method-assign]
        books.end_discard = put_off  # type: ignore[method-assign]
        books._progress = self  # type: ignore[assignment]
        with books.lock:
            books.observe(self.decisions)
        return self.decisions

    async def pass_gate(self, what: str, key: int) -> None:
        """On the loop: returns when the job may be said to be done."""
        gate = asyncio.get_running_loop().create_future()
        self._gates[Job(what, key - self._first_key)] = gate
        self._news.set()
        await gate

    def settle(self) -> bool:
        """Return when the engine has begun all that it can begin now, and said what is freed; whether that was any."""
        self._resting.set()
        has_discarded = False
        while True:
            self._come_to_rest()
            keys, self.discarded = self.discarded, []
            if not keys:
                break
            has_discarded = True
            self.drive.free(keys)
            self._end_discard(len(keys))
        self._resting.clear()
        return has_discarded

    def _come_to_rest(self) -> None:
        while True:
            self._news.clear()
            with self._books.lock:
                if self._is_quiet():
                    return
            if not self._news.wait(_WAIT_SECONDS):
                raise TimeoutError("the engine does not come to rest")

    def let_go(self) -> None:
        """From now on the engine moves by itself, so that the store can be closed."""
        self._resting.set()

    def finish_one(self) -> None:
        """Have the next job of the script end, if there is any; then settle."""
        self.settle()
        if self._gates:
            job = self._script.choose(self.decisions.running)
            gate = self._gates.pop(job)
            gate.get_loop().call_soon_threadsafe(gate.set_result, None)
            self.settle()

    def wait(self) -> None:
        """In place of the condition's: training waits, its lock held."""
        self._books._lock.release()
        try:
            if not self.settle():
                if not self._gates:
                    raise RuntimeError("training waits, and nothing moves")
                self.finish_one()
        finally:
            self._books._lock.acquire()

    def notify_all(self) -> None:
        """In place of the condition's."""

    def _is_quiet(self) -> bool:
        decisions = self.decisions
        return (
            decisions.running.keys() == self._gates.keys()
            and not decisions.has_idle_lane_and_work()
            and self._books.moves.num_discards == len(self.discarded)
        )


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(saved)
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        raise NotImplementedError


class _RealStep:
    """One step of a workload, on the real store."""

    def __init__(self, store: TierStore, workload: Workload, settings: Settings) -> None:
        self._workload = workload
        self._scope = tiered_offload(
            store, min_bytes=0, prefetch=settings.prefetch, lookahead_bytes=settings.lookahead_bytes
        )
        self._leaf = torch.zeros(1, requires_grad=True)
        self._graph: dict[int, torch.Tensor] = {}
        self._storages: dict[int, torch.Tensor] = {}
        self._last_use: dict[int, int] = {}
        for number, action in enumerate(workload.actions):
            if isinstance(action, Pack | LetGo):
                self._last_use[self._root_of(action.saved)] = number
        self._is_in_forward = True
        self._scope.__enter__()

    def end_forward(self) -> None:
        """Leave the scope, where a drive that is full has not let the step come to that."""
        if self._is_in_forward:
            self._is_in_forward = False
            self._scope.__exit__(None, None, None)

    def act(self, number: int, action: Action) -> None:
        match action:
            case Pack(index):
                self._pack(number, index)
            case LetGo(index):
                del self._storages[self._root_of(index)]
            case EndScope():
                self.end_forward()
            case Unpack(index):
                (saved,) = self._graph[index].grad_fn.saved_tensors  # type: ignore[union-attr]
                assert bool((saved == self._root_of(index) % 251).all())
            case Release(index):
                del self._graph[index]

    def _pack(self, number: int, index: int) -> None:
        root = self._root_of(index)
        saved, shared = self._workload.saved[index], self._workload.saved[root].is_shared
        if index == root:
            self._storages[root] = torch.full((saved.nbytes,), root % 251, dtype=torch.uint8)
        with patch.object(offload, "_sequence_nr", lambda: saved.node):
            self._graph[index] = _Save.apply(self._leaf, self._storages[root])
        if self._last_use[root] == number and not shared:
            del self._storages[root]

    def _root_of(self, index: int) -> int:
        root = self._workload.saved[index].record
        return index if root is None else root


def real_decisions(
    place: Path, workload: Workload, settings: Settings, script: Script, num_steps: int
) -> tuple[list[Decision], Counters]:
    """What a real store in that directory decides."""
    followed = _Script(script)
    with _SteppedStore(
        place, host_bytes=settings.host_bytes, staging_bytes=settings.staging_bytes, codec="none"
    ) as store:
        decisions = store.stepper.take_over(store, followed, next(store.keys) + 1, _Drive(settings))
        try:
            for _ in range(num_steps):
                step = _RealStep(store, workload, settings)
                try:
                    _take(step, workload, store.stepper, followed)
                finally:
                    step.end_forward()
                del step
            store.books.tidy()
            store.stepper.settle()
            while decisions.running or decisions.waiting:
                store.stepper.finish_one()
        except StoreFullError:
            decisions.seen.append(_FULL)
        finally:
            store.stepper.let_go()
        return decisions.seen, store.books.moves.counters


def _take(step: _RealStep, workload: Workload, stepper: Stepper, followed: _Script) -> None:
    for number, action in enumerate(workload.actions):
        step.act(number, action)
        stepper.settle()
        for _ in range(followed.num_after_action()):
            stepper.finish_one()


# --- the simulated one ------------------------------------------------------------------------------------------------


class _SteppedEngine:
    """The lanes of the simulated engine, which end a job when they are told to."""

    def __init__(self, decisions: Decisions, script: _Script, drive: _Drive) -> None:
        self.transfers: Rank
        self._drive = drive
        self._refused: set[SimulatedRecord] = set()
        self._decisions = decisions
        self._script = script
        self._spills: list[tuple[int, int, SimulatedRecord]] = []
        self._restores: list[tuple[int, int, SimulatedRecord]] = []
        self._numbers = count()
        self._records: dict[Job, SimulatedRecord] = {}
        self._discards: list[int] = []

    def submit_spill(self, record: SimulatedRecord) -> None:
        heappush(self._spills, (1, next(self._numbers), record))

    def submit_restore(self, record: SimulatedRecord, *, demanded: bool) -> None:
        heappush(self._restores, (0 if demanded else 1, next(self._numbers), record))

    def submit_discard(self, key: int) -> None:
        self._discards.append(key)

    @property
    def has_jobs(self) -> bool:
        return bool(self._records)

    def settle(self) -> bool:
        """See `Stepper`."""
        has_discarded = False
        self._begin_all()
        while self._discards:
            keys, self._discards = self._discards, []
            has_discarded = True
            self._drive.free(keys)
            self.transfers.end_discard(len(keys))
            self._begin_all()
        return has_discarded

    def _begin_all(self) -> None:
        for what, queue, num_lanes in (
            ("spill", self._spills, NUM_SPILLS),
            ("restore", self._restores, NUM_RESTORES),
        ):
            begin = self.transfers.begin_spill if what == "spill" else self.transfers.begin_restore
            while queue and sum(1 for job in self._records if job.what == what) < num_lanes:
                record = heappop(queue)[2]
                if begin(record):
                    self._records[Job(what, record.key)] = record
                    if what == "spill" and not self._drive.takes(record.key, record.nbytes):
                        self._refused.add(record)

    def finish_one(self) -> None:
        """See `Stepper`."""
        self.settle()
        if self._records:
            job = self._script.choose(self._decisions.running)
            record = self._records.pop(job)
            if record in self._refused:
                self._refused.remove(record)
                self.transfers.end_spill(record, StoreFullError(record.nbytes, 0, 0))
            elif job.what == "spill":
                self.transfers.end_spill(record, Stored(record.nbytes, "none"))
            else:
                self.transfers.end_restore(record, Loaded(record.stored_bytes))
            self.settle()


def simulated_decisions(
    workload: Workload, settings: Settings, script: Script, num_steps: int
) -> tuple[list[Decision], Counters]:
    """What the simulated one decides."""
    followed, decisions = _Script(script), Decisions()
    clock = Clock(Flows(lambda counts: {}))
    engine = _SteppedEngine(decisions, followed, _Drive(settings))
    moves = SimulatedMoves(host_bytes=settings.host_bytes, staging_bytes=settings.staging_bytes, observer=decisions)
    moves.engine = engine
    rank = engine.transfers = Rank(clock, moves, workload)
    orders = LearnedOrders() if settings.prefetch == "learned" else None
    try:
        for number in range(num_steps):
            first_key, budgets = number * len(workload.saved), (settings.host_bytes, settings.staging_bytes)
            log = GraphLog(workload.saved, first_key, settings.reach_bytes, orders, *budgets)
            _step(rank, clock, engine, log, workload, followed)
        rank._drain()
        engine.settle()
        while decisions.running or decisions.waiting:
            engine.finish_one()
    except StoreFullError:
        decisions.seen.append(_FULL)
    return decisions.seen, moves.counters


def _step(rank: Rank, clock: Clock, engine: _SteppedEngine, log: GraphLog, workload: Workload, script: _Script) -> None:
    done: list[bool] = []

    def whole(action: Action) -> Any:
        yield from rank.act(log, action)
        done.append(True)

    rank.begin(log)
    for number, action in enumerate(workload.actions, 1):
        clock.begin(whole(action))
        clock.run()
        while len(done) < number:
            if not engine.settle():
                if not engine.has_jobs:
                    raise RuntimeError("training waits, and nothing moves")
                engine.finish_one()
            clock.run()
        engine.settle()
        for _ in range(script.num_after_action()):
            engine.finish_one()
            clock.run()
    rank.end()
