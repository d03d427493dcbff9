"""Are saved tensors back in memory when backward asks for them, and does training wait for them?

A model with branches, whose saved tensors are twice the host budget. Counted, from the second step on, are those that
were on disk when backward asked for the first time. Two drives: the one that there is, and one so slow that it just
keeps up: a quarter faster than what has to be written needs in the time of forward, or to be read in that of backward,
both without a store. On the latter it shows what is known of the graph, and when. How other orders and shorter
lookaheads compare is the question of `prefetch_tuning.py`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from tierstore import TierStore, offload_module

from .branching import ROWS, SAVED_BYTES, SETTINGS, WIDTH, Branching, medians, train
from .goals import Goal
from .harness import Benchmark, main_of_one_variant
from .paced_drive import open_paced_store

HOST_BYTES = SAVED_BYTES // 2
STEPS = 4
ENOUGH = 1.25

BENCHMARK = Benchmark(
    name="prefetch",
    question="A branching model: unpacks whose bytes were back in memory, and time spent waiting",
    variants=(
        "learned",
        "learned, a scope for each block",
        "learned, slow drive",
    ),
    rounds=1,
    compare="difference",
    settings=SETTINGS | {"host_bytes": HOST_BYTES, "steps": STEPS, "slow_drive": ENOUGH},
    goals=tuple(
        goal
        for variant in ("learned", "learned, a scope for each block", "learned, slow drive")
        for goal in (
            Goal("prefetched in time, percent of unpacks from disk", "hits_percent", variant, at_least=98),
            Goal("waiting in unpack, percent of the step", "unpack_waits_percent", variant, at_most=3),
        )
    ),
)


def just_enough_bytes_per_second() -> float:
    """The slow drive's speed, from a step without a store: the second, because the first is slower."""
    model, batch = Branching(), torch.randn(ROWS, WIDTH)
    for _ in range(2):
        started = time.perf_counter()
        loss = model(batch)
        halfway = time.perf_counter()
        loss.backward()
        finished = time.perf_counter()
    return ENOUGH * (SAVED_BYTES - HOST_BYTES) / min(halfway - started, finished - halfway)


def measure(variant: str, scratch: Path) -> dict[str, float]:
    """Percentages of the unpacks and of the step, and the step; medians after the first step."""
    torch.set_num_threads(1)
    how = variant.partition(", ")[2]
    options: dict[str, Any] = {"host_bytes": HOST_BYTES, "codec": "none"}
    if how == "slow drive":
        opened = open_paced_store(scratch, just_enough_bytes_per_second(), **options)
    else:
        opened = TierStore(scratch, **options)
    with opened as store:
        if how == "a scope for each block":
            steps = train(store, STEPS, wrap=lambda block: offload_module(block, store=store))
        else:
            steps = train(store, STEPS)
    asked = [step.prefetch_hits + step.prefetch_late + step.prefetch_misses for step in steps[1:]]
    return {
        "asked_for_from_disk": sum(asked) / len(asked),
        "hits_percent": 100 * sum(step.prefetch_hits for step in steps[1:]) / max(sum(asked), 1),
        "unpack_waits_percent": medians(
            steps, lambda step: 100 * step.stall_seconds_of("unpack waits for restore") / step.seconds
        ),
        "pack_waits_percent": medians(
            steps, lambda step: 100 * step.stall_seconds_of("pack waits for budget") / step.seconds
        ),
        "step_seconds": medians(steps, lambda step: step.seconds),
    }


if __name__ == "__main__":
    main_of_one_variant(measure)
