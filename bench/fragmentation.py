"""Does the space on disk fragment over thousands of steps of changing sizes, and is it given back when use falls?

The real extents in real segment files, allocated but not written: a step takes extents for its tensors and gives them
back, in four ways that training does. Allocated is what the file system gave; it is compared with the most that was
ever in use at once. Then use falls to a tenth, and what is still allocated soon after is compared with that.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import uvloop

from tierstore.disk.budget import DiskBudget
from tierstore.disk.extents import SEGMENT_BYTES, Extent, ExtentSpace
from tierstore.disk.home import UnnamedHome
from tierstore.disk.io_mode import detect_io_mode

from .goals import Goal
from .harness import Benchmark, main_of_one_variant

STEPS = 3000
LIGHT_STEPS = 50
LARGEST_BYTES = 64 * 2**20
IDLE_SECONDS = 0.2
NUM_TENSORS = 300


class Load:
    """What training asks of the space: `step` is one of its steps, at `share` of its usual number of tensors.

    Attributes:
        largest_bytes: of all tensors.
        live: extents in use.
        most_live_bytes: the most that were in use at once.
        num_taken: extents taken so far.
    """

    def __init__(self, space: ExtentSpace, largest_bytes: int) -> None:
        self.space = space
        self.largest_bytes = largest_bytes
        self.live: list[Extent] = []
        self.most_live_bytes = 0
        self.num_taken = 0
        self.random = random.Random(0)
        shares = (1, 1, 1 / 2, 1 / 4, 1 / 4, 1 / 3, 1 / 16, 1 / 64)
        self._layers = [max(1, int(largest_bytes * self.random.choice(shares))) for _ in range(NUM_TENSORS)]

    def sizes(self, share: float) -> list[int]:
        """Of one step's tensors: the same layers, another length of sequence."""
        length = self.random.uniform(0.3, 1)
        return [max(1, int(num_bytes * length)) for num_bytes in self._layers[: math.ceil(NUM_TENSORS * share)]]

    async def take(self, num_bytes: int) -> None:
        """Take one extent."""
        self.live.append(await self.space.take(num_bytes))
        self.num_taken += 1
        self.most_live_bytes = max(self.most_live_bytes, self.space.used_bytes)

    def give_back(self, place: int = -1) -> None:
        """Give back the one that was taken last, or another."""
        self.space.give_back(self.live.pop(place))


async def another_length_each_step(load: Load, share: float, number: int) -> None:
    """Forward takes, backward gives back in reverse order."""
    for num_bytes in load.sizes(share):
        await load.take(num_bytes)
    while load.live:
        load.give_back()


async def two_graphs_at_once(load: Load, share: float, number: int) -> None:
    """The next forward begins before the last backward has ended."""
    before = len(load.live)
    for num_bytes in load.sizes(share):
        await load.take(num_bytes)
        if before and load.random.random() < 0.9:
            before -= 1
            load.give_back(before)
    for _ in range(before):
        load.give_back(0)


async def some_stay_for_long(load: Load, share: float, number: int) -> None:
    """A retained graph here and there: a tenth outlives its step, at random, until ten times as many follow."""
    for num_bytes in load.sizes(share):
        await load.take(num_bytes)
    load.random.shuffle(load.live)
    while len(load.live) > NUM_TENSORS * share / 10:
        load.give_back()


async def sizes_drift(load: Load, share: float, number: int) -> None:
    """Always as many tensors, a tenth replaced in each step, whose sizes rise and fall over 300 steps."""
    typical = load.largest_bytes / 4 * (1 + 0.8 * math.sin(number / 50))
    while len(load.live) > NUM_TENSORS * share * 0.9:
        load.give_back(load.random.randrange(len(load.live)))
    while len(load.live) < NUM_TENSORS * share:
        await load.take(int(typical * load.random.uniform(0.5, 1.5)) + 1)


LOADS: dict[str, Callable[[Load, float, int], Awaitable[None]]] = {
    "another length each step": another_length_each_step,
    "two graphs at once": two_graphs_at_once,
    "some stay for long": some_stay_for_long,
    "sizes drift": sizes_drift,
}

BENCHMARK = Benchmark(
    name="fragmentation",
    question=f"Space on disk over {STEPS} steps of changing sizes",
    variants=tuple(LOADS),
    compare="none",
    rounds=1,
    at_once=2,
    settings={"steps": STEPS, "largest_bytes": LARGEST_BYTES, "segment_bytes": SEGMENT_BYTES},
    plotted=("most_live_bytes", "most_allocated_bytes", "allocated_to_live", "light_allocated_bytes"),
    goals=tuple(Goal("space allocated, of the most in use", "allocated_to_live", load, at_most=1.5) for load in LOADS),
)


class Report(NamedTuple):
    """What a load left behind.

    Attributes:
        most_live_bytes: the most that was in use at once.
        early_allocated_bytes: allocated after a fifth of the steps.
        most_allocated_bytes: the most that was ever allocated.
        light_live_bytes: the most in use while use was a tenth.
        light_allocated_bytes: allocated then.
        seconds_per_extent: taking and giving back, segments included.
    """

    most_live_bytes: int
    early_allocated_bytes: int
    most_allocated_bytes: int
    light_live_bytes: int
    light_allocated_bytes: int
    seconds_per_extent: float


async def run_load(name: str, directory: Path, *, num_steps: int, largest_bytes: int, disk_bytes: int) -> Report:
    """Run one of the loads on an `ExtentSpace` of its own, then at a tenth of its use."""
    step = LOADS[name]
    with ThreadPoolExecutor(2) as executor:
        budget = DiskBudget(disk_bytes)
        space = ExtentSpace(
            UnnamedHome(directory), budget, detect_io_mode(directory), executor, idle_seconds=IDLE_SECONDS
        )
        load = Load(space, largest_bytes)
        early_bytes = most_bytes = 0
        began = time.perf_counter()
        for number in range(num_steps):
            await step(load, 1.0, number)
            most_bytes = max(most_bytes, budget.segment_bytes)
            if number == num_steps // 5:
                early_bytes = most_bytes
        seconds_per_extent = (time.perf_counter() - began) / load.num_taken
        most_live_bytes, load.most_live_bytes = load.most_live_bytes, 0
        for number in range(LIGHT_STEPS):
            await step(load, 0.1, number)
            if number < LIGHT_STEPS // 2:
                load.most_live_bytes = 0  # what is left of the heavy steps goes first
            await asyncio.sleep(4 * IDLE_SECONDS / LIGHT_STEPS)
        while space.is_closing:  # one after the other, at the pace of the file system
            await space.wait_for_news()
        report = Report(
            most_live_bytes,
            early_bytes,
            most_bytes,
            load.most_live_bytes,
            budget.segment_bytes,
            seconds_per_extent,
        )
        while load.live:
            load.give_back()
        await space.close()
    return report


def measure(variant: str, scratch: Path) -> dict[str, float]:
    """Bytes live and allocated, their ratio, and what an extent costs."""
    disk_bytes = 64 * 2**30
    report = uvloop.run(run_load(variant, scratch, num_steps=STEPS, largest_bytes=LARGEST_BYTES, disk_bytes=disk_bytes))
    return {
        "most_live_bytes": report.most_live_bytes,
        "most_allocated_bytes": report.most_allocated_bytes,
        "allocated_to_live": report.most_allocated_bytes / report.most_live_bytes,
        "grown_since_a_fifth_bytes": report.most_allocated_bytes - report.early_allocated_bytes,
        "light_live_bytes": report.light_live_bytes,
        "light_allocated_bytes": report.light_allocated_bytes,
        "extent_microseconds": report.seconds_per_extent * 1e6,
    }


if __name__ == "__main__":
    main_of_one_variant(measure)
