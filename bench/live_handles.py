"""Does a saved tensor cost more when a million others are alive?

Steady churn: one is put, another released, the oldest or any. Nothing is spilled. CPython's cyclic garbage collector
looks at every living object from time to time; "frozen" takes what is alive by then out of its sight (`gc.freeze`).

Beside it the same with bare tensors, which no store keeps: what any object costs that was last touched a million
objects ago, and is in no cache any more. The oldest lie in memory in the order in which they are released, so the
hardware fetches them ahead; of any one, each piece is waited for.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tierstore import TierStore

from .goals import Goal
from .harness import Benchmark, main_of_one_variant

ROUNDS, PER_ROUND = 5, 10_000
NUM_LIVE = {"a thousand": 1000, "a million": 1_000_000, "a thousand tensors": 1000, "a million tensors": 1_000_000}
ORDERS = ("oldest", "oldest_when_frozen", "any")

BENCHMARK = Benchmark(
    name="live_handles",
    question="Put and release of one handle while so many are alive (beside a thousand)",
    variants=tuple(NUM_LIVE),
    rounds=1,  # each figure is a median of rounds within a process; how processes differ is not shown
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
    """The median round of each order, of handles or of tensors."""
    torch.set_num_threads(1)
    if variant.endswith("tensors"):
        return measure_each(lambda: torch.empty(16), NUM_LIVE[variant])
    with TierStore(scratch, host_bytes="8GiB") as store:
        return measure_each(lambda: store.put(torch.empty(16)), NUM_LIVE[variant])


def measure_each(make: Callable[[], object], num_live: int) -> dict[str, float]:
    """CPU microseconds for making one and dropping another while so many live; "any" leaves memory in disorder."""
    gc.disable()  # it would go through all of them again and again while they are made
    living = [make() for _ in range(num_live)]
    gc.enable()
    gc.collect()
    oldest, chance = itertools.cycle(range(num_live)), random.Random(0)
    figures = {"oldest_microseconds": churn(make, living, oldest)}
    gc.freeze()
    figures["oldest_when_frozen_microseconds"] = churn(make, living, oldest)
    figures["any_microseconds"] = churn(make, living, iter(lambda: chance.randrange(num_live), None))
    return figures


def churn(make: Callable[[], object], living: list[object], places: Iterator[int]) -> float:
    """CPU microseconds for one: the median of some rounds."""
    rounds = []
    for _ in range(ROUNDS):
        chosen = list(itertools.islice(places, PER_ROUND))
        started = time.thread_time()
        for place in chosen:
            living[place] = make()
        rounds.append(1e6 * (time.thread_time() - started) / PER_ROUND)
    return statistics.median(rounds)


if __name__ == "__main__":
    main_of_one_variant(measure)
