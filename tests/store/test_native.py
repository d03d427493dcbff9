"""Threads without the interpreter: they do what the jobs in Python do, and leave nothing behind.

`pip install ./native` builds the package; without it these tests are skipped.
"""

import contextlib
import errno
import os
import select
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch
import xxhash

from tests.inspect_store import inspect_tier
from tests.store.disk_conformance import PLAIN, DiskConformance, at_phase, gather, random_bytes, read_back
from tests.store.disks import local_disk
from tests.waiting import until
from tierstore import TierStore
from tierstore.base.threads import IoThreads
from tierstore.disk import native
from tierstore.disk.linux import address_of
from tierstore.disk.local import LocalDisk
from tierstore.errors import CorruptDataError, StorageIOError

tierstore_native = pytest.importorskip("tierstore_native", reason="tierstore-native is not installed")
MIB = 2**20


def threads_of_pools() -> list[str]:
    return sorted(name for name in _of_threads("comm") if name.startswith("ts-native"))


def _of_threads(file: str) -> Iterator[str]:
    """A file of each thread of this process, from /proc; a thread may end meanwhile."""
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield Path(f"/proc/self/task/{task}/{file}").read_text().strip()


def _is_asleep(status: str) -> bool:
    return "\nState:\tS" in status


@pytest.fixture(autouse=True)
def _native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(native.SWITCH, "1")
    assert native.is_native()
    yield
    assert threads_of_pools() == []


@asynccontextmanager
async def native_disk(directory: Path, **options: object) -> AsyncIterator[LocalDisk]:
    threads = IoThreads(4, "tierstore-test")
    try:
        async with local_disk(directory, executor=threads, **options) as disk:
            yield disk
    finally:
        threads.shutdown()


@pytest.fixture
async def disk(store_directory: Path) -> AsyncIterator[LocalDisk]:
    """Every record in an extent."""
    async with native_disk(store_directory, inline_bytes=0) as opened:
        yield opened


class TestConformance(DiskConformance):
    @pytest.fixture(params=["none", *(pytest.param(codec, marks=pytest.mark.slow) for codec in ("auto", "zstd"))])
    async def tier(self, request: pytest.FixtureRequest, store_directory: Path) -> AsyncIterator[LocalDisk]:
        async with native_disk(store_directory, codec=request.param, inline_bytes=4096) as opened:
            yield opened


@pytest.mark.parametrize("num_bytes", [241, 256, 1023, 1024, 1025, 1087, 1088, 1089, 2049, 65_536, MIB + 77])
def test_checksum_is_that_of_the_library(num_bytes: int) -> None:
    content = random_bytes(num_bytes)
    for seed in (0, 1, 2**63 + 5, 2**64 - 1):
        assert tierstore_native.xxh3(content, seed) == xxhash.xxh3_64_intdigest(content, seed=seed)
    with pytest.raises(ValueError, match="more than 240 bytes"):
        tierstore_native.xxh3(content[:240], 0)


async def test_records_lie_as_python_writes_them(disk: LocalDisk) -> None:
    """Either form reads what the other has written."""
    content = random_bytes(3 * MIB + 77)
    source = at_phase(content, 100)
    await disk.write(1, source, PLAIN)
    by_native = disk.found_locations()[1]
    with inspect_tier(disk).without_native():
        await disk.write(2, source, PLAIN)
    by_python = disk.found_locations()[2]
    assert by_native.head_bytes == by_python.head_bytes == 4096 - 100
    assert by_native.checksum != by_python.checksum, "the key is part of it"
    for how in (contextlib.nullcontext(), inspect_tier(disk).without_native()):
        with how:
            for key in (1, 2):
                assert await read_back(disk, key, len(content), phase=100) == content


async def test_transfers_run_in_the_threads_of_the_pool(disk: LocalDisk) -> None:
    assert threads_of_pools() == [], "they start as they are needed"
    content = at_phase(random_bytes(MIB), 0)
    await disk.write(1, content, PLAIN)
    assert threads_of_pools() == ["ts-native-0"]
    await gather(*(disk.write(key, content, PLAIN) for key in range(2, 40)))
    assert 2 <= len(threads_of_pools()) <= 14


async def test_long_record_is_moved_in_several_calls(store_directory: Path) -> None:
    content = random_bytes(MIB) * 130 + b"tail"
    async with native_disk(store_directory, disk_bytes=512 * MIB, checksum=False) as disk:
        await disk.write(1, at_phase(content, 4095), PLAIN)
        assert await read_back(disk, 1, len(content), phase=4095) == content
        assert disk.found_locations()[1].checksum is None


async def test_flipped_byte_is_found_and_a_place_beyond_the_file_is_an_error(disk: LocalDisk) -> None:
    content = random_bytes(MIB)
    await disk.write(1, at_phase(content, 0), PLAIN)
    locations = inspect_tier(disk).locations
    descriptor = inspect_tier(disk).space.segments[locations[1].segment or 0].file.fileno()
    os.pwrite(descriptor, at_phase(random_bytes(4096, seed=1), 0), locations[1].offset or 0)
    with pytest.raises(CorruptDataError):
        await read_back(disk, 1, len(content))
    locations[1] = msgspec.structs.replace(locations[1], offset=2**40)
    with pytest.raises(StorageIOError, match=os.strerror(errno.EIO)):
        await read_back(disk, 1, len(content))


@pytest.mark.parametrize("parts", [(-1, 0, 8192), (0, 8193, 4096), (0, 0, 4096), (4096, 4096, 0), (0, 0, 2**20)])
def test_parts_that_do_not_fit_together_are_refused(parts: tuple[int, int, int]) -> None:
    pool = tierstore_native.Pool(1, 1, 5, "ts-native")
    memory = memoryview(bytearray(8192))
    try:
        with pytest.raises(ValueError, match="do not fit together"):
            pool.submit(1, True, 0, 0, address_of(memory), len(memory), *parts, False, 0)
        assert pool.take() == []
    finally:
        pool.close()


def test_jobs_that_come_together_do_not_wait_for_one_idle_thread(tmp_path: Path) -> None:
    """A thread that was told of a job counts as idle until it has woken up."""
    pool = tierstore_native.Pool(8, 4, 5, "ts-native")
    memory = torch.ones(8 * MIB)  # long jobs: none is over before the last is submitted
    num_bytes = memory.nbytes

    def write(*numbers: int) -> None:
        for number in numbers:
            at = file.fileno(), number * num_bytes, memory.data_ptr(), num_bytes
            pool.submit(number, True, *at, 0, num_bytes, 0, True, 0)
        num_ended = 0
        while num_ended < len(numbers):
            select.select([pool.fileno()], [], [])
            num_ended += len(pool.take())

    try:
        with (tmp_path / "file").open("wb", buffering=0) as file:
            write(1)
            until(lambda: [_is_asleep(status) for status in _of_threads("status") if "ts-native" in status] == [True])
            write(1, 2, 3, 4)
        assert len(threads_of_pools()) >= 4
    finally:
        pool.close()


def test_forked_child_ends_well_and_the_parent_goes_on(store_directory: Path) -> None:
    with TierStore(store_directory, host_bytes=0, codec="none") as store:
        handles = [store.put(torch.full((MIB,), float(number))) for number in range(8)]
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for number, handle in enumerate(handles):
            assert torch.equal(store.get(handle), torch.full((MIB,), float(number)))


def test_signals_go_to_the_threads_of_the_interpreter(store_directory: Path) -> None:
    with TierStore(store_directory, host_bytes=0, codec="none") as store:
        handle = store.put(torch.ones(MIB))
        store.flush()
        (status,) = (status for status in _of_threads("status") if status.startswith("Name:\tts-native-0\n"))
        blocked = int(next(line for line in status.splitlines() if line.startswith("SigBlk")).split()[1], 16)
        assert blocked & (1 << 1), "SIGINT"
        assert blocked & (1 << 14), "SIGTERM"
        assert torch.equal(store.get(handle), torch.ones(MIB))
