"""The space of the index's free pages is given back, and no page that is in use is touched."""

import errno
import os
import random
from asyncio import gather
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests import seccomp
from tests.reliability.drives import MIB, mounted_drive
from tests.store.disks import local_disk
from tests.store.test_index import fetch, location
from tierstore import StoreFullError
from tierstore.disk.codec.family import DamagedBytesError
from tierstore.disk.file_layout import NamedFileLayout
from tierstore.disk.free_pages import give_back_free_pages
from tierstore.disk.index import Delete, Index, Put
from tierstore.disk.local import LocalDisk
from tierstore.disk.tier import Kind

PLAIN = Kind("float32", 4)
SMALL, LARGE = os.urandom(96 * 1024), os.urandom(4 * MIB)
DISK_BYTES = 128 * MIB


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    made = Index.without_name(tmp_path, 512 * MIB)
    yield made
    made.close()


def change(index: Index, kept: dict[int, bytes], choice: random.Random) -> None:
    """One transaction of puts and deletes."""
    gone = choice.sample(sorted(kept), choice.randrange(len(kept) // 2 + 1))
    sizes = [choice.choice((1, 300, 2500, 30_000, 200_000)) for _ in range(choice.randrange(60))]
    added = {choice.getrandbits(60): choice.randbytes(size) for size in sizes}
    puts = [Put(key, location(len(value)), value) for key, value in added.items()]
    outcomes = index.apply([*puts, *map(Delete, gone)])
    assert not [outcome for outcome in outcomes if outcome.error is not None]
    kept |= added
    for key in gone:
        del kept[key]


@pytest.mark.parametrize("seed", range(4))
def test_values_stay_whatever_is_given_back_between_transactions(index: Index, seed: int) -> None:
    choice, kept = random.Random(seed), dict[int, bytes]()
    for _ in range(40):
        change(index, kept, choice)
        if choice.random() < 0.5:
            index.give_back_free_pages()
            live_bytes = sum(len(value) + 4096 for value in kept.values())
            assert index.allocated_bytes <= 2 * live_bytes + MIB, "and what is free takes no space"
        for key in choice.sample(sorted(kept), min(5, len(kept))):
            assert fetch(index, key) == kept[key]
    assert {key: fetch(index, key) for key in kept} == kept
    assert set(index.entries()[0]) == set(kept)


def test_pages_of_many_small_transactions_are_all_found(index: Index) -> None:
    """Their lists fill a tree of several pages."""
    keys = range(10_000)
    index.apply([Put(key, location(700), bytes(700)) for key in keys])
    full_bytes = index.allocated_bytes
    for start in range(0, len(keys), 20):
        index.apply([Delete(key) for key in keys[start : start + 20]])
    index.give_back_free_pages()
    assert index.allocated_bytes < full_bytes / 20
    index.apply([Put(key, location(700), bytes(700)) for key in keys])
    assert fetch(index, keys[-1]) == bytes(700)


def test_list_that_makes_no_sense_gives_nothing_back(index: Index) -> None:
    values = {key: os.urandom(100_000) for key in range(20)}
    index.apply([Put(key, location(len(value)), value) for key, value in values.items()])
    index.apply([Delete(key) for key in range(10)])
    taken_bytes, descriptor = index.allocated_bytes, index.file.fileno()
    words = memoryview(os.pread(descriptor, 512 * MIB, 0)).cast("Q")
    lists = [at for at, count in enumerate(words[:-2]) if count > 100 and words[at + 1] - words[at + 2] == 1]
    assert lists, "each begins with its length, and is in descending order"
    for at in lists:
        os.pwrite(descriptor, (2**40).to_bytes(8, "little"), 8 * (at + 2))
    with pytest.raises(DamagedBytesError, match="free pages"):
        give_back_free_pages(descriptor)
    assert os.fstat(descriptor).st_blocks * 512 == taken_bytes
    assert fetch(index, 19) == values[19]


def test_file_of_something_else_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "other").open("w+b") as file:
        file.write(b"x" * 10_000)
        file.flush()
        with pytest.raises(DamagedBytesError, match="LMDB's format 1"):
            give_back_free_pages(file.fileno())


async def fill_with_small(disk: LocalDisk, share: float) -> range:
    keys = range(int(share * DISK_BYTES / len(SMALL)))
    await gather(*(disk.write(key, memoryview(SMALL), PLAIN) for key in keys))
    return keys


async def fill_with_large(disk: LocalDisk, share: float) -> range:
    keys = range(10_000, 10_000 + int(share * DISK_BYTES / len(LARGE)))
    await gather(*(disk.write(key, memoryview(LARGE), PLAIN) for key in keys))
    return keys


async def read_back(disk: LocalDisk, key: int, expected: bytes) -> bool:
    destination = bytearray(len(expected))
    await disk.read(key, memoryview(destination))
    return destination == expected


@pytest.mark.parametrize("share", [0.6, 0.75, 0.95])
@pytest.mark.parametrize("is_named", [False, True], ids=["embedded", "as the daemon's"])
async def test_small_records_that_are_gone_leave_all_their_room(tmp_path: Path, share: float, is_named: bool) -> None:
    layout = NamedFileLayout(tmp_path) if is_named else None
    async with local_disk(tmp_path, disk_bytes=DISK_BYTES, inline_bytes=128 * 1024, layout=layout) as disk:
        small = await fill_with_small(disk, 0.4)
        await disk.discard(small[1:])
        large = await fill_with_large(disk, share)
        assert disk.usage().allocated_bytes <= DISK_BYTES + MIB, "where extents lie is entered beside what is counted"
        assert await read_back(disk, small[0], SMALL)
        assert await read_back(disk, large[-1], LARGE)
        await disk.discard(large)
        await disk.discard(small[:1])
        again = range(5000, 5000 + len(small))
        await gather(*(disk.write(key, memoryview(SMALL), PLAIN) for key in again))
        assert await read_back(disk, again[-1], SMALL)


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
async def test_drive_full_of_free_pages_takes_large_records(tmp_path: Path, kind: str) -> None:
    """The budget is not the limit there."""
    with mounted_drive(tmp_path, 96 * MIB, [kind]) as drive:
        async with local_disk(drive, disk_bytes=2**30, inline_bytes=128 * 1024) as disk:
            await disk.discard(await fill_with_small(disk, 0.4))
            large = await fill_with_large(disk, 0.5)
            assert await read_back(disk, large[-1], LARGE)


async def test_space_kept_by_an_earlier_process_is_given_back(tmp_path: Path) -> None:
    options = {"disk_bytes": DISK_BYTES, "inline_bytes": 128 * 1024}
    async with local_disk(tmp_path, layout=NamedFileLayout(tmp_path), **options) as disk:
        small = await fill_with_small(disk, 0.4)
        await disk.discard(small[1:])
        await disk.close(keep=True)
    async with local_disk(tmp_path, layout=NamedFileLayout(tmp_path), **options) as disk:
        large = await fill_with_large(disk, 0.9)
        await disk.close(keep=True)
    async with local_disk(tmp_path, layout=NamedFileLayout(tmp_path), **options) as disk:
        assert disk.usage().num_records == len(large) + 1
        assert await read_back(disk, small[0], SMALL)
        assert await read_back(disk, large[-1], LARGE)


async def test_without_holes_the_refusal_tells_what_is_kept(tmp_path: Path) -> None:
    refusing = ThreadPoolExecutor(4, initializer=partial(seccomp.refuse, "fallocate", errno.EOPNOTSUPP))
    with refusing as threads:
        async with local_disk(tmp_path, disk_bytes=DISK_BYTES, inline_bytes=128 * 1024, executor=threads) as disk:
            await disk.discard(await fill_with_small(disk, 0.4))
            large = await fill_with_large(disk, 0.3)
            with pytest.raises(StoreFullError, match=r"the index keeps \d+ bytes of the budget for small records"):
                await disk.write(1000, memoryview(bytes(DISK_BYTES // 3)), PLAIN)
            assert await read_back(disk, large[-1], LARGE)
