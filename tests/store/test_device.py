"""The device tier over copies that are over when a test says so, and streams whose order is checked: see
`happens_before.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from tests.device.happens_before import BLOCK_BYTES as NBYTES
from tests.device.happens_before import DEVICE, ClockedCopies
from tests.store.records import made_handle
from tierstore.ledger.device import NUM_SPARED
from tierstore.ledger.state import State
from tierstore.ledger.windows import Window
from tierstore.residency.device import DeviceTier
from tierstore.residency.handle import Handle, Record
from tierstore.residency.outstanding import OutstandingViews
from tierstore.residency.ownership import claim
from tierstore.tensors.slab import Slab, Slot


class HeldCopies(ClockedCopies):
    """The streams of `held` ("out", "in") stand still."""

    def __init__(self) -> None:
        super().__init__(self._may_be_done)
        self.held: set[str] = set()
        self.num_asked = 0  # events, whether they are over

    def _may_be_done(self, stream: str) -> bool:
        self.num_asked += 1
        return stream not in self.held

    def computed(self, number: int) -> torch.Tensor:
        """A tensor that a kernel fills."""
        tensor = self.allocate(self.current)
        self.work(self.current, "the kernel that computes it", writes=tensor.data_ptr())
        return tensor.copy_(_content(number))

    def read_by_kernel(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a kernel reads that is queued now."""
        self.work(self.current, "a kernel of backward", reads=tensor.data_ptr())
        return tensor.clone()


def _content(number: int) -> torch.Tensor:
    return (torch.arange(NBYTES) * 7 + number * 13).remainder(199).to(torch.uint8)


@pytest.fixture
def copies() -> Iterator[HeldCopies]:
    with HeldCopies() as copies:
        yield copies


@pytest.fixture
def slab() -> Slab:
    return Slab(4 * 2**20)


def _tier_over(copies: HeldCopies, **limits: int) -> DeviceTier:
    return DeviceTier(copies, OutstandingViews(), lambda _: True, Window(0), **limits)


def _save(tier: DeviceTier, copies: HeldCopies, number: int) -> Handle:
    """What a pack does, once the tensor is the store's alone."""
    tensor = copies.computed(number)
    handle = made_handle(tensor.detach(), number)
    record = handle.record
    record.device = DEVICE
    claim(record, tensor.untyped_storage())
    record.stream = tier.streams.note_current(DEVICE)
    tier.hold(record)
    return handle


def _offload(tier: DeviceTier, slab: Slab, record: Record) -> Slot:
    record.slot, record.span = slab.allocate(record.nbytes), (0, record.nbytes)
    tier.offload(record)
    return record.slot


def _offloaded(tier: DeviceTier, slab: Slab, copies: HeldCopies, *numbers: int) -> list[Handle]:
    """Records with such contents, whose copies out are over."""
    handles = [_save(tier, copies, number) for number in numbers]
    for handle in handles:
        _offload(tier, slab, handle.record)
    tier.poll()
    assert all(handle.record.state is State.HOST for handle in handles)
    return handles


def _reload(tier: DeviceTier, record: Record) -> torch.Tensor:
    tier.reload(record)
    tier.hand_over(record)
    assert record.source is not None
    return record.source.detach()


def _bytes_in(slot: Slot) -> torch.Tensor:
    return torch.frombuffer(bytearray(slot.memory), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("flight_bytes", "num_in_flight"), [(NBYTES // 2, 1), (NBYTES, 1), (2 * NBYTES, 2), (5 * NBYTES, 5)]
)
def test_offload_beyond_the_bound_makes_the_stream_wait_not_the_host(
    copies: HeldCopies, slab: Slab, flight_bytes: int, num_in_flight: int
) -> None:
    tier = _tier_over(copies, flight_bytes=flight_bytes)
    copies.held = {"out"}
    handles, slots, peak_blocks = [], [], 0
    for number in range(20):  # in memory that is used again: without the waits, before it was copied
        handles.append(_save(tier, copies, number))
        slots.append(_offload(tier, slab, handles[number].record))
        peak_blocks = max(peak_blocks, copies.num_blocks)
        assert tier.held_bytes <= num_in_flight * NBYTES
    assert peak_blocks <= num_in_flight + 1
    assert copies.num_waits["compute"] == 20 - num_in_flight
    assert all(torch.equal(_bytes_in(slot), _content(number)) for number, slot in enumerate(slots))


def test_while_no_copy_is_over_few_calls_ask_whether_one_is(copies: HeldCopies, slab: Slab) -> None:
    tier = _tier_over(copies)
    copies.held = {"out"}
    handles = [_save(tier, copies, number) for number in range(3)]
    for handle in handles:
        _offload(tier, slab, handle.record)
    before = copies.num_asked
    for _ in range(100):
        assert not tier.has_finished()
        tier.poll(seldom=True)
    assert 0 < copies.num_asked - before <= 200 // NUM_SPARED
    copies.held.clear()
    for _ in range(NUM_SPARED + 1):
        tier.poll(seldom=True)
    assert all(handle.record.state is State.HOST for handle in handles)


def test_packs_that_do_not_take_the_lock_count_as_calls_that_do_not_ask(copies: HeldCopies, slab: Slab) -> None:
    tier = _tier_over(copies)
    copies.held = {"out"}
    handle = _save(tier, copies, 5)
    _offload(tier, slab, handle.record)
    for ask_anew in (tier.ask_anew, partial(tier.count_spared, NUM_SPARED)):
        tier.poll()
        before = copies.num_asked
        tier.poll(seldom=True)
        assert copies.num_asked == before
        ask_anew()
        tier.poll(seldom=True)
        assert copies.num_asked == before + 1


def test_reload_ahead_no_stream_waits_before_somebody_asks(copies: HeldCopies, slab: Slab) -> None:
    tier = _tier_over(copies)
    (handle,) = _offloaded(tier, slab, copies, 5)
    copies.held = {"in"}
    tier.reload(handle.record)
    assert not copies.num_waits["compute"], "a kernel that needs nothing of it goes on"
    for _ in range(2):
        tier.hand_over(handle.record)
    assert copies.num_waits["compute"] == 1
    assert torch.equal(copies.read_by_kernel(handle.source), _content(5))


def test_make_room_lets_go_at_once_of_copies_that_still_run_each_way(copies: HeldCopies, slab: Slab) -> None:
    tier = _tier_over(copies)
    handles = [*_offloaded(tier, slab, copies, 0, 1), _save(tier, copies, 2)]
    records = [handle.record for handle in handles]
    copies.held = {"in", "out"}
    assert torch.equal(copies.read_by_kernel(_reload(tier, records[0])), _content(0))  # asked for
    tier.reload(records[1])  # ahead
    slot = _offload(tier, slab, records[2])
    assert copies.num_blocks == 3
    tier.make_room()
    assert (copies.num_blocks, tier.held_bytes) == (0, 0)
    assert [record.has_device_bytes for record in records] == [False, False, False]
    assert records[1].ready is not None
    assert not records[1].ready.query(), "so its slot is not free yet"
    copies.held.clear()
    tier.poll()
    assert records[2].state is State.HOST
    assert torch.equal(_bytes_in(slot), _content(2))
    assert torch.equal(copies.read_by_kernel(_reload(tier, records[1])), _content(1))


def test_reload_waits_for_the_copy_out_that_still_runs(copies: HeldCopies, slab: Slab) -> None:
    tier = _tier_over(copies, flight_bytes=NBYTES)
    copies.held = {"out"}
    handles = [_save(tier, copies, number) for number in range(3)]
    for handle in handles:
        _offload(tier, slab, handle.record)
    assert not handles[0].record.has_device_bytes
    assert torch.equal(copies.read_by_kernel(_reload(tier, handles[0].record)), _content(0))
    assert copies.num_waits["in"] == 2, "for the allocation, and for that copy"


def test_reload_beyond_its_bound_forgets_what_backward_needs_last(copies: HeldCopies, slab: Slab) -> None:
    """But never what was handed over last, even if the order does not know it: a thread has still to take its bytes."""
    tier = _tier_over(copies, reload_bytes=2 * NBYTES)
    handles = _offloaded(tier, slab, copies, *range(4))
    records = [handle.record for handle in handles]
    first, second, third, fourth = records
    _reload(tier, first)
    _reload(tier, second)
    assert not tier.has_room_to_reload(NBYTES, lambda record: record in (first, second))
    assert tier.has_room_to_reload(NBYTES, lambda record: record is second)
    tier.hand_over(first)
    ranks = {second: 7, first: 3, third: 9}
    tier.reload(third, next_rank=lambda record: ranks[record])
    assert [record.has_device_bytes for record in records] == [True, False, True, False]
    tier.hand_over(third)
    tier.reload(fourth, next_rank=lambda record: math.inf if record is third else 3)
    assert [record.has_device_bytes for record in records] == [False, False, True, True]
    for record in records:
        tier.remove(record)
    tier.poll()
    assert not tier.under_way()
