"""The shared window: no byte in two slots, reads before writes."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.sidecar.window import SharedSlab, SharedWindow, WindowSlot

PAGE = 4096
MIB = 2**20
NUM_PAGES = 8

pytestmark = pytest.mark.timeout(20)  # for who waits for a slot that never comes


@pytest.fixture
def slab() -> Iterator[SharedSlab]:
    slab = SharedSlab(3, NUM_PAGES * PAGE)
    yield slab
    slab.close()


@pytest.fixture
def window(slab: SharedSlab) -> Iterator[SharedWindow]:
    with ThreadPoolExecutor(2) as executor:
        yield SharedWindow(slab, executor)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


Taking = asyncio.Task[WindowSlot]


def taking(window: SharedWindow, num_pages: int, *, to_read: bool) -> Taking:
    return asyncio.ensure_future(window.take(num_pages * PAGE, to_read=to_read))


async def test_write_waits_behind_a_read_that_waits_and_a_read_not_behind_a_write(window: SharedWindow) -> None:
    most = await window.take((NUM_PAGES - 2) * PAGE, to_read=False)
    large_write = taking(window, 5, to_read=False)
    await turns()
    small_read = taking(window, 1, to_read=True)
    await turns()
    assert small_read.done()
    large_read = taking(window, 4, to_read=True)
    small_write = taking(window, 1, to_read=False)
    await turns()
    assert not small_write.done(), "there is room for it, but then the read would wait for longer"
    window.give_back(small_read.result())
    await turns()
    assert not large_read.done()
    assert not small_write.done(), "nor does it get what comes back meanwhile"
    window.give_back(most)
    await turns()
    assert large_read.done()
    assert not large_write.done()
    assert not small_write.done(), "first come first served"
    window.give_back(large_read.result())
    await asyncio.gather(large_write, small_write)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, NUM_PAGES * PAGE), st.booleans()), max_size=30))
async def test_no_byte_is_in_two_slots_and_all_come_back(wanted: list[tuple[int, bool]]) -> None:
    slab = SharedSlab(0, NUM_PAGES * PAGE)
    window = SharedWindow(slab, ThreadPoolExecutor(1))
    held: set[int] = set()  # bytes at page boundaries and ends tell as much as all of them

    async def use(num_bytes: int, to_read: bool) -> None:
        slot = await window.take(num_bytes, to_read=to_read)
        assert slot.offset % PAGE == 0
        assert slot.offset + num_bytes <= NUM_PAGES * PAGE
        pages = set(range(slot.offset // PAGE, (slot.offset + max(num_bytes, 1) - 1) // PAGE + 1))
        assert not pages & held
        held.update(pages)
        await turns()
        held.difference_update(pages)
        window.give_back(slot)

    await asyncio.gather(*(use(*each) for each in wanted))
    window.give_back(await window.take(NUM_PAGES * PAGE, to_read=False))
    slab.close()
