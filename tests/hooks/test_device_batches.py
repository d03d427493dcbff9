"""Tensors leave an accelerator together: small ones in groups, gathered in one piece, and large ones in batches, each
from where it lies. NOTE [Groups] in `tierstore/residency/groups.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from tests.conftest import MakeStore
from tests.device.fake import FakeDevice, SeenDevice
from tests.existing import set_existing
from tests.hooks.programs import (
    assert_a_change_in_place_is_found,
    forget_after_error,
    gradient_of,
    half_leaf,
    sine_chain,
)
from tests.inspect_store import inspect
from tierstore import ModifiedInPlaceError, TierStore, tiered_offload

_KIB = 2**10
_NUMBERS = 8 * _KIB
_NBYTES = 4 * _NUMBERS
"""Too large for a group. Four fit into a batch."""


class _Size(NamedTuple):
    """Of tensors that leave together: numbers in each, how many the graph saves, and how many leave at once.

    `most_copies`: of the whole graph; `most_left`: copied groups, or tensors, where the plan lets 16 stay."""

    numbers: int
    num: int
    together: int
    most_copies: int
    most_left: int

    @property
    def nbytes(self) -> int:
        return 4 * self.numbers


_GROUPS = _Size(_KIB, num=40, together=16, most_copies=5, most_left=12)
_BATCHES = _Size(_NUMBERS, num=20, together=4, most_copies=7, most_left=8)
_SIZES = pytest.mark.parametrize("size", [_GROUPS, _BATCHES], ids=["groups", "batches"])


@pytest.fixture
def store(make_store: MakeStore, copies: SeenDevice) -> TierStore:
    """Groups are of 64 KiB at most, of tensors of 16 KiB at most; batches of 128 KiB."""
    return make_store(host_bytes="64MiB", staging_bytes="256KiB", copies=copies)


def _leaf() -> torch.Tensor:
    return half_leaf(_NUMBERS)


def _sizes(store: TierStore) -> list[int]:
    return sorted(record.num_members for record in inspect(store).records)


@_SIZES
@pytest.mark.parametrize("host_bytes", ["64MiB", 0])
def test_they_leave_and_come_back_together(
    make_store: MakeStore, copies: SeenDevice, size: _Size, host_bytes: Any
) -> None:
    store = make_store(host_bytes=host_bytes, staging_bytes="256KiB", copies=copies)
    expected = gradient_of(sine_chain(leaf := half_leaf(size.numbers), size.num), leaf)
    for step in range(3):  # with a plan too
        copies.out.clear()
        with tiered_offload(store, min_bytes=0):
            loss = sine_chain(leaf, size.num)
            used_bytes = inspect(store).device_window.resident.used_bytes
            assert used_bytes <= size.together * size.nbytes, "full ones have left"
        store.flush()
        sizes = _sizes(store)
        assert sum(sizes) == store.stats().live_handles == size.num - 1  # the leaf stays
        assert len(copies.out) == len(sizes) <= size.most_copies
        assert copies.out == [1] * len(sizes) if size is _GROUPS else sum(copies.out) == size.num - 1
        for _ in range(2):
            assert torch.equal(gradient_of(loss, leaf), expected)
        del loss
        stats = store.stats()
        assert (stats.live_handles, stats.host_bytes, stats.device_bytes) == (0, 0, 0)
        assert stats.offloaded_bytes == (step + 1) * (size.num - 1) * size.nbytes
    assert size is _BATCHES or copies.num_in <= copies.num_out * 2


@_SIZES
def test_what_stays_is_in_none_and_what_leaves_by_the_plan_is(
    store: TierStore, copies: SeenDevice, size: _Size
) -> None:
    expected = gradient_of(sine_chain(leaf := half_leaf(size.numbers), size.num), leaf)
    for step in range(3):
        copies.out.clear()
        with tiered_offload(store, min_bytes=0, device_bytes=16 * size.nbytes):
            loss = sine_chain(leaf, size.num)
        assert step == 0 or size.num - 1 - sum(_sizes(store)) == 16, "the last ones need no record"
        assert sum(copies.out) <= size.most_left
        assert torch.equal(gradient_of(loss, leaf), expected)
        del loss
    assert store.stats().device_bytes == 0


@_SIZES
def test_change_in_place_is_found_as_one_of_the_tensor_that_was_changed(store: TierStore, size: _Size) -> None:
    assert_a_change_in_place_is_found(half_leaf(size.numbers), 24, store)


@_SIZES
def test_views_lazy_bits_and_dtypes_come_back(store: TierStore, size: _Size) -> None:
    def loss_of(leaf: torch.Tensor) -> torch.Tensor:
        total = leaf.new_zeros(())
        for number in range(8):
            half, turned = (leaf * number).bfloat16(), torch.complex(leaf, leaf + number)
            halves = (leaf + number).cos().chunk(2)
            total = total + (half * half.sin()).float().sum() + (turned.conj() * turned.conj()[3:4]).imag.exp().sum()
            total = total + halves[0].sin().sum() + halves[1].sin().sum()
        return total

    leaf = half_leaf((0 if size is _GROUPS else 5 * _KIB) + 301)  # no storage ends where the next may begin
    with tiered_offload(store, min_bytes=0):
        loss = loss_of(leaf)
    records = [record for record in inspect(store).records if bool(record.ranges) is (size is _BATCHES)]
    assert max(record.num_members for record in records) > 2
    log = store._core.of_thread.logs.popitem()[1]()
    firsts = [first for record in records for first, _ in record.ranges]
    assert {first % 512 for first in (firsts or [member.first_byte for member in log.members.values()])} == {0}
    assert torch.equal(gradient_of(loss, leaf), gradient_of(loss_of(leaf), leaf))


@_SIZES
def test_graph_that_is_dropped_leaves_nothing(store: TierStore, copies: SeenDevice, size: _Size) -> None:
    with tiered_offload(store, min_bytes=0):
        loss = sine_chain(half_leaf(size.numbers), size.num)
        assert copies.out, "while the others are saved"
    del loss
    copies.synchronize()
    stats = store.stats()
    assert (stats.live_handles, stats.host_bytes, stats.device_bytes) == (0, 0, 0)


@_SIZES
def test_second_derivative_of_what_came_back(store: TierStore, size: _Size) -> None:
    def second(leaf: torch.Tensor, context: Any) -> torch.Tensor:
        with context:
            loss = sine_chain(leaf, 12)
            (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
            return gradient_of((first * first).sum(), leaf)

    leaf = half_leaf(size.numbers)
    expected = second(leaf, torch.enable_grad())
    assert torch.equal(second(leaf, tiered_offload(store, min_bytes=0)), expected)


@_SIZES
@pytest.mark.parametrize("num_tensors", [1, 5])
def test_full_device_gets_one_member(make_store: MakeStore, size: _Size, num_tensors: int) -> None:
    with FakeDevice(num_tensors * size.nbytes) as copies:
        store = make_store(host_bytes="64MiB", staging_bytes="256KiB", copies=copies)
        expected = gradient_of(sine_chain(leaf := half_leaf(size.numbers), size.num), leaf)
        for _ in range(3):
            with tiered_offload(store, min_bytes=0):
                loss = sine_chain(leaf, size.num)
            copies.synchronize()  # so that no bytes are handed over which are on the device still
            store.flush()
            assert max(_sizes(store)) > 1
            for _ in range(2):
                assert torch.equal(gradient_of(loss, leaf), expected)
            del loss
        assert copies.num_refused


def _used_on_two_streams(store: TierStore, copies: SeenDevice, leaf: torch.Tensor) -> None:
    """Packed on the first and unpacked on the second, twice; then the first is the current one again."""
    for _ in range(2):
        copies.now = 0
        with tiered_offload(store, min_bytes=0, device_bytes="64MiB"):
            first = sine_chain(leaf, 4)
        copies.now = 1
        gradient_of(first, leaf)
        del first
    copies.now = 0


def test_memory_of_members_is_kept_for_every_stream_that_may_use_it(store: TierStore, copies: SeenDevice) -> None:
    _used_on_two_streams(store, copies, leaf := half_leaf())
    with tiered_offload(store, min_bytes=0):
        loss = sine_chain(leaf, 11)
        copies.shared.clear()
    assert max(_sizes(store)) >= 4
    streams = [stream for nbytes, stream in copies.shared if nbytes == 4 * _KIB]
    assert streams.count(1) >= max(_sizes(store))
    assert torch.equal(gradient_of(loss, leaf), gradient_of(sine_chain(leaf, 11), leaf))


def test_blocks_of_a_batch_are_kept_for_every_stream_that_may_use_them(store: TierStore, copies: SeenDevice) -> None:
    _used_on_two_streams(store, copies, leaf := _leaf())
    with tiered_offload(store, min_bytes=0):
        loss = sine_chain(leaf, 9)
    copies.now = 1
    copies.synchronize()
    store.stats()
    assert sorted(copies.shared) == [(_NBYTES, 0)] * 8 + [(_NBYTES, 1)] * 8
    copies.shared.clear()
    copies.now = 2
    assert torch.equal(gradient_of(loss, leaf), gradient_of(sine_chain(leaf, 9), leaf))
    assert copies.shared.count((_NBYTES, 2)) == 8


@pytest.mark.parametrize(("device_bytes", "num_registered"), [(0, 0), (64 * _KIB, 16)])
def test_what_others_hold_waits_once_or_while_there_is_room_and_leaves_alone(
    store: TierStore, device_bytes: int, num_registered: int
) -> None:
    leaf = half_leaf()
    with tiered_offload(store, min_bytes=0, device_bytes=device_bytes):
        values = [leaf.sin()]
        for number in range(_GROUPS.num):
            values.append(values[-1].sin())
            assert number != 16 or sum(_sizes(store)) >= num_registered
        loss = values[-1].sum()
    assert set(_sizes(store)) == {1}
    assert store.stats().offloaded_bytes == 0
    values.clear()
    assert torch.equal(*(gradient_of(each, leaf) for each in (loss, sine_chain(leaf, _GROUPS.num + 1))))


@pytest.mark.parametrize("why", ["another stream", "no room"])
def test_each_leaves_alone_where_no_group_can_be_made(
    store: TierStore, copies: SeenDevice, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    leaf = half_leaf()
    with tiered_offload(store, min_bytes=0):
        loss = sine_chain(leaf, 10)
        if why == "another stream":
            copies.now = 1
        else:
            monkeypatch.setattr(torch, "cat", _no_room)
    assert _sizes(store) == [1] * 9
    assert torch.equal(gradient_of(loss, leaf), gradient_of(sine_chain(leaf, 10), leaf))


def _no_room(_: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("for the test")


def test_device_without_room_for_one_member_says_where_the_bytes_are(make_store: MakeStore) -> None:
    copies = FakeDevice(room_bytes=2 * _KIB)
    store = make_store(host_bytes="64MiB", staging_bytes="256KiB", copies=copies)
    with tiered_offload(store, min_bytes=0):
        loss = sine_chain(leaf := half_leaf(), _GROUPS.num)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        gradient_of(loss, leaf)
    assert "bytes that backward asks for are in host memory still" in raised.value.__notes__[0]
    set_existing(copies, _room_bytes=None)
    forget_after_error()
    assert torch.equal(gradient_of(loss, leaf), gradient_of(sine_chain(leaf, _GROUPS.num), leaf))
    copies.end()


def test_each_has_memory_of_its_own_each_way(store: TierStore, copies: SeenDevice) -> None:
    """So the allocator gives the blocks of forward to backward again."""
    leaf = _leaf()
    with tiered_offload(store, min_bytes=0):
        loss = sine_chain(leaf, 9)
    copies.synchronize()
    store.stats()
    assert {nbytes for nbytes, _ in copies.shared} == {_NBYTES}
    handles = [handle for record in inspect(store).records if (handle := record()) is not None]
    assert [handle.parts for handle in handles] == [{}] * len(handles), "what was copied is let go of"
    assert torch.equal(gradient_of(loss, leaf), gradient_of(sine_chain(leaf, 9), leaf))
    assert set(copies._targets.values()) <= {_NBYTES}


def test_one_larger_than_half_a_batch_leaves_alone_at_once(store: TierStore, copies: SeenDevice) -> None:
    leaf = half_leaf(2 * _NUMBERS + 1)
    with tiered_offload(store, min_bytes=0):
        loss = sine_chain(leaf, 6)
        assert copies.out == [1] * 4, "all but what the newest node saves, and what the next one reads"
    assert _sizes(store) == [1] * 5
    assert torch.equal(gradient_of(loss, leaf), gradient_of(sine_chain(leaf, 6), leaf))


def test_small_ones_beside_large_ones_are_gathered(store: TierStore, copies: SeenDevice) -> None:
    def loss_of(leaf: torch.Tensor) -> torch.Tensor:
        value, total = leaf, leaf.new_zeros(())
        for _ in range(12):
            value = value.sin()
            total = total + value[:_KIB].clone().exp().sum()
        return total + value.sum()

    leaf = _leaf()
    for _ in range(3):
        with tiered_offload(store, min_bytes=0):
            loss = loss_of(leaf)
        batches = [record for record in inspect(store).records if record.ranges]
        groups = [record for record in inspect(store).records if record.num_members > 1 and not record.ranges]
        assert batches
        assert groups
        assert {end - first for record in batches for first, end in record.ranges} == {_NBYTES}
        assert torch.equal(gradient_of(loss, leaf), gradient_of(loss_of(leaf), leaf))
        del loss


def test_batch_is_handed_out_where_it_lies_and_leaves_later(make_store: MakeStore, copies: SeenDevice) -> None:
    """Backward of one graph gets what has not left yet; then another graph needs the room."""
    store = make_store(host_bytes="64MiB", staging_bytes="256KiB", copies=copies)
    leaf, expected = _leaf(), gradient_of(sine_chain(_leaf_again := _leaf(), 9), _leaf_again)
    with tiered_offload(store, min_bytes=0, device_bytes=16 * _NBYTES):
        loss = sine_chain(leaf, 9)
        store.stats()  # registers what is settled
    assert max(_sizes(store)) > 1
    assert copies.out == []
    assert torch.equal(gradient_of(loss, leaf), expected)
    seen = loss.grad_fn.next_functions[0][0]._saved_self  # type: ignore[union-attr]
    with tiered_offload(store, min_bytes=0, device_bytes=0):
        other = sine_chain(leaf, 3)
    del seen
    with tiered_offload(store, min_bytes=0, device_bytes=0):
        other = other + sine_chain(leaf, 6)
    store.flush()
    assert max(copies.out) > 1
    assert torch.equal(gradient_of(loss, leaf), expected)
    del other


def test_what_was_handed_out_and_changed_in_place_is_found(store: TierStore) -> None:
    leaf = _leaf()
    with tiered_offload(store, min_bytes=0):
        loss = sine_chain(leaf, 9)
    node = loss.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node._saved_self.detach().add_(1)
    with pytest.raises(ModifiedInPlaceError):
        gradient_of(loss, leaf)
    forget_after_error()


def test_closed_store_drops_the_memory_of_batches(store: TierStore, copies: SeenDevice) -> None:
    leaf = _leaf()
    with tiered_offload(store, min_bytes=0):
        loss = sine_chain(leaf, 9)
    gradient_of(loss, leaf)
    records = [record for record in inspect(store).records if record.ranges]
    assert records
    store.close()
    assert all(handle.parts == {} for record in records if (handle := record()) is not None)
    with pytest.raises(Exception, match="closed"):
        gradient_of(loss, leaf)
    forget_after_error()
    set_existing(copies, _room_bytes=None)
