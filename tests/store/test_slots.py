"""Slots between the store and those who were handed one: whose is it, and when is it used again?"""

from __future__ import annotations

from tierstore.host import HostBooks
from tierstore.slots import Slots

NBYTES = 2 * 2**20


def _one_slot() -> tuple[HostBooks, Slots]:
    """With room for a single slot in the slab."""
    books = HostBooks(0, NBYTES)
    return books, Slots(books, NBYTES, spare_bytes=0)


def test_lent_slot_is_used_again_only_when_its_storage_is_gone_and_taken_back() -> None:
    books, slots = _one_slot()
    slot = slots.allocate(NBYTES)
    start = slot.start
    assert start is not None
    tensor = slots.hand_out(slot)
    slots.let_go(slot)
    view = tensor[3:]
    del tensor
    slots.take_back()
    assert books.lent.used_bytes == NBYTES
    assert slots.allocate(NBYTES).start is None  # a mapping of its own
    del view
    assert slots.has_returned
    assert books.lent.used_bytes == NBYTES  # whoever calls next takes it back; a finalizer takes nothing apart
    slots.take_back()
    assert books.lent.used_bytes == 0
    assert not slots.has_returned
    assert slots.allocate(NBYTES).start == start


def test_slot_whose_storage_died_first_is_free_once_it_is_let_go_of() -> None:
    books, slots = _one_slot()
    slot = slots.allocate(NBYTES)
    start = slot.start
    tensor = slots.hand_out(slot)
    del tensor
    slots.take_back()
    assert slots.allocate(NBYTES).start is None
    slots.let_go(slot)
    assert books.lent.used_bytes == 0
    assert slots.allocate(NBYTES).start == start


def test_slot_that_was_never_handed_out_is_free_at_once() -> None:
    books, slots = _one_slot()
    slot = slots.allocate(NBYTES)
    start = slot.start
    slots.let_go(slot)
    assert books.lent.used_bytes == 0
    assert slots.allocate(NBYTES).start == start
