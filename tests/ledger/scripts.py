"""Which transfers of a store end when, and what it decided. `stepped_store.py` takes a store through a script."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Any, NamedTuple, Protocol

from tests.ledger.steps import Settings
from tierstore.base.defaults import NUM_IN_FLIGHT
from tierstore.disk.tier import Loaded, Stored
from tierstore.ledger.device_window import FLIGHT_BYTES, RELOAD_BYTES
from tierstore.ledger.observer import Observer

NUM_LANES = {"spill": NUM_IN_FLIGHT, "restore": NUM_IN_FLIGHT}


class Decision(NamedTuple):
    """What was decided, of which record; numbered by saved tensor, on through all steps."""

    what: str
    record: int


class Job(NamedTuple):
    """A transfer that has only to be said to be done. `number`: of a copy, for a record may be copied back again."""

    what: str
    record: int
    number: int = 0


class Device(NamedTuple):
    """The accelerator of a store: which tensors are saved there, and how much may stay there and be on its way."""

    saved: frozenset[int] = frozenset()
    device_bytes: int = 0
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

    def __init__(self, drive: Drive, first_key: int = 0, on_news: Callable[[], None] = lambda: None) -> None:
        self.seen: list[Decision] = []
        self.waiting: set[Job] = set()
        self.running: dict[Job, None] = {}  # in the order in which they began
        self.copies = Queues(self)
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
        return [job for job in self.running if not is_copy(job)]

    def num_idle(self, what: str) -> int:
        return NUM_LANES[what] - sum(1 for job in self.running if job.what == what)

    def has_idle_lane_and_work(self) -> bool:
        return any(any(job.what == what for job in self.waiting) and self.num_idle(what) for what in NUM_LANES)

    def _began(self, job: Job) -> None:
        self.waiting.discard(job)
        self.running[job] = None

    def _see(self, what: str, record: int) -> int:
        number = record - self._first_key
        self.seen.append(Decision(what, number))
        self._on_news()
        return number


def is_copy(job: Job) -> bool:
    return job.what in ("offload", "reload")


class Queued(Protocol):
    ready: Any
    is_over: bool

    def end(self) -> None: ...


class Queues:
    """Copies, each way in a queue. They are named by the decision that is told of them just after they are queued."""

    def __init__(self, decisions: Decisions) -> None:
        self._decisions = decisions
        self._queued: dict[str, deque[Queued]] = {"offload": deque(), "reload": deque()}
        self._jobs: dict[int, Job] = {}  # by the copy's id; it is kept
        self._kept: list[Queued] = []

    def queue(self, what: str, copy: Queued) -> None:
        self._queued[what].append(copy)
        self._kept.append(copy)

    def name(self, what: str, record: int) -> Job:
        job = self._jobs[id(self._queued[what][-1])] = Job(what, record, len(self._jobs))
        return job

    def wait(self, copy: Queued) -> None:
        self._decisions.computing_waits(self._jobs[id(copy)])

    def could_end(self, job: Job) -> bool:
        if not is_copy(job):
            return False
        first = self._queued[job.what][0]
        return self._jobs[id(first)] == job and (first.ready is None or first.ready.is_over)

    def end(self, job: Job) -> None:
        del self._decisions.running[job]
        self._queued[job.what].popleft().end()

    def end_all(self) -> None:
        for queued in self._queued.values():
            while queued:
                queued.popleft().end()


class FollowedScript:
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


class Drive:
    """Takes so much and no more, of both alike."""

    def __init__(self, settings: Settings) -> None:
        self._limit_bytes = inf if settings.disk_bytes is None else settings.disk_bytes
        self._held: dict[int, int] = {}  # bytes, by record

    def take(self, record: int, nbytes: int) -> None:
        if sum(self._held.values()) + nbytes <= self._limit_bytes:
            self._held[record] = nbytes

    def has_taken(self, record: int) -> bool:
        return record in self._held

    def free(self, records: Iterable[int]) -> None:
        for record in records:
            del self._held[record]


def finish_transfer(finish_one: Callable[[], Job | None]) -> None:
    """Until one between host memory and disk has ended: the end of a copy wakes nobody."""
    while (job := finish_one()) is None or is_copy(job):
        if job is None:
            raise RuntimeError("training waits, and nothing moves")
