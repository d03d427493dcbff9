"""Which order and which lookahead are best, for which model, on which drive?

Three models whose saved tensors are eight times the host budget, and three drives: the one that there is, one that
just keeps up (a quarter faster than what has to be written needs in the time of forward, or to be read in that of
backward, both without a store), and one of half the speed that it would take. Where the real drive is slower than the
second, the first two are the same.

A policy is an order and how far ahead of backward it is followed. All policies for one model on one drive take turns,
a step each, in one process with a store for each of them, and whoever went first goes last the next time: they differ
by less than a shared machine does from one minute to the next. A plain step takes its turn too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tierstore import TierStore, tiered_offload

from .branching import Step
from .harness import Benchmark, main_of_one_variant
from .paced_drive import open_paced_store
from .tuning_workloads import NUM_THREADS, SAVED_BYTES, WORKLOADS, Workload, make_workload

MIB = 2**20
HOST_SHARE = 8
STAGING_BYTES = 64 * MIB
DRIVES: dict[str, float | None] = {"drive as it is": None, "drive that keeps up": 1.25, "drive too slow": 0.5}
"""Speed, of what it takes to move all that has to go; None: not slowed down."""
LOOKAHEADS = {"8 MiB": 8 * MIB, "32 MiB": 32 * MIB, "automatic": None}
PLAIN = "plain"
POLICIES: dict[str, dict[str, Any]] = {
    "none": {"prefetch": "none"},
    **{
        f"{order}, {ahead}": {"prefetch": order, "lookahead_bytes": LOOKAHEADS[ahead]}
        for order in ("reverse", "learned")
        for ahead in LOOKAHEADS
    },
}
"""Arguments of `tiered_offload`."""
WARM_UP_STEPS = 2
"""The first finds the order of backward, the second is the first that follows it."""
TURNS = 3

PROCESSES = {
    f"{workload}, {drive}": [f"{workload}, {drive}: {policy}" for policy in (PLAIN, *POLICIES)]
    for workload in WORKLOADS
    for drive in DRIVES
}

BENCHMARK = Benchmark(
    name="prefetch_tuning",
    question="A step of three models on three drives, by order and lookahead of prefetching",
    variants=tuple(variant for variants in PROCESSES.values() for variant in variants),
    processes=PROCESSES,
    rounds=1,  # each figure is of several turns
    compare="none",
    plot="bench.tuning_plot",
    settings={
        "saved_bytes": SAVED_BYTES,
        "host_share": HOST_SHARE,
        "staging_bytes": STAGING_BYTES,
        "drives": DRIVES,
        "num_threads": NUM_THREADS,
        "turns": TURNS,
    },
)

Figures = dict[str, float]


class Contender:
    """One policy with a store of its own, or none; takes a step when it is told to.

    Args:
        workload: which all of them share.
        store: None: a plain step.
        options: of `tiered_offload`.

    Attributes:
        forward_seconds, backward_seconds: of each step so far.
        steps: what the store counted in each.
        staging_bytes: the most that was in the store's window for what is moved, during each backward.
    """

    def __init__(self, workload: Workload, store: TierStore | None, options: Mapping[str, Any]) -> None:
        self.forward_seconds: list[float] = []
        self.backward_seconds: list[float] = []
        self.steps: list[Step] = []
        self.staging_bytes: list[int] = []
        self._workload = workload
        self._store = store
        self._options = options

    def step(self) -> None:
        """One step, timed; then waits, untimed, until the store is idle, so that the next one has the drive alone."""
        if self._store is None:
            self._timed_step(nullcontext)
            return
        before, staging = self._store.stats(), self._store.residency.rules.windows.staging

        def forget_peak() -> None:
            staging.peak_bytes = staging.used_bytes

        self._timed_step(partial(tiered_offload, self._store, **self._options), forget_peak)
        self.staging_bytes.append(staging.peak_bytes)
        self.steps.append(Step(before, self._store.stats(), self.seconds[-1]))
        self._store.flush()

    @property
    def seconds(self) -> list[float]:
        """Of each step so far."""
        return [sum(halves) for halves in zip(self.forward_seconds, self.backward_seconds, strict=True)]

    def _timed_step(
        self, around: Callable[[], AbstractContextManager[object]], between: Callable[[], None] = lambda: None
    ) -> None:
        times = []

        def note() -> None:
            times.append(time.perf_counter())
            between()

        started = time.perf_counter()
        self._workload.step(around, note)
        finished = time.perf_counter()
        self.forward_seconds.append(times[0] - started)
        self.backward_seconds.append(finished - times[0])


def measure(process: str, scratch: Path) -> dict[str, Figures]:
    """Of each policy, and of a plain step, by variant: medians of its steps after the warm-up."""
    name, _, drive = process.partition(", ")
    torch.set_num_threads(NUM_THREADS)
    workload = make_workload(name)
    plain = Contender(workload, None, {})
    for _ in range(WARM_UP_STEPS):
        plain.step()
    with ExitStack() as stack:
        contenders = {PLAIN: plain}
        for policy, options in POLICIES.items():
            store = stack.enter_context(open_store(scratch, workload, DRIVES[drive], plain))
            contenders[policy] = Contender(workload, store, options)
            for _ in range(WARM_UP_STEPS):
                contenders[policy].step()
        order = list(contenders.values())
        for _ in range(TURNS):
            for contender in order:
                contender.step()
            order.reverse()
    return {f"{process}: {policy}": figures(contender) for policy, contender in contenders.items()}


def open_store(scratch: Path, workload: Workload, drive: float | None, plain: Contender) -> TierStore:
    """A store that keeps little in memory, on a drive of so much of the speed that the plain steps call for."""
    host_bytes = workload.saved_bytes // HOST_SHARE
    options = {"host_bytes": host_bytes, "staging_bytes": STAGING_BYTES, "codec": "none"}
    if drive is None:
        return TierStore(scratch, **options)
    shortest = min(plain.forward_seconds[-1], plain.backward_seconds[-1])
    return open_paced_store(scratch, drive * (workload.saved_bytes - host_bytes) / shortest, **options)


def figures(contender: Contender) -> Figures:
    """Medians over the turns, the least and the most where spread counts, and of requests the mean of a step."""
    seconds, steps = contender.seconds[WARM_UP_STEPS:], contender.steps[WARM_UP_STEPS:]
    found = {
        "step_seconds": statistics.median(seconds),
        "least_step_seconds": min(seconds),
        "most_step_seconds": max(seconds),
    }
    if not steps:
        return found
    for name in ("hits", "late", "misses"):
        found[name] = statistics.mean(getattr(step, f"prefetch_{name}") for step in steps)
    for name, cause in (("pack_waits", "pack waits for budget"), ("unpack_waits", "unpack waits for restore")):
        found[f"{name}_seconds"] = statistics.median(step.stall_seconds_of(cause) for step in steps)
    found["spilled_bytes"] = statistics.mean(step.spilled_bytes for step in steps)
    found["staging_in_backward_bytes"] = max(contender.staging_bytes[WARM_UP_STEPS:])
    return found


if __name__ == "__main__":
    main_of_one_variant(measure)
