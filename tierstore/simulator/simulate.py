"""Runs a workload on hardware, in virtual time, and reports what each step costs. Start here."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

from ..base.defaults import NUM_AT_ONCE
from ..ledger.counters import Counters
from ..ledger.lookahead import LearnedOrders
from ..ledger.observer import Observer
from ..ledger.windows import HostWindows
from .clock import Clock, Process
from .engine import SimulatedEngine
from .hardware import Activity, Hardware
from .rank import Rank
from .workload import Action, Pack, Unpack, Workload


@dataclass(frozen=True)
class Settings:
    """The options of each rank's store and scope, as `TierStore` and `tiered_offload` have them.

    `staging_grows`: behave as a store whose `staging_bytes` is None. `disk_bytes`: None: an equal part of the drive."""

    host_bytes: int
    staging_bytes: int = 112 * 2**20
    disk_bytes: int | None = None
    codec: str = "none"
    prefetch: str = "learned"
    lookahead_bytes: int | None = None
    io_depth: int = NUM_AT_ONCE
    staging_grows: bool = False

    @property
    def scope_lookahead_bytes(self) -> int | None:
        return 0 if self.prefetch == "none" else self.lookahead_bytes


@dataclass(frozen=True)
class SimulatedStep:
    """The cost of one step of one rank. `counters`: what was counted during the step, as in `StoreStats`."""

    seconds: float
    counters: Counters


def simulate(
    workload: Workload,
    hardware: Hardware,
    settings: Settings,
    *,
    num_steps: int = 3,
    num_ranks: int = 1,
) -> Sequence[Sequence[SimulatedStep]]:
    """Simulate steps; returns those of each rank, in order. In the first step the store does not know the graph yet,
    and the second starts with the state that the first left. The last one stands for all later steps.

    Ranks begin together and share the drive and the cores, so they do the same at the same time. Waits for nothing and
    touches no file; its run time grows with the number of transfers.

    Raises:
        ConfigError: there is no such codec.
        StoreFullError: host budget and disk are full; the store would raise it too.
    """
    clock = Clock(partial(hardware.rates, workload.training_cores))
    if settings.disk_bytes is None:
        settings = replace(settings, disk_bytes=hardware.drive.capacity_bytes // num_ranks)
    ranks = [_Run(clock, workload, hardware, settings) for _ in range(num_ranks)]
    for rank in ranks:
        clock.begin(rank.steps(num_steps))
    clock.run()
    if any(len(rank.done) < num_steps for rank in ranks):
        raise RuntimeError("a simulated thread waits for what will never happen")
    return [rank.done for rank in ranks]


class _NumQueued(Observer):
    value = 0

    def spill_queued(self, record: int, nbytes: int) -> None:
        self.value += 1

    def restore_queued(self, record: int, nbytes: int, *, demanded: bool) -> None:
        self.value += 1


class _Run:
    def __init__(self, clock: Clock, workload: Workload, hardware: Hardware, settings: Settings) -> None:
        self.done: list[SimulatedStep] = []
        self._clock, self._workload, self._settings = clock, workload, settings
        self._call_seconds = hardware.call_seconds_per_record
        windows = HostWindows(settings.host_bytes, settings.staging_bytes, grows=settings.staging_grows)
        self._num_queued = _NumQueued()
        free_cores = max(0.0, hardware.cores - workload.training_cores)
        engine = SimulatedEngine(clock, hardware, free_cores, settings)
        self._rank = engine.rank = Rank(
            clock, windows, engine.wake, settings.disk_bytes or 0, workload, self._num_queued
        )

    def steps(self, num_steps: int) -> Process:
        orders = LearnedOrders() if self._settings.prefetch == "learned" else None
        for _ in range(num_steps):
            began_seconds, before = self._clock.now_seconds, deepcopy(self._rank.books.counters)
            self._rank.begin(orders, self._settings.scope_lookahead_bytes)
            for action in self._workload.actions:
                yield from self._act(action)
            self._rank.end()
            seconds = self._clock.now_seconds - began_seconds
            self.done.append(SimulatedStep(seconds, _difference(self._rank.books.counters, before)))

    def _act(self, action: Action) -> Process:
        num_before = self._num_queued.value
        yield from self._rank.act(action)
        if isinstance(action, Pack | Unpack):
            call_seconds = self._call_seconds * (self._num_queued.value - num_before)
            if call_seconds:
                yield self._clock.work(Activity.COMPUTE, call_seconds)


def _difference(after: Counters, before: Counters) -> Counters:
    counted = Counters()
    for name in Counters.__dataclass_fields__:
        now, then = getattr(after, name), getattr(before, name)
        if isinstance(now, dict):
            getattr(counted, name).update({cause: now[cause] - then[cause] for cause in now})
        else:
            setattr(counted, name, now - then)
    return counted
