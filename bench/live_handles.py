"""Does a saved tensor cost more when a million others are alive?

Steady churn: one is put, another released, the oldest or any. Nothing is spilled. CPython's cyclic garbage collector
looks at every living object from time to time; "frozen" takes what is alive at the beginning out of its sight
(`gc.freeze`).
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from pathlib import Path

import torch

from tierstore import TierStore

from .goals import Goal
from .harness import Benchmark, main_of_one_variant

ROUNDS, PER_ROUND = 8, 20_000
NUM_LIVE = {"a thousand": 1000, "a million": 1_000_000}

BENCHMARK = Benchmark(
    name="live_handles",
    question="Put and release of one handle while so many are alive (beside a thousand)",
    variants=tuple(
        f"{num_live}, {how}" for how in ("oldest", "oldest, frozen", "any") for num_live in ("a thousand", "a million")
    ),
    rounds=1,
    settings={"rounds": ROUNDS, "per_round": PER_ROUND},
    goals=tuple(
        Goal(
            "put and release, of that at a thousand",
            "put_and_release_microseconds",
            f"a million, {how}",
            at_most=1.5,
            of=(f"a thousand, {how}",),
        )
        for how in ("oldest", "oldest, frozen", "any")
    ),
)


def measure(variant: str, scratch: Path) -> dict[str, float]:
    """The median round."""
    torch.set_num_threads(1)
    num_live, which, *frozen = variant.split(", ")
    num = NUM_LIVE[num_live]
    with TierStore(scratch, host_bytes="8GiB") as store:
        handles = [store.put(torch.empty(16)) for _ in range(num)]
        if frozen:
            gc.collect()
            gc.freeze()
        choose = random.Random(0)
        rounds = []
        for _ in range(ROUNDS):
            places = [i % num if which == "oldest" else choose.randrange(num) for i in range(PER_ROUND)]
            started = time.perf_counter()
            for place in places:
                handles[place] = store.put(torch.empty(16))
            rounds.append(1e6 * (time.perf_counter() - started) / PER_ROUND)
    return {"put_and_release_microseconds": statistics.median(rounds)}


if __name__ == "__main__":
    main_of_one_variant(measure)
