"""A write of the index's head page that fails: the kernel refuses it, to some of the tier's threads. Then the drive is
well again."""

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests import seccomp
from tests.store.disks import local_disk
from tests.store.test_free_pages import PLAIN, SMALL, read_back
from tests.store.test_index import fetch, index_on, location
from tierstore import StorageIOError
from tierstore.disk.file_layout import NamedFileLayout
from tierstore.disk.index import Put

pytestmark = pytest.mark.skipif(not seccomp.is_available(), reason="this machine's system calls are not known")

LARGE = os.urandom(300_000)
_ailing = partial(seccomp.refuse, "pwrite64", errno.EIO, first_bytes=2 * mmap.PAGESIZE)


class Threads(Executor):
    """Runs jobs on a drive that is well, or one whose first pages cannot be written."""

    def __init__(self) -> None:
        self._well, self._ill = ThreadPoolExecutor(2), ThreadPoolExecutor(2, initializer=_ailing)
        self.is_well = True

    def submit(self, job: Callable[..., object], /, *args: object, **options: object) -> Future[object]:
        return (self._well if self.is_well else self._ill).submit(job, *args, **options)

    def shutdown(self, *_: object, **__: object) -> None:
        self._well.shutdown()
        self._ill.shutdown()


@pytest.fixture
def threads() -> Iterator[Threads]:
    with Threads() as both:
        yield both


@pytest.mark.parametrize("is_named", [False, True], ids=["embedded", "as the daemon's"])
async def test_store_goes_on_when_the_drive_is_well_again(tmp_path: Path, threads: Threads, is_named: bool) -> None:
    layout = NamedFileLayout(tmp_path) if is_named else None
    async with local_disk(tmp_path, inline_bytes=2**20, executor=threads, layout=layout) as disk:
        for key in range(4):
            await disk.write(key, memoryview(SMALL), PLAIN)
        await disk.write(4, memoryview(LARGE), PLAIN)
        threads.is_well = False
        for key in (10, 11):
            with pytest.raises(StorageIOError, match=r"Input/output error.*still in memory"):
                await disk.write(key, memoryview(SMALL), PLAIN)
            assert await read_back(disk, 0, SMALL), "a read of that moment finds what was whole"
        await disk.discard([1])
        assert disk.usage().num_records == 4
        threads.is_well = True
        await disk.write(10, memoryview(SMALL), PLAIN)
        assert not disk.damaged_indexes
        for key, content in {0: SMALL, 2: SMALL, 3: SMALL, 4: LARGE, 10: SMALL}.items():
            assert await read_back(disk, key, content)
        await disk.discard([0, 2, 3, 4, 10])
        assert disk.is_empty
        assert disk.usage().disk_bytes == 0


async def test_records_are_found_by_the_next_process(tmp_path: Path, threads: Threads) -> None:
    options = {"inline_bytes": 2**20, "executor": threads}
    async with local_disk(tmp_path, layout=NamedFileLayout(tmp_path), **options) as disk:
        await disk.write(1, memoryview(SMALL), PLAIN)
        threads.is_well = False
        with pytest.raises(StorageIOError):
            await disk.write(2, memoryview(SMALL), PLAIN)
        await disk.close(keep=True)
    threads.is_well = True
    async with local_disk(tmp_path, layout=NamedFileLayout(tmp_path), **options) as disk:
        assert disk.usage().num_records == 1
        assert await read_back(disk, 1, SMALL)


def test_index_that_cannot_be_opened_anew_is_when_it_can(tmp_path: Path) -> None:
    with index_on(tmp_path) as index:
        put = Put(1, location(len(SMALL)), SMALL)
        assert index.apply([put])[0].error is None
        with ThreadPoolExecutor(1, initializer=_ailing) as ill:
            (outcome,) = ill.submit(index.apply, [Put(2, location(1), b"x")]).result()
        assert outcome.error is not None
        with ThreadPoolExecutor(1, initializer=partial(seccomp.refuse, "pread64", errno.EIO, first_bytes=4096)) as ill:
            (outcome,) = ill.submit(index.apply, [Put(3, location(1), b"x")]).result()
        assert "Input/output error" in str(outcome.error)
        assert index.apply([Put(4, location(1), b"x")])[0].error is None
        assert fetch(index, 1) == SMALL
        assert set(index.entries()[0]) == {1, 4}
