"""Faults around a disk tier: without any it is the tier that it was; with them it fails as its contract says."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from tests.store.disk_conformance import PLAIN, DiskConformance, OpenTier, at_phase, on_loop, random_bytes, read_back
from tierstore.disk.local import LocalDisk
from tierstore.disk.tier import DiskTier
from tierstore.errors import CorruptDataError, StorageIOError, StoreFullError
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
    Torn,
)

HARMLESS = {
    "no fault": FaultPlan(),
    "late, slow and piecewise": FaultPlan.of(
        Rule(("write", "read", "discard", "close"), Latency(0.0005, "exponential")),
        Rule(("write", "read"), Bandwidth(4e9)),
        Rule(("write", "read"), Late(2)),
        Rule(("pwritev", "preadv"), Short(200_000)),
        Rule("fallocate", Latency(0.0005, "uniform")),
    ),
}
OpenFaulty = Callable[[FaultPlan], AbstractAsyncContextManager[DiskTier]]


@pytest.fixture
def open_faulty(store_directory: Path) -> OpenFaulty:
    @asynccontextmanager
    async def opened(plan: FaultPlan) -> AsyncIterator[DiskTier]:
        faults = Faults(plan)
        with ThreadPoolExecutor(4) as threads:
            disk = FaultyDisk(
                LocalDisk(
                    store_directory,
                    disk_bytes=64 * 2**20,
                    inline_bytes=128 * 2**10,
                    codec="none",
                    checksum=True,
                    executor=FaultyExecutor(threads, FaultyCalls(faults)),
                ),
                faults,
            )
            try:
                yield disk
            finally:
                await disk.close()

    return opened


@pytest.fixture(params=HARMLESS)
def open_tier(request: pytest.FixtureRequest, open_faulty: OpenFaulty) -> OpenTier:
    return lambda: open_faulty(HARMLESS[request.param])


class TestConformance(DiskConformance):
    """Late, slow and piecewise: still the same tier."""


CONTENT = random_bytes(300_001)


@pytest.mark.parametrize(
    ("operation", "number", "expected"),
    [
        ("write", errno.EIO, StorageIOError),
        ("write", errno.ENOSPC, StoreFullError),
        ("write", errno.EDQUOT, StoreFullError),
        ("pwritev", errno.EIO, StorageIOError),
        ("pwritev", errno.ENOSPC, StoreFullError),
        ("fallocate", errno.EIO, StorageIOError),
        ("fallocate", errno.ENOSPC, StoreFullError),
    ],
)
def test_write_that_fails_stores_nothing_and_can_be_made_again(
    open_faulty: OpenFaulty, operation: str, number: int, expected: type[Exception]
) -> None:
    async def test() -> None:
        plan = FaultPlan.of(Rule(operation, Fails(number), occurrences=tuple(range(1, 20))))  # type: ignore[arg-type]
        async with open_faulty(plan) as disk:
            with pytest.raises(expected) as caught:
                await disk.write(1, memoryview(CONTENT), PLAIN)
            cause = caught.value.__cause__
            assert isinstance(cause, OSError)
            assert cause.errno == number
            assert (disk.usage().num_records, disk.usage().disk_bytes) == (0, 0)
            async with asyncio.timeout(30):
                while True:
                    try:
                        await disk.write(1, memoryview(CONTENT), PLAIN)
                        break
                    except expected:
                        pass
            assert await read_back(disk, 1, len(CONTENT)) == CONTENT

    on_loop(test)


@pytest.mark.parametrize("operation", ["read", "preadv"])
def test_read_that_fails_leaves_the_record_and_garbage_in_the_destination(
    open_faulty: OpenFaulty, operation: str
) -> None:
    async def test() -> None:
        async with open_faulty(FaultPlan.of(Rule(operation, Fails(), occurrences=(1,)))) as disk:  # type: ignore[arg-type]
            await disk.write(1, memoryview(CONTENT), PLAIN)
            destination = at_phase(bytes(len(CONTENT)), 0)
            with pytest.raises(StorageIOError) as caught:
                await disk.read(1, destination)
            assert isinstance(caught.value.__cause__, OSError)
            assert bytes(destination) == b"\xa5" * len(CONTENT)
            assert await read_back(disk, 1, len(CONTENT)) == CONTENT

    on_loop(test)


@pytest.mark.parametrize("torn_bytes", [0, 4096, 200_000])
def test_torn_record_is_refused_by_its_checksum(open_faulty: OpenFaulty, torn_bytes: int) -> None:
    async def test() -> None:
        async with open_faulty(FaultPlan.of(Rule("pwritev", Torn(torn_bytes), occurrences=(1,)))) as disk:
            await disk.write(1, memoryview(CONTENT), PLAIN)
            await disk.write(2, memoryview(CONTENT), PLAIN)
            with pytest.raises(CorruptDataError):
                await read_back(disk, 1, len(CONTENT))
            assert await read_back(disk, 2, len(CONTENT)) == CONTENT

    on_loop(test)


def test_late_completions_come_in_reverse(open_faulty: OpenFaulty) -> None:
    async def test() -> None:
        async with open_faulty(FaultPlan.of(Rule("write", Late(100)))) as disk:
            order: list[int] = []

            async def write(key: int) -> None:
                await disk.write(key, memoryview(bytes(10)), PLAIN)
                order.append(key)

            async with asyncio.timeout(30):
                await asyncio.gather(*(write(key) for key in range(5)))
            assert sorted(order) == list(range(5))
            assert order != list(range(5))
            assert disk.usage().num_records == 5

    on_loop(test)


def test_late_completion_alone_is_not_held_back(open_faulty: OpenFaulty) -> None:
    async def test() -> None:
        async with open_faulty(FaultPlan.of(Rule(("write", "read", "discard"), Late(100)))) as disk:
            async with asyncio.timeout(30):
                await disk.write(1, memoryview(CONTENT), PLAIN)
                assert await read_back(disk, 1, len(CONTENT)) == CONTENT
                await disk.discard([1])

    on_loop(test)


def test_close_that_fails_has_freed_everything(open_faulty: OpenFaulty, store_directory: Path) -> None:
    async def test() -> None:
        with pytest.raises(StorageIOError) as caught:
            async with open_faulty(FaultPlan.of(Rule("close", Fails()))) as disk:
                await disk.write(1, memoryview(CONTENT), PLAIN)
        assert "freed" in caught.value.data

    on_loop(test)
