"""The index: batches, values, a full map, and nothing visible on disk."""

import asyncio
import errno
import os
import resource
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from tests.reliability.drives import MIB, fill_up, mounted_drive
from tierstore.disk import index as index_module
from tierstore.disk.budget import map_bytes_for, value_charge_bytes
from tierstore.disk.codec.codec import DamagedBytesError
from tierstore.disk.entries import IndexEntries
from tierstore.disk.index import Delete, Fetch, Index, Operation, Outcome, Put
from tierstore.disk.location import Location


def location(num_bytes: int) -> Location:
    return Location(
        segment=None,
        offset=None,
        taken_bytes=value_charge_bytes(num_bytes),
        encoded_bytes=num_bytes,
        logical_bytes=num_bytes,
        codec="none",
        level=0,
        itemsize_bytes=1,
        head_bytes=0,
        checksum=2**64 - 1,
    )


@contextmanager
def index_on(directory: Path) -> Iterator[Index]:
    made = Index.without_name(directory, map_bytes_for(8 * 2**20))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with index_on(tmp_path) as made:
        yield made


def fetch(index: Index, key: int) -> bytes:
    found: list[bytes] = []
    (outcome,) = index.apply([Fetch(key, lambda value: found.append(bytes(value)))])
    if outcome.error is not None:
        raise outcome.error
    return found[0]


def test_directory_stays_empty_and_descriptors_are_found(tmp_path: Path, index: Index) -> None:
    index.apply([Put(1, location(9), bytes(9))])
    assert os.listdir(tmp_path) == []
    assert len(index.descriptors()) >= 2
    assert all(os.get_inheritable(descriptor) is False for descriptor in index.descriptors())
    assert os.fstat(index.file.fileno()).st_mode & 0o777 == 0o600
    assert index.allocated_bytes > 0


def test_one_value_too_many_does_not_take_the_batch_with_it(tmp_path: Path) -> None:
    index = Index.without_name(tmp_path, 2**20)
    try:
        small = [Put(key, location(100), bytes([key]) * 100) for key in range(20)]
        batch: list[Operation] = [*small[:10], Put(99, location(2**20), bytes(2**20)), *small[10:]]
        outcomes = index.apply(batch)
        assert isinstance(outcomes[10].error, lmdb.MapFullError)
        assert sum(outcome.error is not None for outcome in outcomes) == 1
        assert [fetch(index, key) for key in range(20)] == [bytes([key]) * 100 for key in range(20)]
        with pytest.raises(DamagedBytesError):
            fetch(index, 99)
    finally:
        index.close()


@pytest.mark.parametrize("size", [1, 300, 1100, 2500, 4096, 30_000])
def test_map_is_never_filled_by_what_the_budget_allows(tmp_path: Path, size: int) -> None:
    """Charged against the budget, values fill it, are deleted and fill it again: the map has room throughout."""
    disk_bytes = 4 * 2**20
    map_bytes = map_bytes_for(disk_bytes) - 60 * 2**20  # most of the spare is for larger budgets
    index, count = Index.without_name(tmp_path, map_bytes), disk_bytes // value_charge_bytes(size)
    try:
        for start in (0, count, 2 * count):
            puts = [Put(key, location(size), bytes(size)) for key in range(start, start + count)]
            assert all(outcome.error is None for outcome in index.apply(puts))
            assert index.allocated_bytes <= 2 * disk_bytes
            assert all(outcome.error is None for outcome in index.apply([Delete(put.key) for put in puts]))
    finally:
        index.close()


def test_large_values_are_found_in_the_file_and_the_map_is_left_out_of_children(index: Index, tmp_path: Path) -> None:
    value = os.urandom(2**20)
    for key in range(20):
        (outcome,) = index.apply([Put(key, location(len(value)), value)])
        assert outcome.error is None
        assert outcome.value_offset is not None
        assert os.pread(index.file.fileno(), len(value), outcome.value_offset) == value
    maps = Path("/proc/self/smaps").read_text().split(str(tmp_path))
    assert " dc " in maps[-1].partition("VmFlags:")[2].partition("\n")[0]


def test_many_indexes_for_large_drives_have_addresses(tmp_path: Path) -> None:
    indexes = [Index.without_name(tmp_path, map_bytes_for(2**50)) for _ in range(20)]
    assert min(index.map_bytes for index in indexes) > 2**40
    for index in indexes:
        index.close()


def entries_of(index: Index, executor: ThreadPoolExecutor) -> IndexEntries:
    """Without space, budget and reserve, which only deletions need."""
    return IndexEntries(index, executor, None, None, None, has_extents=False)  # type: ignore[arg-type]


async def test_commits_of_jobs_and_batches_do_not_overlap(index: Index) -> None:
    """A batch is in flight while a job commits: the job's operation waits for its end."""
    batch_began, batch_may_end, job_began = threading.Event(), threading.Event(), threading.Event()
    running: list[int] = []
    most_at_once = []

    class Watched(Index):
        def __init__(self) -> None:
            self.allocated_bytes = 0

        def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
            running.append(len(operations))
            most_at_once.append(len(running))
            batch_began.set()
            try:
                assert batch_may_end.wait(10)
                return index.apply(operations)
            finally:
                running.pop()

    def job(commits: IndexEntries) -> Outcome:
        job_began.set()
        return commits.commit_now(Put(2, location(3), b"def"))

    with ThreadPoolExecutor(2) as executor:
        commits = entries_of(Watched(), executor)
        batch = asyncio.ensure_future(commits.submit(Put(1, location(3), b"abc")))
        await asyncio.to_thread(batch_began.wait, 10)
        batch_began.clear()
        of_job = asyncio.get_running_loop().run_in_executor(executor, job, commits)
        await asyncio.to_thread(job_began.wait, 10)
        assert not await asyncio.to_thread(batch_began.wait, 0.05), "a longer wait shows no less"
        batch_may_end.set()
        assert (await batch).error is None
        assert (await of_job).error is None
    assert most_at_once == [1, 1]
    assert [fetch(index, key) for key in (1, 2)] == [b"abc", b"def"]


async def test_commit_that_fails_and_a_pool_that_is_gone_are_outcomes(index: Index) -> None:
    executor = ThreadPoolExecutor(1)
    index.close()
    assert entries_of(index, executor).commit_now(Delete(1)).error is not None
    executor.shutdown()
    outcome = await entries_of(index, executor).submit(Delete(1))
    assert isinstance(outcome.error, RuntimeError)


@contextmanager
def files_no_longer_than(num_bytes: int) -> Iterator[None]:
    """What crosses that is written in part, as on a full file system (setrlimit(2), RLIMIT_FSIZE)."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


@pytest.mark.parametrize("is_room_made", [True, False])
def test_short_write_with_room_on_the_drive_is_tried_again(
    index: Index, monkeypatch: pytest.MonkeyPatch, is_room_made: bool
) -> None:
    """There may be room the next moment, and then nothing says that it was full. A limit is no full drive."""
    value, told = os.urandom(100_000), index_module.may_be_short_write
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    num_told = 0

    def make_room(error: Exception) -> bool:
        nonlocal num_told
        num_told += 1
        if is_room_made:
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        return told(error)

    monkeypatch.setattr(index_module, "may_be_short_write", make_room)
    with files_no_longer_than(os.fstat(index.file.fileno()).st_size + 3 * 4096):
        (outcome,) = index.apply([Put(1, location(len(value)), value)])
    assert num_told
    if is_room_made:
        assert outcome.error is None
    else:
        assert isinstance(outcome.error, lmdb.Error)
        assert getattr(outcome.error, "code", None) == errno.EIO
        (outcome,) = index.apply([Put(1, location(len(value)), value)])
        assert outcome.error is None
    assert fetch(index, 1) == value


@pytest.mark.parametrize("num_filled", [2, 3, 5])
@pytest.mark.parametrize(("left_bytes", "code"), [(10 * 4096, errno.EIO), (0, errno.ENOSPC)], ids=["a part", "nothing"])
def test_what_a_drive_refuses_that_others_fill_and_free_is_done_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_filled: int, left_bytes: int, code: int
) -> None:
    """There is room whenever the index looks, and none, or for a part, the first times it writes."""
    with mounted_drive(tmp_path, 32 * MIB) as drive, index_on(drive) as index:
        value, commit, told = os.urandom(100_000), Index._commit, index_module.may_be_short_write
        filler = drive / "somebody-elses"
        failed = []

        def commit_on_a_full_drive(of: Index, operations: Sequence[Operation]) -> Exception | None:
            if len(failed) < num_filled:
                fill_up_but(drive, left_bytes)
            error = commit(of, operations)
            if error is not None:
                failed.append(error)
            return error

        def make_room(error: Exception) -> bool:
            filler.unlink(missing_ok=True)
            return told(error)

        monkeypatch.setattr(Index, "_commit", commit_on_a_full_drive)
        monkeypatch.setattr(index_module, "may_be_short_write", make_room)
        (outcome,) = index.apply([Put(1, location(len(value)), value)])
        assert [getattr(error, "code", None) for error in failed] == [code] * num_filled
        assert outcome.error is None
        assert fetch(index, 1) == value


def test_short_write_on_a_full_drive_is_a_full_drive(tmp_path: Path) -> None:
    with mounted_drive(tmp_path, 32 * MIB) as drive, index_on(drive) as index:
        value = os.urandom(100_000)
        fill_up_but(drive, 10 * 4096)
        (outcome,) = index.apply([Put(1, location(len(value)), value)])
        assert isinstance(outcome.error, OSError)
        assert outcome.error.errno == errno.ENOSPC
        assert getattr(outcome.error.__cause__, "code", None) == errno.EIO
        (drive / "somebody-elses").unlink()
        (outcome,) = index.apply([Put(1, location(len(value)), value)])
        assert outcome.error is None
        assert fetch(index, 1) == value


def fill_up_but(drive: Path, left_bytes: int) -> None:
    """All but so many bytes."""
    filler = fill_up(drive)
    os.truncate(filler, filler.stat().st_size - left_bytes)
