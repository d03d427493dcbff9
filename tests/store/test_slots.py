"""Slots between the store and those who were handed one: whose is it, and when is it used again?"""

import gc
from pathlib import Path

import pytest
import torch

from tierstore.ledger.windows import HostWindows
from tierstore.tensors.slots import Slots

NBYTES = 2 * 2**20


def _one_slot() -> tuple[HostWindows, Slots]:
    """With room for a single slot in the slab."""
    books = HostWindows(0, NBYTES)
    return books, Slots(books, NBYTES, lambda: 0, spare_bytes=0)


def _handed_out(slots: Slots, nbytes: int = NBYTES) -> torch.Tensor:
    """A tensor in a slot that the store needs no more."""
    slot = slots.slab.allocate(nbytes)
    tensor = slots.hand_out(slot)
    slots.free_when_unused(slot)
    return tensor


def test_outstanding_slot_is_used_again_only_when_its_storage_is_gone_and_taken_back() -> None:
    books, slots = _one_slot()
    slot = slots.slab.allocate(NBYTES)
    start = slot.start
    assert start is not None
    tensor = slots.hand_out(slot)
    slots.free_when_unused(slot)
    view = tensor[3:]
    del tensor
    slots.take_back()
    assert books.outstanding.used_bytes == NBYTES
    assert slots.slab.allocate(NBYTES).start is None  # a mapping of its own
    del view
    assert slots.returned
    assert books.outstanding.used_bytes == NBYTES  # whoever calls next takes it back; a finalizer takes nothing apart
    slots.take_back()
    assert books.outstanding.used_bytes == 0
    assert not slots.returned
    assert slots.slab.allocate(NBYTES).start == start


def test_slot_whose_storage_died_first_is_free_once_it_is_let_go_of() -> None:
    books, slots = _one_slot()
    slot = slots.slab.allocate(NBYTES)
    start = slot.start
    tensor = slots.hand_out(slot)
    del tensor
    slots.take_back()
    assert slots.slab.allocate(NBYTES).start is None
    slots.free_when_unused(slot)
    assert books.outstanding.used_bytes == 0
    assert slots.slab.allocate(NBYTES).start == start


def test_mapping_of_a_slot_that_the_slab_had_no_room_for_goes_with_the_last_tensor() -> None:
    """Not when Python looks for cycles: a tensor larger than all budgets comes back in such a slot."""
    _, slots = _one_slot()
    tensor = _handed_out(slots, 32 * NBYTES)
    gc.disable()
    try:
        before = _mapped_bytes()
        del tensor
        slots.take_back()
        assert before - _mapped_bytes() >= 32 * NBYTES
    finally:
        gc.enable()


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


@pytest.mark.parametrize("taken", ["host", "staging", "uncharged"])
def test_free_pages_are_kept_within_what_both_windows_leave_free(taken: str) -> None:
    books, uncharged = HostWindows(2 * NBYTES, NBYTES), [0]
    slots = Slots(books, 4 * NBYTES, lambda: sum(uncharged))
    for slot in [slots.slab.allocate(NBYTES) for _ in range(4)]:
        slots.free(slot)
    assert slots.slab.cached_bytes == 3 * NBYTES
    if taken == "uncharged":
        uncharged.append(NBYTES)
    else:
        getattr(books, taken).used_bytes += NBYTES
    slots.trim()
    assert slots.slab.cached_bytes == 2 * NBYTES


def test_free_pages_of_a_window_that_is_overdrawn_take_none_of_the_other() -> None:
    books = HostWindows(NBYTES, NBYTES)
    slots = Slots(books, 2 * NBYTES, lambda: 0)
    for slot in [slots.slab.allocate(NBYTES) for _ in range(2)]:
        slots.free(slot)
    books.staging.used_bytes += 3 * NBYTES
    slots.trim()
    assert slots.slab.cached_bytes == NBYTES


def test_pages_of_an_outstanding_slot_are_kept_for_the_next_read_and_given_up_for_a_write() -> None:
    windows = HostWindows(0, NBYTES)
    slots = Slots(windows, 2 * NBYTES, lambda: 0)
    tensor = _handed_out(slots)
    windows.staging.used_bytes += NBYTES  # another one takes its room while it is outstanding
    del tensor
    slots.take_back()
    slots.trim(is_for_read=True)
    assert slots.slab.cached_bytes == NBYTES
    slots.trim()
    assert slots.slab.cached_bytes == 0
    slots.free(slots.slab.allocate(NBYTES))
    assert slots.slab.cached_bytes == 0, "the spare slot was given up"


@pytest.mark.parametrize(("host_bytes", "num_on_their_way", "num_kept"), [(0, 1, 2), (0, 0, 2), (NBYTES, 1, 2)])
def test_pages_of_an_outstanding_slot_are_kept_beside_free_ones_while_something_is_on_its_way(
    host_bytes: int, num_on_their_way: int, num_kept: int
) -> None:
    """Not beyond what the host window leaves free, nor when nothing moves any more: then the windows are the limit."""
    windows = HostWindows(host_bytes, 2 * NBYTES)
    slots = Slots(windows, 4 * NBYTES, lambda: 0)
    slot, *others = [slots.slab.allocate(NBYTES) for _ in range(3)]
    windows.staging.used_bytes += num_on_their_way * NBYTES
    tensor = slots.hand_out(slot)
    slots.free_when_unused(slot)
    for other in others[: 3 - num_on_their_way]:
        slots.free(other)
    del tensor
    slots.take_back()
    slots.trim(is_for_read=True)
    assert slots.slab.cached_bytes == num_kept * NBYTES


def test_pages_of_an_outstanding_slot_are_not_kept_where_staging_is_overdrawn_by_as_much() -> None:
    windows = HostWindows(0, NBYTES)
    slots = Slots(windows, 2 * NBYTES, lambda: 0)
    tensor = _handed_out(slots)
    windows.staging.used_bytes += 2 * NBYTES
    del tensor
    slots.take_back()
    assert slots.slab.cached_bytes == 0


def _pooled() -> Slots:
    return Slots(HostWindows(0, 64 * NBYTES), 64 * NBYTES, lambda: 0, pools=True)


def test_memory_of_the_allocator_that_was_freed_last_is_read_into_next() -> None:
    slots = _pooled()
    slot = slots.slab.allocate(NBYTES - 5)
    slots.hand_out(slot)[:] = 7
    slots.take_back()
    slots.free_when_unused(slot)
    again = slots.slab.allocate(NBYTES - 5)
    assert again is slot
    tensor = slots.hand_out(again)
    slots.free_when_unused(again)
    assert again.outstanding, "it is in use once more"
    other = slots.slab.allocate(NBYTES - 5)
    assert other.address != again.address
    assert tensor.eq(7).all()


@pytest.mark.parametrize("nbytes", [1, NBYTES - 1, NBYTES + 1])
def test_spare_slot_of_another_length_is_let_go_of(nbytes: int) -> None:
    slots = _pooled()
    slots.free(slots.slab.allocate(NBYTES))
    assert slots.slab.allocate(nbytes).nbytes == nbytes
    assert slots.slab.spare is None


def test_spare_slot_begins_where_it_is_asked_for() -> None:
    slots = _pooled()
    slots.free(slots.slab.allocate(NBYTES, 64))
    assert slots.slab.allocate(NBYTES, 128).address % 4096 == 128
    slots.free(slots.slab.allocate(NBYTES, 64))
    assert slots.slab.allocate(NBYTES, 64).address % 4096 == 64


def test_spare_slot_goes_when_something_is_to_be_written_and_long_ones_are_not_kept() -> None:
    slots = _pooled()
    slots.free(slots.slab.allocate(NBYTES))
    slots.trim(is_for_read=True)
    assert slots.slab.spare is not None
    slots.trim()
    assert slots.slab.spare is None
    slots.free(slots.slab.allocate(9 * 2**20))
    assert slots.slab.spare is None


@pytest.mark.parametrize("pools", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float64, torch.complex128])
@pytest.mark.parametrize("nbytes", [1, 16, 4097, 65_536])
def test_slot_is_handed_out_in_whole_elements(nbytes: int, dtype: torch.dtype, pools: bool) -> None:
    slots = Slots(HostWindows(0, NBYTES), NBYTES, lambda: 0, pools=pools)
    slot = slots.slab.allocate(nbytes)
    slot.memory[:] = bytes(number % 2 for number in range(nbytes))
    tensor = slots.hand_out(slot, dtype)
    assert (tensor.dtype, tensor.shape) == (dtype, (nbytes // dtype.itemsize,))
    assert tensor.data_ptr() == slot.address or not len(tensor)
    assert bytes(tensor.view(torch.uint8).tolist()) == bytes(slot.memory[: tensor.nbytes])
