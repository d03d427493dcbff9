"""Extents in segment files over a thousand steps of changing sizes: how much more is allocated than is in use?

The real extents in real segment files, allocated but not written: a step takes extents for its tensors and gives them
back, in four ways that training does. Then use falls to a tenth.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tierstore.disk import extents
from tierstore.disk.budget import DiskBudget
from tierstore.disk.extents import Extent, ExtentSpace
from tierstore.disk.home import UnnamedHome
from tierstore.disk.segments import detect_io_mode

SEGMENT_BYTES = 8 * 2**20
LARGEST_BYTES = 2**20
STEPS, LIGHT_STEPS = 1000, 50
NUM_TENSORS = 300
IDLE_SECONDS = 0.2


class Load:
    """What training asks of the space; its sizes are those of layers, times a length of sequence."""

    def __init__(self, space: ExtentSpace) -> None:
        self.space = space
        self.live: list[Extent] = []
        self.most_live_bytes = 0
        self.random = random.Random(0)
        shares = (1, 1, 1 / 2, 1 / 4, 1 / 4, 1 / 3, 1 / 16, 1 / 64)
        self._layers = [int(LARGEST_BYTES * self.random.choice(shares)) for _ in range(NUM_TENSORS)]

    def sizes(self, share: float) -> list[int]:
        length = self.random.uniform(0.3, 1)
        return [max(1, int(num_bytes * length)) for num_bytes in self._layers[: math.ceil(NUM_TENSORS * share)]]

    async def take(self, num_bytes: int) -> None:
        self.live.append(await self.space.take(num_bytes))
        self.most_live_bytes = max(self.most_live_bytes, self.space.used_bytes)

    def give_back(self, place: int = -1) -> None:
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
    typical = LARGEST_BYTES / 4 * (1 + 0.8 * math.sin(number / 50))
    while len(load.live) > NUM_TENSORS * share * 0.9:
        load.give_back(load.random.randrange(len(load.live)))
    while len(load.live) < NUM_TENSORS * share:
        await load.take(int(typical * load.random.uniform(0.5, 1.5)) + 1)


@pytest.mark.parametrize(
    "step",
    [
        another_length_each_step,
        some_stay_for_long,
        pytest.param(two_graphs_at_once, marks=pytest.mark.slow),
        pytest.param(sizes_drift, marks=pytest.mark.slow),
    ],
)
async def test_space_stays_bounded_over_steps_of_changing_sizes_and_is_given_back(
    step: Callable[[Load, float, int], Awaitable[None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extents, "SEGMENT_BYTES", SEGMENT_BYTES)
    budget = DiskBudget(2**30)
    with ThreadPoolExecutor(2) as executor:
        home = UnnamedHome(tmp_path)
        space = ExtentSpace(home, budget, detect_io_mode(tmp_path), executor, idle_seconds=IDLE_SECONDS)
        load = Load(space)
        early_bytes = most_bytes = 0
        for number in range(STEPS):
            await step(load, 1.0, number)
            most_bytes = max(most_bytes, budget.segment_bytes)
            if number == STEPS // 5:
                early_bytes = most_bytes
        most_live_bytes, load.most_live_bytes = load.most_live_bytes, 0
        for number in range(LIGHT_STEPS):
            await step(load, 0.1, number)
            if number < LIGHT_STEPS // 2:
                load.most_live_bytes = 0  # what is left of the heavy steps goes first
            await asyncio.sleep(4 * IDLE_SECONDS / LIGHT_STEPS)
        while space.is_closing:  # one after the other, at the pace of the file system
            await space.wait_for_news()
        light_bytes = budget.segment_bytes
        while load.live:
            load.give_back()
        await space.close()
    assert most_live_bytes > 8 * SEGMENT_BYTES, "segments are too large to tell"
    assert most_bytes <= 1.25 * most_live_bytes + 2 * SEGMENT_BYTES
    assert most_bytes <= early_bytes + 2 * SEGMENT_BYTES, "it grows with every step"
    assert light_bytes <= load.most_live_bytes + 4 * SEGMENT_BYTES
