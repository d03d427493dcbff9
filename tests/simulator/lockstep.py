"""A real store and a simulated one, taken through the same actions with the same completions in the same order.

Both run the same rules; what is compared is how each books, waits, and takes the order of a graph.

The real disk tier writes and reads, and the copy engine of a made-up accelerator copies, but they say so only when they
are told to. Neither training nor the engine moves while the other does, so a run depends on nothing but its script, and
every decision of one can be compared with the other's.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import torch

from tests.existing import set_existing
from tests.inspect_store import inspect, inspect_engine
from tierstore import TierStore, tiered_offload
from tierstore.base.defaults import NUM_RESTORES, NUM_SPILLS
from tierstore.disk.tier import DiskTier, DiskUsage, Kind, Loaded, Stored
from tierstore.errors import StoreFullError
from tierstore.hooks import scope
from tierstore.residency.copies import Marker
from tierstore.rules.counters import Counters
from tierstore.rules.device_window import FLIGHT_BYTES, RELOAD_BYTES
from tierstore.rules.graph_order import Budgets
from tierstore.rules.lookahead import LearnedOrders
from tierstore.rules.observer import Observer
from tierstore.rules.windows import HostWindows
from tierstore.simulator import Action, EndScope, LetGo, Pack, Release, Settings, Unpack, Workload
from tierstore.simulator.clock import Clock, Process
from tierstore.simulator.copies import Copy
from tierstore.simulator.device import SimulatedDevice
from tierstore.simulator.flows import Flows
from tierstore.simulator.rank import Rank
from tierstore.simulator.record import GraphLog, SimulatedRecord
from tierstore.store.options import StoreOptions

_WAIT_SECONDS = 20.0
_PAUSE_SECONDS = 0.001
_DEVICE_DTYPE = torch.uint8
_NUM_LANES = {"spill": NUM_SPILLS, "restore": NUM_RESTORES}


class Decision(NamedTuple):
    """What was decided, of which record; numbered by saved tensor, on through all steps."""

    what: str
    record: int


_FULL = Decision("StoreFullError", -1)
"""The last one: training is told."""


class Job(NamedTuple):
    """A transfer that has only to be said to be done. `number`: of a copy, for a record may be copied back again."""

    what: str
    record: int
    number: int = 0


class Windows(NamedTuple):
    """How much may be on its way from and to the accelerator."""

    flight_bytes: int = FLIGHT_BYTES
    reload_bytes: int = RELOAD_BYTES


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

    def __init__(self, drive: _Drive, first_key: int = 0, on_news: Callable[[], None] = lambda: None) -> None:
        self.seen: list[Decision] = []
        self.waiting: set[Job] = set()
        self.running: dict[Job, None] = {}  # in the order in which they began
        self.copies = _Queues(self)
        self._drive = drive
        self._first_key = first_key
        self._on_news = on_news

    def spill_queued(self, record: int, nbytes: int) -> None:
        self.waiting.add(Job("spill", self._see("spill queued", record)))

    def spill_cancelled(self, record: int, nbytes: int) -> None:
        self.waiting.discard(Job("spill", self._see("spill cancelled", record)))

    def spill_began(self, record: int, nbytes: int) -> None:
        number = self._see("spill began", record)
        self._began(Job("spill", number))
        self._drive.take(number, nbytes)

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

    def offloaded(self, record: int, nbytes: int) -> None:
        self.running[self.copies.name("offload", self._see("offload queued", record))] = None

    def reloaded(self, record: int, nbytes: int) -> None:
        self.running[self.copies.name("reload", self._see("reload queued", record))] = None

    def computing_waits(self, job: Job) -> None:
        self.seen.append(Decision(f"computing waits for {job.what}", job.record))

    @property
    def transfers(self) -> list[Job]:
        """Those that run between host memory and disk."""
        return [job for job in self.running if not _is_copy(job)]

    def num_idle(self, what: str) -> int:
        """Of the engine's lanes that do such jobs."""
        return _NUM_LANES[what] - sum(1 for job in self.running if job.what == what)

    def has_idle_lane_and_work(self) -> bool:
        """Whether some job is about to begin."""
        return any(any(job.what == what for job in self.waiting) and self.num_idle(what) for what in _NUM_LANES)

    def _began(self, job: Job) -> None:
        self.waiting.discard(job)
        self.running[job] = None

    def _see(self, what: str, record: int) -> int:
        number = record - self._first_key
        self.seen.append(Decision(what, number))
        self._on_news()
        return number


def _is_copy(job: Job) -> bool:
    return job.what in ("offload", "reload")


class _Queued(Protocol):
    """A copy: a real one, or a simulated one."""

    ready: Any
    is_over: bool

    def end(self) -> None: ...


class _Queues:
    """Copies, each way in a queue. They are named by the decision that is told of them just after they are queued."""

    def __init__(self, decisions: Decisions) -> None:
        self._decisions = decisions
        self._queued: dict[str, deque[_Queued]] = {"offload": deque(), "reload": deque()}
        self._jobs: dict[int, Job] = {}  # by the copy's id; it is kept
        self._kept: list[_Queued] = []

    def queue(self, what: str, copy: _Queued) -> None:
        self._queued[what].append(copy)
        self._kept.append(copy)

    def name(self, what: str, record: int) -> Job:
        job = self._jobs[id(self._queued[what][-1])] = Job(what, record, len(self._jobs))
        return job

    def wait(self, copy: _Queued) -> None:
        self._decisions.computing_waits(self._jobs[id(copy)])

    def could_end(self, job: Job) -> bool:
        """Whether it is the first of its queue, and what it comes after is over."""
        if not _is_copy(job):
            return False
        first = self._queued[job.what][0]
        return self._jobs[id(first)] == job and (first.ready is None or first.ready.is_over)

    def end(self, job: Job) -> None:
        del self._decisions.running[job]
        self._queued[job.what].popleft().end()


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
        self._held: dict[int, int] = {}  # bytes, by record

    def take(self, record: int, nbytes: int) -> None:
        """If there is room."""
        if sum(self._held.values()) + nbytes <= self._limit_bytes:
            self._held[record] = nbytes

    def has_taken(self, record: int) -> bool:
        return record in self._held

    def free(self, records: Iterable[int]) -> None:
        for record in records:
            del self._held[record]


# --- the real one -----------------------------------------------------------------------------------------------------


class _SteppedDisk:
    """A `DiskTier` around a real one, which says that a job is done when it is told to."""

    def __init__(self, disk: DiskTier, stepper: Stepper) -> None:
        self._disk = disk
        self._stepper = stepper
        self.scratch_bytes = disk.scratch_bytes

    async def write(self, key: int, source: memoryview, kind: Kind) -> Stored:
        if not self._stepper.has_taken(key):
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

    def _begin(self, options: StoreOptions) -> None:
        stepper = self.stepper = Stepper()

        async def open_stepped(executor: Executor) -> DiskTier:
            return _SteppedDisk(await options.open_disk(executor), stepper)

        super()._begin(options._replace(open_disk=open_stepped, copies=stepper.copies))


class _SteppedCopy:
    """A `Marker` of a stepped copy, which is made at once."""

    def __init__(self, copies: _SteppedCopies, ready: _SteppedCopy | None) -> None:
        self.ready = ready
        self.is_over = False
        self._copies = copies
        self._over = threading.Event()
        self._num_waiting = 0

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        with self._copies.lock:
            if self.is_over:
                return
            self._num_waiting += 1
            self._copies.num_waiting += 1
        self._copies.on_news()
        if not self._over.wait(_WAIT_SECONDS):
            raise TimeoutError("a copy does not end")

    def end(self) -> None:
        with self._copies.lock:
            self.is_over = True
            self._copies.num_waiting -= self._num_waiting
        self._over.set()


class _SteppedCopies:
    """A copy engine for which tensors of bytes without a sign are on an accelerator.

    Attributes:
        queues: where what is queued can be seen.
        num_waiting: threads that wait for a copy; under `lock`.
    """

    queues: _Queues

    def __init__(self, on_news: Callable[[], None]) -> None:
        self.lock = threading.Lock()
        self.num_waiting = 0
        self.on_news = on_news

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        return tensor.device if tensor.dtype is _DEVICE_DTYPE else None

    def current_stream(self, device: torch.device) -> str:
        return "compute"

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, stream: Any) -> Marker:
        target.copy_(source)
        return self._queue("offload", None)

    def copy_in(
        self, source: torch.Tensor, device: torch.device, stream: Any, ready: Marker | None
    ) -> tuple[torch.Tensor, Marker]:
        assert ready is None or isinstance(ready, _SteppedCopy)
        return source.clone(), self._queue("reload", ready)

    def _queue(self, what: str, ready: _SteppedCopy | None) -> _SteppedCopy:
        copy = _SteppedCopy(self, ready)
        self.queues.queue(what, copy)
        return copy

    def wait(self, stream: Any, marker: Marker) -> None:
        assert isinstance(marker, _SteppedCopy)
        self.queues.wait(marker)

    def share(self, memory: torch.Tensor, stream: Any) -> None:
        """There is one stream."""


class Stepper:
    """Lets the training thread and the engine's move by turns. In place of the condition that training waits on.

    Attributes:
        copies: the accelerator's.
        discarded: keys of which the engine will be told that they are.
    """

    def __init__(self) -> None:
        self._news = threading.Event()
        self.copies = _SteppedCopies(self._news.set)
        self._resting = threading.Event()
        self.discarded: list[int] = []
        self._gates: dict[Job, Any] = {}

    def take_over(
        self, store: TierStore, script: _Script, first_key: int, drive: _Drive, windows: Windows
    ) -> Decisions:
        """From now on nothing moves unless it is told to."""
        self._drive = drive
        inside = self._inside = inspect(store)
        self._engine = inspect_engine(inside.engine)
        self._script, self._first_key = script, first_key
        self.decisions = Decisions(drive, first_key, self._news.set)
        self.copies.queues = self.decisions.copies
        window = inside.device_window
        window.in_flight.limit_bytes, window.reloaded.limit_bytes = windows.flight_bytes, windows.reload_bytes
        self._end_discard = inside.residency.end_discard

        def await_rest() -> None:
            if not self._resting.wait(_WAIT_SECONDS):
                raise TimeoutError("training does not rest")

        def put_off(num_records: int) -> None:
            self._news.set()  # `settle` tells

        self._engine.call_before_delivery(await_rest)
        inside.replace_progress(self)
        set_existing(inside.residency, end_discard=put_off)
        with inside.lock:
            inside.residency.observe(self.decisions)
        return self.decisions

    def has_taken(self, key: int) -> bool:
        """Whether the drive has room for the record."""
        return self._drive.has_taken(key - self._first_key)

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
            self._drive.free(key - self._first_key for key in keys)
            self._end_discard(len(keys))
        self._resting.clear()
        return has_discarded

    def _come_to_rest(self) -> None:
        ends_at = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < ends_at:
            self._news.clear()
            num_seen = self._num_seen_at_rest()
            self._go_round()  # a lane may have taken what nobody wants any more, which is no news
            if num_seen is None:
                self._news.wait(_PAUSE_SECONDS)
            elif num_seen == self._num_seen_at_rest():
                return
        raise TimeoutError("the engine does not come to rest")

    def _num_seen_at_rest(self) -> int | None:
        """How many decisions have been seen; None: the engine is not at rest."""
        with self._inside.lock:
            return len(self.decisions.seen) if self._is_quiet() else None

    def _go_round(self) -> None:
        """Return when the loop has done what it could do by now."""
        passed = threading.Event()
        self._engine.loop.call_soon_threadsafe(passed.set)
        if not passed.wait(_WAIT_SECONDS):
            raise TimeoutError("the engine's loop does not answer")

    def _has_undelivered(self) -> bool:
        """Whether a lane is about to look at something, which may be nothing that anybody wants."""
        return self._engine.has_undelivered or any(
            self._engine.has_queued(what) and self.decisions.num_idle(what) for what in ("spill", "restore")
        )

    def let_go(self) -> None:
        """From now on the engine moves by itself, so that the store can be closed."""
        self._resting.set()

    def finish_one(self) -> Job | None:
        """Have the next job of the script end, if there is any, and return it; then settle."""
        self.settle()
        could_end = [job for job in self.decisions.running if job in self._gates or self._could_end(job)]
        if not could_end:
            return None
        job = self._script.choose(could_end)
        if _is_copy(job):
            self.decisions.copies.end(job)
        else:
            gate = self._gates.pop(job)
            gate.get_loop().call_soon_threadsafe(gate.set_result, None)
        self.settle()
        return job

    def _could_end(self, job: Job) -> bool:
        return self.decisions.copies.could_end(job)

    def wait(self) -> None:
        """In place of the condition's: training waits, its lock held."""
        with self._inside.lock_given_back():
            if not self.settle():
                _finish_transfer(self.finish_one)

    def notify_all(self) -> None:
        """In place of the condition's."""

    def _is_quiet(self) -> bool:
        decisions = self.decisions
        return (
            len(decisions.transfers) == len(self._gates) + self.copies.num_waiting
            and not self._has_undelivered()
            and not decisions.has_idle_lane_and_work()
            and self._inside.num_discards == len(self.discarded)
        )


def _finish_transfer(finish_one: Callable[[], Job | None]) -> None:
    """Until one between host memory and disk has ended: the end of a copy wakes nobody."""
    while (job := finish_one()) is None or _is_copy(job):
        if job is None:
            raise RuntimeError("training waits, and nothing moves")


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
            store,
            min_bytes=0,
            device_bytes=settings.device_bytes,
            prefetch=settings.prefetch,
            lookahead_bytes=settings.lookahead_bytes,
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
                assert bool((saved == self._root_of(index) % 127).all())
            case Release(index):
                del self._graph[index]

    def _pack(self, number: int, index: int) -> None:
        root = self._root_of(index)
        saved, shared = self._workload.saved[index], self._workload.saved[root].is_shared
        if index == root:
            dtype = _DEVICE_DTYPE if saved.on_device else torch.int8
            self._storages[root] = torch.full((saved.nbytes,), root % 127, dtype=dtype)
        with patch.object(scope, "sequence_nr", lambda: saved.node):
            self._graph[index] = _Save.apply(self._leaf, self._storages[root])
        if self._last_use[root] == number and not shared:
            del self._storages[root]

    def _root_of(self, index: int) -> int:
        root = self._workload.saved[index].record
        return index if root is None else root


def real_decisions(
    place: Path,
    workload: Workload,
    settings: Settings,
    script: Script,
    num_steps: int,
    windows: Windows = Windows(),  # noqa: B008 - immutable
) -> tuple[list[Decision], Counters]:
    """What a real store in that directory decides."""
    followed = _Script(script)
    with _SteppedStore(
        place, host_bytes=settings.host_bytes, staging_bytes=settings.staging_bytes, codec="none"
    ) as store:
        inspect(store).let_staging_grow(settings.staging_grows)
        decisions = store.stepper.take_over(store, followed, next(store.keys) + 1, _Drive(settings), windows)
        try:
            for _ in range(num_steps):
                step = _RealStep(store, workload, settings)
                try:
                    _take(step, workload, store.stepper, followed)
                finally:
                    step.end_forward()
                del step
            inspect(store).residency.tidy()
            store.stepper.settle()
            while decisions.running or decisions.waiting:
                store.stepper.finish_one()
            inspect(store).residency.tidy()
            window = inspect(store).device_window
            used_bytes = [each.used_bytes for each in (window.resident, window.in_flight, window.reloaded)]
            assert used_bytes == [0, 0, 0], "nothing is left on the device"
        except StoreFullError:
            del decisions.seen[decisions.seen.index(_FULL) + 1 :]  # what follows, nobody simulates
        finally:
            store.stepper.let_go()
        return decisions.seen, inspect(store).counters


def _take(step: _RealStep, workload: Workload, stepper: Stepper, followed: _Script) -> None:
    for number, action in enumerate(workload.actions):
        try:
            step.act(number, action)
        except StoreFullError:
            stepper.decisions.seen.append(_FULL)
            raise
        stepper.settle()
        for _ in range(followed.num_after_action()):
            stepper.finish_one()


# --- the simulated one ------------------------------------------------------------------------------------------------


class _SteppedEngine:
    """The lanes of the simulated engine, which end a job when they are told to."""

    def __init__(self, decisions: Decisions, script: _Script, drive: _Drive) -> None:
        self.transfers: Rank
        self._drive = drive
        self._decisions = decisions
        self._script = script
        self._inbox: list[tuple[str, int, SimulatedRecord]] = []
        self._queues: dict[str, list[tuple[int, int, SimulatedRecord]]] = {what: [] for what in _NUM_LANES}
        self._numbers = count()
        self._records: dict[Job, SimulatedRecord] = {}
        self._ready: dict[Job, Copy | None] = {}
        self._discards: list[int] = []

    def submit_spill(self, record: SimulatedRecord) -> None:
        self._inbox.append(("spill", 1, record))

    def submit_restore(self, record: SimulatedRecord, *, demanded: bool) -> None:
        self._inbox.append(("restore", 0 if demanded else 1, record))

    def submit_discard(self, key: int) -> None:
        self._discards.append(key)

    def settle(self) -> bool:
        """See `Stepper`."""
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
                self._ready[job] = record.ready if what == "spill" else None
                return

    def finish_one(self) -> Job | None:
        """See `Stepper`."""
        self.settle()
        could_end = [job for job in self._decisions.running if self._could_end(job)]
        if not could_end:
            return None
        job = self._script.choose(could_end)
        if _is_copy(job):
            self._decisions.copies.end(job)
        else:
            self._end(job)
        self.settle()
        return job

    def _could_end(self, job: Job) -> bool:
        if _is_copy(job):
            return self._decisions.copies.could_end(job)
        ready = self._ready[job]
        return ready is None or ready.is_over

    def _end(self, job: Job) -> None:
        record = self._records.pop(job)
        if job.what == "restore":
            self.transfers.end_restore(record, Loaded(record.stored_bytes))
        elif self._drive.has_taken(record.key):
            self.transfers.end_spill(record, Stored(record.nbytes, "none"))
        else:
            self.transfers.end_spill(record, StoreFullError(record.nbytes, 0, 0))
        self._begin_next(job.what)


class _StreamsOfSimulation:
    """The copy engine of the simulated one. As on an accelerator, whoever queues work waits for none of it."""

    def __init__(self, queues: _Queues) -> None:
        self._queues = queues

    def copy_out(self, copy: Copy) -> None:
        self._queues.queue("offload", copy)

    def copy_in(self, copy: Copy) -> None:
        self._queues.queue("reload", copy)

    def wait(self, copy: Copy) -> None:
        self._queues.wait(copy)

    def catch_up(self) -> Process:
        yield from ()


def simulated_decisions(
    workload: Workload,
    settings: Settings,
    script: Script,
    num_steps: int,
    windows: Windows = Windows(),  # noqa: B008 - immutable
) -> tuple[list[Decision], Counters]:
    """What the simulated one decides."""
    drive = _Drive(settings)
    followed, decisions = _Script(script), Decisions(drive)
    clock = Clock(Flows(lambda counts: {}))
    engine = _SteppedEngine(decisions, followed, drive)
    copies = _StreamsOfSimulation(decisions.copies)
    books = HostWindows(settings.host_bytes, settings.staging_bytes, grows=settings.staging_grows)
    device = SimulatedDevice(copies, settings.device_bytes, *windows)
    rank = engine.transfers = Rank(clock, books, device, copies, engine, 0, workload, decisions)
    orders = LearnedOrders() if settings.prefetch == "learned" else None
    next_key = 0
    try:
        for _ in range(num_steps):
            host_bytes, staging_bytes = books.limits
            budgets = Budgets(host_bytes, settings.device_bytes, staging_bytes)
            log = GraphLog(workload.saved, next_key, settings.scope_lookahead_bytes, orders, budgets)
            _step(rank, clock, engine, log, workload, followed)
            next_key = log.next_key
        rank._drain()
        engine.settle()
        while decisions.running or decisions.waiting:
            engine.finish_one()
    except StoreFullError:
        decisions.seen.append(_FULL)
    return decisions.seen, rank.ledger.counters


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
                _finish_transfer(engine.finish_one)
            clock.run()
        engine.settle()
        for _ in range(script.num_after_action()):
            engine.finish_one()
            clock.run()
    rank.end(log)
