"""Carries out a plan: counts operations, draws random numbers from its seed, and decides what happens to each."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from .plan import Bandwidth, Fails, Fault, FaultPlan, Late, Latency, Operation, Rule, Short, Signal, Torn


class Drawn(NamedTuple):
    """The fate of one operation.

    Attributes:
        delay_seconds: wait before it begins; `least_seconds`: how long it takes at least, from then on.
        error: the `errno` number that it fails with; None: it does not fail.
        max_bytes: the most that the call moves; None: all.
        torn_bytes: bytes that the call really writes while it reports all; None: all.
        num_others: how many other operations are reported done before it.
    """

    delay_seconds: float = 0.0
    least_seconds: float = 0.0
    error: int | None = None
    max_bytes: int | None = None
    torn_bytes: int | None = None
    num_others: int = 0


class Faults:
    """Decides by a plan what happens to each operation. Any thread; does no I/O. `clock`: in seconds, for
    bandwidths."""

    def __init__(self, plan: FaultPlan | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._injected: Counter[str] = Counter()
        self.set(plan or FaultPlan())

    def set(self, plan: FaultPlan) -> None:
        """Use this plan from now on, counting its occurrences from here. Operations under way are not affected."""
        with self._lock:
            self._plan = plan
            self._num_seen: Counter[str] = Counter()
            self._randoms = [random.Random(f"{plan.seed} {number}") for number in range(len(plan.rules))]
            self._free_at: defaultdict[int, float] = defaultdict(float)  # a rule's bandwidth, by number

    @property
    def injected(self) -> Mapping[str, int]:
        """How often each fault happened to each operation, over all plans: {"write Fails": 2}. A copy."""
        with self._lock:
            return dict(self._injected)

    def draw(self, operation: Operation, num_bytes: int = 0, descriptor: int | None = None) -> Drawn:
        """Count an operation of `num_bytes` that begins, and return what happens to it. Sends signals. `descriptor`: of
        the file, for a system call."""
        drawn, processes = Drawn(), []
        with self._lock:
            self._num_seen[operation] += 1
            for number, rule in enumerate(self._plan.rules):
                if not (self._is_due(number, rule, operation) and _is_under(rule.under, descriptor)):
                    continue
                self._injected[f"{operation} {type(rule.fault).__name__}"] += 1
                if isinstance(rule.fault, Signal):
                    processes.append(rule.fault)
                else:
                    drawn = self._with(drawn, number, rule.fault, num_bytes)
        for process in processes:
            os.kill(process.pid, process.number)
        return drawn

    def _is_due(self, number: int, rule: Rule, operation: Operation) -> bool:
        if operation not in rule.names:
            return False
        if rule.occurrences is not None and self._num_seen[operation] not in rule.occurrences:
            return False
        return rule.probability >= 1 or self._randoms[number].random() < rule.probability

    def _with(self, drawn: Drawn, number: int, fault: Fault, num_bytes: int) -> Drawn:
        match fault:
            case Latency():
                return drawn._replace(delay_seconds=drawn.delay_seconds + _seconds_of(fault, self._randoms[number]))
            case Bandwidth():
                now = self._clock()
                free_at = self._free_at[number] = max(self._free_at[number], now) + num_bytes / fault.bytes_per_second
                return drawn._replace(least_seconds=max(drawn.least_seconds, free_at - now))
            case Fails():
                return drawn if drawn.error is not None else drawn._replace(error=fault.number)
            case Short():
                return drawn._replace(max_bytes=fault.max_bytes)
            case Torn():
                return drawn._replace(torn_bytes=fault.num_bytes)
            case Late():
                return drawn._replace(num_others=fault.num_others)
        return drawn


def _is_under(directory: str | None, descriptor: int | None) -> bool:
    """Whether the file lies below the directory; one without a name still tells in /proc where it was made."""
    if directory is None or descriptor is None:
        return directory is None
    return Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(os.path.realpath(directory))


def _seconds_of(latency: Latency, numbers: random.Random) -> float:
    if latency.spread == "exponential" and latency.seconds:
        return numbers.expovariate(1 / latency.seconds)
    return latency.seconds
