"""Are tuned settings better than the ones before? Both on three trainings, by turns.

Each training is tuned in its process (`tierstore.tuning.tune_loop`) under a limit of memory: the usual staging window,
and a quarter of what a step saves. Then the outcome is measured once more against the defaults within that limit, since
the best of several measurements flatters itself. Where tuning says that the defaults stay, there is nothing to compare,
and the ratio is 1. Once more the transformer begins with settings that are known to be bad: nothing is read ahead.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from tierstore import TierStore, tiered_offload
from tierstore.tuning import TrialSettings, tune_loop
from tierstore.tuning.settings import USUAL_STAGING_BYTES, default_settings

from .goals import Goal
from .harness import Benchmark, main_of_one_variant
from .tuning_workloads import NUM_THREADS, SAVED_BYTES, WORKLOADS, Workload, make_workload

STEPS = 2
ROUNDS = 3
WARMUPS = 2
COMPARED_ROUNDS = 5
HOST_SHARE = 4
BADLY_SET = "transformer, badly set"

BENCHMARK = Benchmark(
    name="tuned_settings",
    question="A step with tuned settings, beside one with those before, under the same limit of memory",
    variants=(*WORKLOADS, BADLY_SET),
    compare="none",
    rounds=1,  # each figure is a median of rounds
    settings={"steps": STEPS, "rounds": ROUNDS, "compared_rounds": COMPARED_ROUNDS, "threads": NUM_THREADS},
    goals=(
        *(
            Goal(f"a tuned step of the {name} training, of one with the defaults", "time_ratio", name, at_most=1.0)
            for name in WORKLOADS
        ),
        Goal("a tuned step of the transformer, of one that reads nothing ahead", "time_ratio", BADLY_SET, at_most=0.95),
    ),
    plotted=("step_seconds_before", "tuned_step_seconds"),
    timeout_seconds=600,
)


def measure(variant: str, scratch: Path) -> dict[str, float]:
    """Tune, then compare. `time_ratio` is the median over the rounds; `tuning_seconds` is what tuning took."""
    torch.set_num_threads(NUM_THREADS)
    name = variant.partition(",")[0]
    workload = make_workload(name)
    before = default_settings(USUAL_STAGING_BYTES + SAVED_BYTES[name] // HOST_SHARE)
    if variant == BADLY_SET:
        before = replace(before, prefetch="none")
    started = time.perf_counter()
    tuned = tune_loop(lambda scope: workload.step(lambda: scope), scratch, start=before, steps=STEPS, rounds=ROUNDS)
    tuning_seconds = time.perf_counter() - started
    compared = {"before": before, "tuned": tuned.chosen.settings}
    figures = {
        "tuning_seconds": tuning_seconds,
        "num_simulated": len(tuned.found.predicted),
        "host_bytes": compared["tuned"].host_bytes,
        "staging_bytes": compared["tuned"].staging_bytes,
    }
    return figures | _compare(workload, compared, scratch)


def _compare(workload: Workload, compared: Mapping[str, TrialSettings], scratch: Path) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    for number in range(COMPARED_ROUNDS):
        for name in sorted(compared, reverse=bool(number % 2)):
            with _opened(compared[name], scratch) as scope:
                seconds[name].append(_median_step(workload, scope))
    ratios = [tuned / before for tuned, before in zip(seconds["tuned"], seconds["before"], strict=True)]
    is_same = compared["tuned"] == compared["before"]
    return {
        "time_ratio": 1.0 if is_same else statistics.median(ratios),
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
        "step_seconds_before": statistics.median(seconds["before"]),
        "tuned_step_seconds": statistics.median(seconds["tuned"]),
        "settings_stay": float(is_same),
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
