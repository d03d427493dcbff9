"""Does a saved tensor cost more when a million others are alive?

Steady churn: one is put, another released, the oldest or any. Nothing is spilled. CPython's cyclic garbage collector
looks at every living object from time to time; "frozen" takes what is alive by then out of its sight (`gc.freeze`).
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from pathlib import Path

import torch

from tierstore import TierStore
from tierstore.handle import Handle

from .goals import Goal
from .harness import Benchmark, main_of_one_variant

ROUNDS, PER_ROUND = 8, 20_000
NUM_LIVE = {"a thousand": 1000, "a million": 1_000_000}
ORDERS = ("oldest", "any", "oldest_when_frozen")

BENCHMARK = Benchmark(
    name="live_handles",
    question="Put and release of one handle while so many are alive (beside a thousand)",
    variants=tuple(NUM_LIVE),
    rounds=2,
    settings={"rounds": ROUNDS, "per_round": PER_ROUND},
    goals=tuple(
        Goal(
            f"put and release, of that at a thousand, {order.replace('_', ' ')}",
            f"{order}_microseconds",
            "a million",
            at_most=1.5,
            of=("a thousand",),
        )
        for order in ORDERS
    ),
)


def measure(variant: str, scratch: Path) -> dict[str, float]:
    """The median round of each order."""
    torch.set_num_threads(1)
    with TierStore(scratch, host_bytes="8GiB") as store:
        handles = [store.put(torch.empty(16)) for _ in range(NUM_LIVE[variant])]
        figures = {f"{order}_microseconds": churn(store, handles, order) for order in ORDERS[:2]}
        gc.collect()
        gc.freeze()
        return figures | {f"{ORDERS[2]}_microseconds": churn(store, handles, "oldest")}


def churn(store: TierStore, handles: list[Handle], order: str) -> float:
    """Microseconds for a put and a release, the median of some rounds."""
    choose = random.Random(0)
    rounds = []
    for _ in range(ROUNDS):
        places = [i % len(handles) if order == "oldest" else choose.randrange(len(handles)) for i in range(PER_ROUND)]
        started = time.perf_counter()
        for place in places:
            handles[place] = store.put(torch.empty(16))
        rounds.append(1e6 * (time.perf_counter() - started) / PER_ROUND)
    return statistics.median(rounds)


if __name__ == "__main__":
    main_of_one_variant(measure)
