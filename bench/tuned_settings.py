"""Are tuned settings better than the ones before? Both on real steps, by turns.

Each training is tuned in its process (`tierstore.tuning.tune_loop`) under a limit of memory: the usual staging window,
and a quarter of what a step saves. Then the outcome is measured once more against the defaults within that limit, since
the best of several measurements flatters itself. A third store has the defaults once more, and shows what chance does.
The stores take turns, a step each, in every order.

Two trainings begin where there is something to find: the transformer with settings that are known to be bad (nothing is
read ahead), and with half as much again to save, all defaults, on a drive as slow as the usual volume of a cloud.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import torch

from tierstore import TierStore
from tierstore.base.defaults import STAGING_BYTES
from tierstore.tuning import TrialSettings, tune_loop
from tierstore.tuning.settings import default_settings

from .cgroup import slow_drive
from .goals import Goal
from .harness import Benchmark
from .paired import estimate_of
from .tuning_workloads import NUM_THREADS, WORKLOADS, Contender, Workload, make_workload, transformer

STEPS = 2
ROUNDS = 3
WARMUPS = 2
TURNS = 24
"""A multiple of six: then each store has each place in a turn equally often."""
HOST_SHARE = 4
BADLY_SET = "transformer, badly set"
SLOW_DRIVE = "transformer, slow drive"
SLOW_DRIVE_BATCH = 12
SLOW_BYTES_PER_SECOND = 125 * 10**6
"""What a gp3 volume of Amazon's has as it comes."""

BENCHMARK = Benchmark(
    name="tuned_settings",
    question="A step with tuned settings, beside one with those before, under the same limit of memory",
    variants=(*WORKLOADS, SLOW_DRIVE, BADLY_SET),
    goals=(
        *(
            Goal(f"a tuned {name} step, of a default one; 1: these stay", "changed_ratio", name, at_most=1.0)
            for name in WORKLOADS
        ),
        Goal("a tuned step on a slow drive, of one with the defaults", "time_ratio", SLOW_DRIVE, at_most=0.95),
        Goal("a tuned step of the transformer, of one that reads nothing ahead", "time_ratio", BADLY_SET, at_most=0.95),
    ),
    plotted=("step_seconds_before", "tuned_step_seconds"),
    timeout_seconds=600,
)


def measure(variant: str, scratch: Path) -> dict[str, float]:
    """Tune, then compare. `time_ratio` is the median over the turns, within `least_ratio` and `most_ratio` with 95 %;
    `same_ratio` is what the same settings come to beside themselves. `changed_ratio` is the median where tuning has
    changed anything, else 1."""
    torch.set_num_threads(NUM_THREADS)
    workload = _workload(variant)
    before = default_settings(STAGING_BYTES + workload.saved_bytes // HOST_SHARE)
    if variant == BADLY_SET:
        before = replace(before, prefetch="none")
    with slow_drive(scratch, SLOW_BYTES_PER_SECOND) if variant == SLOW_DRIVE else nullcontext():
        started = time.perf_counter()
        tuned = tune_loop(lambda scope: workload.step(lambda: scope), scratch, start=before, steps=STEPS, rounds=ROUNDS)
        tuning_seconds = time.perf_counter() - started
        settings = tuned.chosen.settings
        figures = {
            "tuning_seconds": tuning_seconds,
            "num_tried": len(tuned.tried),
            "host_bytes": settings.host_bytes,
            "staging_bytes": settings.staging_bytes,
            "io_depth": settings.io_depth,
            "has_fixed_codec": float(settings.codec not in ("auto", "none")),
            "settings_stay": float(settings == before),
        }
        compared = _compare(workload, {"before": before, "tuned": settings, "same": before}, scratch)
        return figures | compared | {"changed_ratio": 1.0 if settings == before else compared["time_ratio"]}


def _workload(variant: str) -> Workload:
    name = variant.partition(",")[0]
    if variant != SLOW_DRIVE:
        return make_workload(name)
    torch.manual_seed(0)
    return transformer(SLOW_DRIVE_BATCH)


def _compare(workload: Workload, compared: Mapping[str, TrialSettings], scratch: Path) -> dict[str, float]:
    orders = list(permutations(compared))
    with ExitStack() as stack:
        contenders = {
            name: Contender(workload, stack.enter_context(TierStore(scratch, **each.store)), **each.offload)
            for name, each in compared.items()
        }
        for turn in range(WARMUPS + TURNS):
            for name in orders[turn % len(orders)]:
                contenders[name].step()
    taken = {name: [step["step_seconds"] for step in each.steps[WARMUPS:]] for name, each in contenders.items()}
    tuned, same = (estimate_of(taken[name], taken["before"]) for name in ("tuned", "same"))
    return {
        "time_ratio": tuned.median,
        "least_ratio": tuned.low,
        "most_ratio": tuned.high,
        "same_ratio": same.median,
        "least_same_ratio": same.low,
        "most_same_ratio": same.high,
        "step_seconds_before": statistics.median(taken["before"]),
        "tuned_step_seconds": statistics.median(taken["tuned"]),
    }
