"""Extents: the pure allocator under arbitrary use, and segments within their budget."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.inspect_store import segment_files
from tierstore.disk import extents as extents_module
from tierstore.disk import segments as segments_module
from tierstore.disk.allocator import ALIGNMENT_BYTES, FreeExtents, round_up
from tierstore.disk.budget import DiskBudget
from tierstore.disk.extents import ExtentSpace
from tierstore.disk.file_layout import UnnamedFileLayout
from tierstore.disk.forking import Inode, inode_of, not_while_forking
from tierstore.disk.segments import close_segments, detect_io_mode, open_segment
from tierstore.errors import StoreFullError

BLOCK = ALIGNMENT_BYTES
STEPS = st.lists(st.tuples(st.sampled_from(["take", "take", "free", "trim"]), st.integers(1, 40)), max_size=200)
NUM_BLOCKS = 64


@given(steps=STEPS)
@settings(max_examples=150, deadline=None)
def test_free_extents_never_overlap_and_are_found_again(steps: list[tuple[str, int]]) -> None:
    free = FreeExtents(NUM_BLOCKS * BLOCK, {})
    owned: dict[int, int] = {}
    for action, number in steps:
        if action == "take":
            if free.longest_bytes >= number * BLOCK:
                start = free.allocate(number * BLOCK)
                assert start is not None
                owned[start] = number * BLOCK
            else:
                assert free.allocate(number * BLOCK) is None
        elif owned:
            start = sorted(owned)[number % len(owned)]
            kept = owned[start] // BLOCK // 2 * BLOCK if action == "trim" else 0
            free.free(start + kept, owned[start] - kept)
            if kept:
                owned[start] = kept
            else:
                del owned[start]
        check_tiles(free, owned)
        assert FreeExtents(NUM_BLOCKS * BLOCK, owned).length_at == free.length_at
    for start, length in owned.items():
        free.free(start, length)
    assert free.is_whole


def check_tiles(free: FreeExtents, owned: dict[int, int]) -> None:
    """Owned extents and free runs tile the segment exactly, and no two free runs touch."""
    tiles = sorted([*owned.items(), *free.length_at.items()])
    assert tiles[0][0] == 0
    assert sum(tiles[-1]) == NUM_BLOCKS * BLOCK
    assert all(first + size == second for (first, size), (second, _) in pairwise(tiles))
    runs = sorted(free.length_at.items())
    assert all(first + size != second for (first, size), (second, _) in pairwise(runs))
    assert free.is_whole is not bool(owned)


@pytest.mark.parametrize(("start", "length"), [(0, 1), (2, 2), (3, 1), (15, 2), (16, 1), (40, 1)])
def test_what_is_not_handed_out_is_not_freed(start: int, length: int) -> None:
    free = FreeExtents(16 * BLOCK, {BLOCK: 2 * BLOCK})
    with pytest.raises(ValueError, match="not handed out"):
        free.free(start * BLOCK, length * BLOCK)
    assert free.length_at == {0: BLOCK, 3 * BLOCK: 13 * BLOCK}


def test_budget_counts_values_at_their_peak() -> None:
    budget = DiskBudget(100, 2**40)
    assert budget.add_value(60, may_be_extent=False)
    budget.remove_value(60)
    assert (budget.value_bytes, budget.room_bytes) == (0, 40)
    budget.segment_bytes = 40
    assert budget.add_value(60, may_be_extent=True), "it takes nothing more than was taken"
    assert not budget.add_value(1, may_be_extent=False)
    assert budget.value_bytes == 60


OpenSpace = Callable[..., ExtentSpace]


@pytest.fixture
async def open_space(tmp_path: Path) -> AsyncIterator[OpenSpace]:
    """Opens spaces in `tmp_path`, and closes them at the end."""
    spaces: list[ExtentSpace] = []
    with ThreadPoolExecutor(4) as executor:

        def opened(budget: DiskBudget, **options: float) -> ExtentSpace:
            mode = detect_io_mode(tmp_path)
            spaces.append(ExtentSpace(UnnamedFileLayout(tmp_path), budget, mode, executor, **options))
            return spaces[-1]

        yield opened
        for space in spaces:
            await space.close()


@pytest.fixture
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents_module, "SEGMENT_BYTES", 2**20)


@pytest.mark.usefixtures("_small_segments")
async def test_segments_stay_within_the_budget(open_space: OpenSpace) -> None:
    budget = DiskBudget(round_up(5 * 2**20 + 1), 2**40)
    space = open_space(budget)
    taken = []

    async def fill() -> None:
        while True:
            taken.append(await space.take(100_000))
            assert budget.segment_bytes <= budget.limit_bytes

    with pytest.raises(StoreFullError, match="longest free extent") as caught:
        await fill()
    assert caught.value.disk_bytes == space.used_bytes == len(taken) * round_up(100_000)
    assert len(segment_files(space)) > 2
    assert sum(os.fstat(file.fileno()).st_size for file in segment_files(space)) == budget.segment_bytes
    for extent in taken:
        space.give_back(extent)
    await space.take(5 * 2**20)  # only possible once the small segments are closed
    assert len(segment_files(space)) == 1
    await space.close()
    assert budget.segment_bytes == 0


@pytest.mark.usefixtures("_small_segments")
async def test_oldest_segment_that_has_room_is_used_first(open_space: OpenSpace) -> None:
    """So that the others empty themselves when use falls."""
    space = open_space(DiskBudget(64 * 2**20, 2**40))
    taken = [await space.take(100_000) for _ in range(15)]
    space.give_back(taken[3])
    assert await space.take(50_000) == taken[3]._replace(num_bytes=round_up(50_000))
    assert space.used_bytes == 14 * round_up(100_000) + round_up(50_000)


async def come_and_go(space: ExtentSpace, num_extents: int) -> None:
    """Take so many extents, ten to a segment of 1 MiB, and give them back."""
    for extent in [await space.take(100_000) for _ in range(num_extents)]:
        space.give_back(extent)


@pytest.mark.usefixtures("_small_segments")
async def test_empty_segments_are_used_again_by_the_next_step(open_space: OpenSpace) -> None:
    space = open_space(DiskBudget(64 * 2**20, 2**40), idle_seconds=3600)
    await come_and_go(space, 50)
    inodes = set(space.inodes)
    assert len(inodes) > 4
    for _ in range(5):
        await come_and_go(space, 50)
    assert space.inodes == inodes


@pytest.mark.usefixtures("_small_segments")
async def test_segments_empty_for_long_are_closed_but_one(open_space: OpenSpace) -> None:
    space = open_space(DiskBudget(64 * 2**20, 2**40), idle_seconds=0.01)
    staying = [await space.take(100_000) for _ in range(15)]
    await come_and_go(space, 50)
    async with asyncio.timeout(60):
        while len(segment_files(space)) > 3:  # the two that are in use, one that is empty
            await asyncio.sleep(0.005)
        for extent in staying:
            space.give_back(extent)
        while len(segment_files(space)) > 1:
            await asyncio.sleep(0.005)
    await space.close()
    assert not space.inodes


@pytest.mark.usefixtures("_small_segments")
async def test_empty_segments_are_closed_at_once_where_others_need_their_budget(open_space: OpenSpace) -> None:
    budget = DiskBudget(5 * 2**20, 2**40)
    space = open_space(budget)
    await come_and_go(space, 45)
    assert budget.room_bytes < 2**20
    assert not space.free_budget_for(6 * 2**20)
    assert space.free_budget_for(2**20)
    while budget.room_bytes < 2**20:
        assert await space.wait_for_news()


async def test_take_waits_for_what_is_promised(open_space: OpenSpace) -> None:
    space = open_space(DiskBudget(2**20, 2**40))
    whole = await space.take(2**20)
    space.promise()
    waiting = asyncio.ensure_future(space.take(2**19))
    await asyncio.sleep(0)
    assert not waiting.done()
    space.trim(whole, 2**18)
    space.settle_promise()
    assert (await waiting).num_bytes == 2**19
    space.promise()
    failing = asyncio.ensure_future(space.take(2**19))
    await asyncio.sleep(0)
    space.settle_promise()
    with pytest.raises(StoreFullError, match=r"longest free extent|used up"):
        await failing


@pytest.mark.parametrize(
    ("cause", "error"),
    [
        (OSError(errno.ENOSPC, "no room"), StoreFullError),
        (OSError(errno.EIO, "no luck"), OSError),
        (MemoryError("no memory"), MemoryError),
    ],
)
async def test_take_reports_why_no_segment_can_be_made(
    open_space: OpenSpace, monkeypatch: pytest.MonkeyPatch, cause: Exception, error: type[Exception]
) -> None:
    def refuse(*_: object) -> None:
        raise cause

    space = open_space(DiskBudget(2**20, 2**40))
    with monkeypatch.context() as patch:
        patch.setattr("tierstore.disk.transfer.reserve", refuse)
        with pytest.raises(error, match=r"no (room|luck|memory)"):
            await space.take(4096)
    assert (await space.take(4096)).num_bytes == 4096  # asked again, not remembered for ever


def test_segment_without_o_tmpfile_has_no_name_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not know the flag sees what is left of it, O_DIRECTORY, and refuses to write (open(2))."""
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)
    inodes: set[Inode] = set()
    segment = open_segment(UnnamedFileLayout(tmp_path), 0, 2**20, 2**20, detect_io_mode(tmp_path), inodes)
    status = os.fstat(segment.file.fileno())
    assert (status.st_nlink, status.st_size) == (0, 2**20)
    assert inodes == {(status.st_dev, status.st_ino)}
    assert list(tmp_path.iterdir()) == []
    close_segments([segment], inodes)
    assert inodes == set()


def test_segment_is_opened_and_noted_in_one_with_regard_to_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that is forked in between would keep a file of which it does not know."""
    seen: list[bool] = []

    class Looking(UnnamedFileLayout):
        def make_segment(self, number: int) -> int:
            seen.append(not_while_forking._is_owned())
            return super().make_segment(number)

    def note_while_looking(descriptor: int) -> Inode:
        seen.append(not_while_forking._is_owned())
        return inode_of(descriptor)

    monkeypatch.setattr(segments_module, "inode_of", note_while_looking)
    segment = open_segment(Looking(tmp_path), 0, 2**20, 2**20, detect_io_mode(tmp_path), set())
    segment.file.close()
    assert seen == [True, True]
