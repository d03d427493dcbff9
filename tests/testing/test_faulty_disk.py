"""Faults around a disk tier: without any it is the tier that it was; with them it fails as its contract says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.store.disk_conformance import PLAIN, DiskConformance, at_phase, random_bytes, read_back
from tierstore.disk.local import LocalDisk
from tierstore.disk.tier import DiskTier
from tierstore.errors import StorageIOError
from tierstore.testing import (
    Bandwidth,
    Fails,
    FaultPlan,
    Faults,
    FaultyCalls,
    FaultyDisk,
    FaultyExecutor,
    Late,
    Latency,
    Rule,
    Short,
)

HARMLESS = FaultPlan.of(
    Rule(("write", "read", "discard", "close"), Latency(0.0005, "exponential")),
    Rule(("write", "read"), Bandwidth(4e9)),
    Rule(("write", "read"), Late(2)),
    Rule(("pwritev", "preadv"), Short(200_000)),
    Rule("fallocate", Latency(0.0005, "uniform")),
)
OpenFaulty = Callable[[FaultPlan], DiskTier]


@pytest.fixture
async def open_faulty(store_directory: Path) -> AsyncIterator[OpenFaulty]:
    """Opens tiers with the faults of a plan, and closes them at the end."""
    async with AsyncExitStack() as at_end:

        def opened(plan: FaultPlan) -> DiskTier:
            faults = Faults(plan)
            threads = at_end.enter_context(ThreadPoolExecutor(4))
            disk = LocalDisk(
                store_directory,
                disk_bytes=64 * 2**20,
                inline_bytes=128 * 2**10,
                codec="none",
                checksum=True,
                executor=FaultyExecutor(threads, FaultyCalls(faults)),
            )
            faulty = FaultyDisk(disk, faults)
            at_end.push_async_callback(faulty.close)
            return faulty

        yield opened


@pytest.fixture
def tier(open_faulty: OpenFaulty) -> DiskTier:
    return open_faulty(HARMLESS)


class TestConformance(DiskConformance):
    """Late, slow and piecewise: still the same tier."""


CONTENT = random_bytes(300_001)


@pytest.mark.parametrize("operation", ["read", "preadv"])
async def test_read_that_fails_leaves_the_record_and_garbage_in_the_destination(
    open_faulty: OpenFaulty, operation: str
) -> None:
    disk = open_faulty(FaultPlan.of(Rule(operation, Fails(), occurrences=(1,))))  # type: ignore[arg-type]
    await disk.write(1, memoryview(CONTENT), PLAIN)
    destination = at_phase(bytes(len(CONTENT)), 0)
    with pytest.raises(StorageIOError) as caught:
        await disk.read(1, destination)
    assert isinstance(caught.value.__cause__, OSError)
    assert bytes(destination) == b"\xa5" * len(CONTENT)
    assert await read_back(disk, 1, len(CONTENT)) == CONTENT


async def test_late_completions_come_in_reverse(open_faulty: OpenFaulty) -> None:
    disk = open_faulty(FaultPlan.of(Rule("write", Late(100))))
    order: list[int] = []

    async def write(key: int) -> None:
        await disk.write(key, memoryview(bytes(10)), PLAIN)
        order.append(key)

    async with asyncio.timeout(30):
        await asyncio.gather(*(write(key) for key in range(5)))
    assert sorted(order) == list(range(5))
    assert order != list(range(5))
    assert disk.usage().num_records == 5
