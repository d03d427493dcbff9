"""Are saved tensors back in memory when backward asks for them, and does training wait for them?

A model with branches, whose saved tensors are twice the host budget. Counted, from the second step on, are those that
were on disk when backward asked for the first time. Two drives: the one that there is, and one so slow that it just
keeps up: a quarter faster than what has to move needs in the shorter of forward and backward without a store.
"""

from __future__ import annotations

import statistics
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from tierstore import offload_module

from .goals import Goal
from .harness import Benchmark
from .trainings import Figures
from .tuning_workloads import ROWS, WIDTH, Contender, branching, open_store, speed_that_keeps_up

STAGES = 12
SAVED_BYTES = (STAGES * 8 - 1) * ROWS * WIDTH * 4
"""About what one step saves and nobody else holds."""
HOST_BYTES = SAVED_BYTES // 2
STEPS = 4
ENOUGH = 1.25
LEARNED, SCOPES, SLOW = VARIANTS = ("learned", "learned, a scope for each block", "learned, slow drive")

BENCHMARK = Benchmark(
    name="prefetch",
    question="A branching model: unpacks whose bytes were back in memory, and time spent waiting",
    variants=VARIANTS,
    goals=tuple(
        goal
        for variant in VARIANTS
        for goal in (
            Goal("prefetched in time, percent of unpacks from disk", "hits_percent", variant, at_least=98),
            Goal("waiting in unpack, percent of the step", "unpack_waits_percent", variant, at_most=3),
        )
    ),
)


def measure(variant: str, scratch: Path) -> Figures:
    """Percentages of the unpacks and of the step, and the step; medians after the first step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = branching(STAGES, SAVED_BYTES, has_matrices=False)
    speed = None
    if variant == SLOW:
        plain = Contender(workload)
        for _ in range(2):  # the first is slower
            plain.step()
        speed = ENOUGH * speed_that_keeps_up(workload, plain, HOST_BYTES)
    with open_store(scratch, speed, host_bytes=HOST_BYTES) as store:
        if variant == SCOPES:
            stages = workload.model.stages
            workload.model.stages = nn.ModuleList(offload_module(stage, store=store) for stage in stages)
        contender = Contender(workload, store, nullcontext if variant == SCOPES else None)
        for _ in range(STEPS):
            contender.step()
    steps = contender.steps[1:]
    asked = [step["hits"] + step["late"] + step["misses"] for step in steps]
    waits = [100 * step["unpack_waits_seconds"] / step["step_seconds"] for step in steps]
    return {
        "asked_for_from_disk": statistics.mean(asked),
        "hits_percent": 100 * sum(step["hits"] for step in steps) / max(sum(asked), 1),
        "unpack_waits_percent": statistics.median(waits),
        "step_seconds": contender.median("step_seconds", 1),
    }
