"""Are tuned settings better than the defaults? Both on three trainings, by turns.

Each training is tuned in its process (`tierstore.tuning.tune_loop`) under a limit of memory: the usual staging window,
and a quarter of what a step saves. Then the outcome is measured once more against the defaults within that limit, since
the best of several measurements flatters itself. Where tuning says that the defaults stay, there is nothing to compare,
and the ratio is 1.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from tierstore import TierStore, tiered_offload
from tierstore.tuning import tune_loop
from tierstore.tuning.settings import USUAL_STAGING_BYTES, TrialSettings, default_settings

from .goals import Goal
from .harness import Benchmark, main_of_one_variant
from .tuning_workloads import NUM_THREADS, SAVED_BYTES, WORKLOADS, Workload, make_workload

STEPS = 2
ROUNDS = 3
WARMUPS = 2
COMPARED_ROUNDS = 5
HOST_SHARE = 4

BENCHMARK = Benchmark(
    name="tuned_settings",
    question="A step with tuned settings, beside one with the defaults under the same limit of memory",
    variants=tuple(WORKLOADS),
    compare="none",
    rounds=1,  # each figure is a median of rounds
    settings={"steps": STEPS, "rounds": ROUNDS, "compared_rounds": COMPARED_ROUNDS, "threads": NUM_THREADS},
    goals=tuple(
        Goal(f"a tuned step of the {name} training, of one with the defaults", "time_ratio", name, at_most=1.0)
        for name in WORKLOADS
    ),
    plotted=("default_step_seconds", "tuned_step_seconds"),
    timeout_seconds=600,
)


def measure(variant: str, scratch: Path) -> dict[str, float]:
    """Tune, then compare. `time_ratio` is the median over the rounds; `tuning_seconds` is what tuning took."""
    torch.set_num_threads(NUM_THREADS)
    workload = make_workload(variant)
    limit_bytes = USUAL_STAGING_BYTES + SAVED_BYTES[variant] // HOST_SHARE
    started = time.perf_counter()
    tuned = tune_loop(
        lambda scope: workload.step(lambda: scope), scratch, host_bytes=limit_bytes, steps=STEPS, rounds=ROUNDS
    )
    tuning_seconds = time.perf_counter() - started
    compared = {"default": default_settings(limit_bytes), "tuned": tuned.chosen.settings}
    figures = {
        "tuning_seconds": tuning_seconds,
        "num_simulated": float(len(tuned.found.predicted)),
        "host_bytes": float(compared["tuned"].host_bytes),
        "staging_bytes": float(compared["tuned"].staging_bytes),
    }
    return figures | _compare(workload, compared, scratch)


def _compare(workload: Workload, compared: Mapping[str, TrialSettings], scratch: Path) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    for number in range(COMPARED_ROUNDS):
        for name in sorted(compared, reverse=bool(number % 2)):
            with _opened(compared[name], scratch) as scope:
                seconds[name].append(_median_step(workload, scope))
    ratios = [tuned / default for tuned, default in zip(seconds["tuned"], seconds["default"], strict=True)]
    is_same = compared["tuned"] == compared["default"]
    return {
        "time_ratio": 1.0 if is_same else statistics.median(ratios),
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
        "default_step_seconds": statistics.median(seconds["default"]),
        "tuned_step_seconds": statistics.median(seconds["tuned"]),
        "defaults_stay": float(is_same),
    }


@contextmanager
def _opened(settings: TrialSettings, scratch: Path) -> Iterator[tiered_offload]:
    with TierStore(scratch, **settings.store) as store:
        yield tiered_offload(store, **settings.offload)


def _median_step(workload: Workload, scope: tiered_offload) -> float:
    seconds = []
    for _ in range(WARMUPS + STEPS):
        started = time.perf_counter()
        workload.step(lambda: scope)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[WARMUPS:])


if __name__ == "__main__":
    main_of_one_variant(measure)
