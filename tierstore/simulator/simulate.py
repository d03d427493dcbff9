"""Runs a workload on hardware, in virtual time, and reports what each step costs. Start here."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from math import log

from ..base.defaults import NUM_AT_ONCE, NUM_RESTORES, NUM_SPILLS
from ..errors import ConfigError
from ..rules.counters import Counters
from ..rules.graph_order import Budgets
from ..rules.lookahead import LearnedOrders
from ..rules.observer import Observer
from ..rules.windows import HostWindows
from .clock import Clock, Process
from .device import SimulatedDevice
from .engine import SimulatedEngine, Transfer
from .hardware import Activity, Hardware
from .rank import Rank
from .record import GraphLog
from .workload import Pack, Unpack, Workload

_CONTENTIONS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
_NUM_REFINEMENTS = 5
_NUM_FITTED_STEPS = 4
_PREFETCH_ORDERS = ("learned", "reverse", "none")


@dataclass(frozen=True)
class Settings:
    """The options of each rank's store and scope, as `TierStore` and `tiered_offload` have them.

    `staging_grows`: behave as a store whose `staging_bytes` is None. `disk_bytes`: None: an equal part of the drive.
    Raises ConfigError: `prefetch` is unknown, or a number of lanes or turns is below 1.
    """

    host_bytes: int
    staging_bytes: int = 112 * 2**20
    disk_bytes: int | None = None
    codec: str = "none"
    prefetch: str = "learned"
    lookahead_bytes: int | None = None
    device_bytes: int = 0
    num_spill_lanes: int = NUM_SPILLS
    num_restore_lanes: int = NUM_RESTORES
    num_turns: int = NUM_AT_ONCE
    staging_grows: bool = False

    def __post_init__(self) -> None:
        if self.prefetch not in _PREFETCH_ORDERS:
            raise ConfigError("prefetch", self.prefetch, f"give one of {', '.join(map(repr, _PREFETCH_ORDERS))}")
        for name in ("num_spill_lanes", "num_restore_lanes", "num_turns"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "give at least 1")

    @property
    def scope_lookahead_bytes(self) -> int | None:
        return 0 if self.prefetch == "none" else self.lookahead_bytes


@dataclass(frozen=True)
class SimulatedStep:
    """The cost of one step of one rank; peaks are the most at once, in this step.

    Attributes:
        counters: what was counted during the step, as in `StoreStats`.
        link_wait_seconds: how long the accelerator waited for copies; not in `stall_seconds`, which are the host's.
        device_bytes_peak: the most that only the store held on the accelerator, kept and being copied.
        transfers: every write and read that ended in the step, in the order of their ends.
    """

    seconds: float
    counters: Counters
    link_wait_seconds: float
    host_bytes_peak: int
    staging_bytes_peak: int
    device_bytes_peak: int
    transfers: Sequence[Transfer]

    @property
    def stall_seconds(self) -> Mapping[str, float]:
        return self.counters.stall_seconds


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
        ConfigError: a number is below 1, there is no such codec, or tensors are saved on an accelerator and there is
            none.
        StoreFullError: host budget and disk are full; the store would raise it too.
    """
    _check(workload, hardware, num_steps, num_ranks)
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


def _check(workload: Workload, hardware: Hardware, num_steps: int, num_ranks: int) -> None:
    for name, number in (("num_steps", num_steps), ("num_ranks", num_ranks)):
        if number < 1:
            raise ConfigError(name, number, "give at least 1")
    if workload.uses_device and hardware.link is None:
        raise ConfigError("link", None, "the workload saves tensors on an accelerator: give hardware that has one")


def steady_seconds(workload: Workload, hardware: Hardware, settings: Settings) -> float:
    """The median time of simulated steps after the first, which teaches the order. Raises as `simulate`."""
    steps = simulate(workload, hardware, settings, num_steps=_NUM_FITTED_STEPS)[0]
    return statistics.median(step.seconds for step in steps[1:])


def fit(hardware: Hardware, workload: Workload, settings: Settings, step_seconds: float) -> Hardware:
    """The same machine with the contention, from 0 to 8, that brings simulated steps nearest to the observed one.

    `step_seconds`: the median of real steps after the first. Simulates up to 16 times. Raises ConfigError: it took no
    time. StoreFullError: in a simulation, the store would be.
    """
    if not step_seconds > 0:
        raise ConfigError("step_seconds", step_seconds, "give a step that took some time")

    def error_of(contention: float) -> float:
        seconds = steady_seconds(workload, replace(hardware, contention=contention), settings)
        return abs(log(seconds / step_seconds))

    errors = {contention: error_of(contention) for contention in _CONTENTIONS}
    for _ in range(_NUM_REFINEMENTS):  # halfway from the best to its neighbours
        tried, best = sorted(errors), min(errors, key=errors.__getitem__)
        place = tried.index(best)
        for neighbour in tried[max(0, place - 1) : place + 2]:
            between = (neighbour + best) / 2
            if between not in errors:
                errors[between] = error_of(between)
    return replace(hardware, contention=min(errors, key=errors.__getitem__))


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
        self._next_key = 0
        self._orders = LearnedOrders() if settings.prefetch == "learned" else None
        self._windows = HostWindows(settings.host_bytes, settings.staging_bytes, grows=settings.staging_grows)
        self._num_queued = _NumQueued()
        self._copies = SimulatedDevice(clock)
        self._engine = SimulatedEngine(clock, hardware, workload.training_cores, settings)
        self._rank = self._engine.transfers = Rank(
            clock,
            self._windows,
            self._copies,
            self._engine,
            settings.disk_bytes or 0,
            workload,
            self._num_queued,
            device_bytes=settings.device_bytes,
        )

    def steps(self, num_steps: int) -> Process:
        settings, rank = self._settings, self._rank
        for _ in range(num_steps):
            host_bytes, staging_bytes = self._windows.limits
            budgets = Budgets(host_bytes, settings.device_bytes, staging_bytes)
            began_seconds, before = self._clock.now_seconds, deepcopy(rank.ledger.counters)
            waited_seconds = self._copies.waited_seconds
            self._begin_peaks()
            log = GraphLog(self._workload.saved, self._next_key, settings.scope_lookahead_bytes, self._orders, budgets)
            yield from self._step(log)
            self._next_key = log.next_key
            self.done.append(self._step_since(began_seconds, before, waited_seconds))

    def _step(self, log: GraphLog) -> Process:
        self._rank.begin(log)
        for action in self._workload.actions:
            num_before = self._num_queued.value
            yield from self._rank.act(log, action)
            if isinstance(action, Pack | Unpack):
                call_seconds = self._call_seconds * (self._num_queued.value - num_before)
                if call_seconds:
                    yield self._clock.work(Activity.COMPUTE, call_seconds)
        self._rank.end(log)

    def _begin_peaks(self) -> None:
        for window in (self._windows.host, self._windows.staging):
            window.peak_bytes = window.used_bytes
        self._rank.device.begin_peak()

    def _step_since(self, began_seconds: float, before: Counters, waited_seconds: float) -> SimulatedStep:
        transfers, self._engine.ended = self._engine.ended, []
        return SimulatedStep(
            self._clock.now_seconds - began_seconds,
            _difference(self._rank.ledger.counters, before),
            self._copies.waited_seconds - waited_seconds,
            self._windows.host.peak_bytes,
            self._windows.staging.peak_bytes,
            self._rank.device.peak_bytes,
            transfers,
        )


def _difference(after: Counters, before: Counters) -> Counters:
    counted = Counters()
    for name in Counters.__dataclass_fields__:
        now, then = getattr(after, name), getattr(before, name)
        if isinstance(now, dict):
            getattr(counted, name).update({cause: now[cause] - then[cause] for cause in now})
        else:
            setattr(counted, name, now - then)
    return counted
