"""Does a saved tensor cost more when a million others are alive?

Steady churn: one is put, another released, the oldest or any. Nothing is spilled. A process that holds a thousand and
one that holds a million take turns of some hundredths of a second on the same core. What counts is the median over the
turns of how much longer the second process took.

CPython's cyclic garbage collector goes through every living object when a quarter as many have come and stayed since it
last did, which takes more than a second here. So the oldest are released from right after such a collection to right
after the next, and what it took is spread over the puts between. "Frozen" takes what is alive by then out of its sight
(`gc.freeze`). Beside it the same with bare tensors, which no store keeps.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from tierstore import TierStore

from .child import serve
from .goals import Goal
from .harness import Benchmark
from .parties import Figures, Party, party, turns

PER_TURN, TURNS = 2_000, 50
MOST_TURNS = 150
"""More than a quarter of a million handles come in them."""
NUM_LIVE = {"a thousand": 1000, "a million": 1_000_000, "a thousand tensors": 1000, "a million tensors": 1_000_000}
PAIRS = (("a thousand", "a million"), ("a thousand tensors", "a million tensors"))
ORDERS = ("oldest", "oldest_when_frozen", "any")

BENCHMARK = Benchmark(
    name="live_handles",
    question="Put and release of one handle while so many are alive (beside a thousand)",
    variants=tuple(NUM_LIVE),
    processes={"by turns": tuple(NUM_LIVE)},
    plotted=tuple(f"{order}_microseconds" for order in ORDERS),
    goals=tuple(
        Goal(
            f"put and release, of that at a thousand, {order.replace('_', ' ')}",
            f"{order}_microseconds",
            "a million",
            at_most=1.3,
            of=("a thousand",),
        )
        for order in ORDERS
    ),
)

Turn = dict[str, list[Figures]]
"""What each process of a pair did in it, by its name."""


def measure(process: str, scratch: Path) -> dict[str, Figures]:
    figures: dict[str, Figures] = {name: {} for name in NUM_LIVE}
    with ExitStack() as stack:
        parties = {name: stack.enter_context(party(name, __name__, [[name, scratch]])) for name in NUM_LIVE}
        for each in parties.values():
            each.do("wait")
        for names in PAIRS:
            for order, found in orders_of([parties[name] for name in names]):
                for name, typical in zip(names, typical_of(found, *names), strict=True):
                    figures[name] |= {f"{order}_{figure}": value for figure, value in typical.items()}
    return figures


def orders_of(pair: Sequence[Party]) -> Iterator[tuple[str, list[Turn]]]:
    yield "oldest", one_period(pair)
    for each in pair:
        each.do("freeze")
    yield "oldest_when_frozen", turns(pair, "oldest", TURNS)
    yield "any", turns(pair, "any", TURNS)


def one_period(pair: Sequence[Party]) -> list[Turn]:
    """Turns from one collection of all that the last of them holds to the next, if there is another."""
    found: list[Turn] = []
    while len(found) < MOST_TURNS and not any(turn[pair[-1].name][0]["collections"] for turn in found):
        found += turns(pair, "oldest", 2)
    return found


def typical_of(found: Sequence[Turn], few: str, many: str) -> tuple[Figures, Figures]:
    """Microseconds for one put and release, of both, and what of it is the collector's going through everything."""
    level = statistics.median(turn[few][0]["microseconds"] for turn in found)
    ratio = statistics.median(turn[many][0]["microseconds"] / turn[few][0]["microseconds"] for turn in found)
    figures = []
    for name, churning in ((few, level), (many, level * ratio)):
        collecting = statistics.mean(turn[name][0]["collecting_microseconds"] for turn in found)
        figures.append({"microseconds": churning + collecting, "collecting_microseconds": collecting})
    return figures[0], figures[1]


def work(name: str, scratch: Path) -> None:
    torch.set_num_threads(1)
    are_tensors = name.endswith("tensors")
    with TierStore(scratch, host_bytes="8GiB") as store:

        def make() -> object:
            tensor = torch.empty(16)
            return tensor if are_tensors else store.put(tensor)

        gc.disable()  # it would go through all of them again and again while they are made
        living = [make() for _ in range(NUM_LIVE[name])]
        gc.enable()
        gc.collect()
        oldest, chance = itertools.cycle(range(len(living))), random.Random(0)
        anyone = iter(lambda: chance.randrange(len(living)), None)
        full = FullCollections()
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # they were made side by side; from now on by turns

        commands: dict[str, Callable[[], Figures]] = {
            "wait": dict,
            "freeze": lambda: gc.freeze() or {},
            "oldest": lambda: churn(make, living, oldest, full),
            "any": lambda: churn(make, living, anyone, full),
        }
        serve(lambda command: commands[command]())
        living.clear()


class FullCollections:
    """How often the collector has gone through all that lives, and the CPU seconds that this took."""

    def __init__(self) -> None:
        self.number = 0
        self.cpu_seconds = 0.0
        gc.callbacks.append(self._called)

    def _called(self, phase: str, about: dict[str, int]) -> None:
        if about["generation"] == 2:
            self.number += phase == "stop"
            self.cpu_seconds += time.thread_time() if phase == "stop" else -time.thread_time()


def churn(make: Callable[[], object], living: list[object], places: Iterator[int], full: FullCollections) -> Figures:
    """CPU microseconds for one, in a full collection and else, and how many of these there were."""
    chosen = list(itertools.islice(places, PER_TURN))
    number, collected_seconds = full.number, full.cpu_seconds
    started = time.thread_time()
    for place in chosen:
        living[place] = make()
    seconds = time.thread_time() - started
    collecting = full.cpu_seconds - collected_seconds
    return {
        "microseconds": 1e6 * (seconds - collecting) / PER_TURN,
        "collecting_microseconds": 1e6 * collecting / PER_TURN,
        "collections": full.number - number,
    }
