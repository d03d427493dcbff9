"""Which order and which lookahead are best, for which model, on which drive?

Three models whose saved tensors are eight times the host budget, and three drives: the one that there is, one that just
keeps up (as in `prefetch.py`), and one of half the speed that it would take. A policy is an order and how far ahead of
backward it is followed. All policies for one model on one drive take turns, a step each, in one process with a store
for each of them: they differ by less than a shared machine does from one minute to the next. A plain step too.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from .harness import Benchmark
from .trainings import Figures
from .tuning_workloads import CAUSES, NUM_THREADS, WORKLOADS, Contender, make_workload, open_store, speed_that_keeps_up

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
    plotted=("step_seconds", "unpack_waits_seconds", "pack_waits_seconds"),
)


def measure(process: str, scratch: Path) -> dict[str, Figures]:
    """Of each policy, and of a plain step, by variant: medians of its steps after the warm-up."""
    name, _, drive = process.partition(", ")
    torch.set_num_threads(NUM_THREADS)
    workload = make_workload(name)
    host_bytes = workload.saved_bytes // HOST_SHARE
    plain = Contender(workload)
    for _ in range(WARM_UP_STEPS):
        plain.step()
    share = DRIVES[drive]
    speed = None if share is None else share * speed_that_keeps_up(workload, plain, host_bytes)
    with ExitStack() as stack:
        contenders = {PLAIN: plain}
        for policy, options in POLICIES.items():
            store = stack.enter_context(open_store(scratch, speed, host_bytes=host_bytes, staging_bytes=STAGING_BYTES))
            contenders[policy] = Contender(workload, store, **options)
            for _ in range(WARM_UP_STEPS):
                contenders[policy].step()
        order = list(contenders.values())
        for _ in range(TURNS):
            for contender in order:
                contender.step()
            order.reverse()
    return {f"{process}: {policy}": figures(contender) for policy, contender in contenders.items()}


def figures(contender: Contender) -> Figures:
    """Medians over the turns, the least and the most where spread counts, and of requests the mean of a step."""
    steps = contender.steps[WARM_UP_STEPS:]
    found = {
        "step_seconds": contender.median("step_seconds", WARM_UP_STEPS),
        "least_step_seconds": min(step["step_seconds"] for step in steps),
        "most_step_seconds": max(step["step_seconds"] for step in steps),
    }
    if "hits" in steps[0]:
        for name in ("hits", "late", "misses", "spilled_bytes"):
            found[name] = statistics.mean(step[name] for step in steps)
        for name in CAUSES:
            found[f"{name}_seconds"] = contender.median(f"{name}_seconds", WARM_UP_STEPS)
    return found
