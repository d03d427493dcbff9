"""Large tensors leave an accelerator together, each from where it lies: NOTE [Groups] in
`tierstore/residency/groups.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.conftest import MakeStore
from tests.existing import set_existing
from tests.hooks.late_copies import LateCopies
from tests.hooks.programs import (
    assert_a_change_in_place_is_found,
    forget_after_error,
    gradient_of,
    half_leaf,
    sine_chain,
)
from tests.inspect_store import inspect
from tierstore import ModifiedInPlaceError, TierStore, tiered_offload
from tierstore.residency.copies import Marker

_KIB = 2**10
_NUM = 20
_NUMBERS = 8 * _KIB
_NBYTES = 4 * _NUMBERS
"""Too large for a group. Four fit into a batch."""


class _Streams(LateCopies):
    """Tells how many were copied at once each way, and what was shared with which stream."""

    def __init__(self, room_bytes: int | None = None) -> None:
        super().__init__(room_bytes)
        self.now = "first"
        self.out: list[int] = []
        self.back: list[int] = []
        self.shared: list[tuple[int, str]] = []

    def current_stream(self, device: torch.device) -> str:
        return f"{self.now} of {device}"

    def share(self, memory: torch.Tensor, stream: str) -> None:
        self.shared.append((memory.nbytes, stream.split()[0]))

    def copy_out_many(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], stream: Any) -> Marker:
        self.out.append(len(sources))
        return super().copy_out_many(sources, targets, stream)


@pytest.fixture
def copies() -> Iterator[_Streams]:
    engine = _Streams()
    yield engine
    engine.end()
    assert engine.num_dead == 0, "no block is used again before its copy is over"


@pytest.fixture
def store(make_store: MakeStore, copies: _Streams) -> TierStore:
    """Batches are of 128 KiB at most."""
    return make_store(host_bytes="64MiB", staging_bytes="256KiB", copies=copies)


def _leaf() -> torch.Tensor:
    return half_leaf(_NUMBERS)


def _sizes(store: TierStore) -> list[int]:
    return sorted(record.num_members for record in inspect(store).records)


@pytest.mark.parametrize("host_bytes", ["64MiB", 0])
def test_large_tensors_leave_and_come_back_in_batches(make_store: MakeStore, copies: _Streams, host_bytes: Any) -> None:
    store = make_store(host_bytes=host_bytes, staging_bytes="256KiB", copies=copies)
    expected = gradient_of(sine_chain(leaf := _leaf(), _NUM), leaf)
    for step in range(3):  # with a plan too
        copies.out.clear()
        with tiered_offload(store, min_bytes=0):
            loss = sine_chain(leaf, _NUM)
            assert inspect(store).device_window.resident.used_bytes <= 4 * _NBYTES, "a full batch has left"
        store.flush()
        sizes = _sizes(store)
        assert sum(sizes) == store.stats().live_handles == _NUM - 1  # the leaf stays
        assert copies.out.count(4) >= 4, copies.out
        assert sum(copies.out) == _NUM - 1
        for _ in range(2):
            assert torch.equal(gradient_of(loss, leaf), expected)
        del loss
        stats = store.stats()
        assert (stats.live_handles, stats.host_bytes, stats.device_bytes) == (0, 0, 0)
        assert stats.offloaded_bytes == (step + 1) * (_NUM - 1) * _NBYTES


def test_each_has_memory_of_its_own_each_way(store: TierStore, copies: _Streams) -> None:
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


def test_one_larger_than_half_a_batch_leaves_alone_at_once(store: TierStore, copies: _Streams) -> None:
    leaf = half_leaf(2 * _NUMBERS + 1)
    with tiered_offload(store, min_bytes=0):
        loss = sine_chain(leaf, 6)
        assert copies.out == [1] * 4, "all but what the newest node saves, and what the next one reads"
    assert _sizes(store) == [1] * 5
    assert torch.equal(gradient_of(loss, leaf), gradient_of(sine_chain(leaf, 6), leaf))


def test_small_ones_beside_large_ones_are_gathered(store: TierStore, copies: _Streams) -> None:
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


def test_what_stays_is_in_no_batch_and_what_leaves_by_the_plan_is(store: TierStore, copies: _Streams) -> None:
    expected = gradient_of(sine_chain(leaf := _leaf(), _NUM), leaf)
    for step in range(3):
        copies.out.clear()
        with tiered_offload(store, min_bytes=0, device_bytes=16 * _NBYTES):
            loss = sine_chain(leaf, _NUM)
        assert step == 0 or _NUM - 1 - sum(_sizes(store)) == 16, "the last ones need no record"
        assert sum(copies.out) <= 8
        assert torch.equal(gradient_of(loss, leaf), expected)
        del loss
    assert store.stats().device_bytes == 0


def test_batch_is_handed_out_where_it_lies_and_leaves_later(make_store: MakeStore, copies: _Streams) -> None:
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


def test_change_in_place_is_found_as_one_of_the_tensor_that_was_changed(store: TierStore) -> None:
    assert_a_change_in_place_is_found(_leaf(), 12, store)


def test_what_was_handed_out_and_changed_in_place_is_found(store: TierStore) -> None:
    leaf = _leaf()
    with tiered_offload(store, min_bytes=0):
        loss = sine_chain(leaf, 9)
    node = loss.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node._saved_self.detach().add_(1)
    with pytest.raises(ModifiedInPlaceError):
        gradient_of(loss, leaf)
    forget_after_error()


def test_views_lazy_bits_and_dtypes_come_back(store: TierStore) -> None:
    def loss_of(leaf: torch.Tensor) -> torch.Tensor:
        total = leaf.new_zeros(())
        for number in range(6):
            half, turned = (leaf * number).bfloat16(), torch.complex(leaf, leaf + number)
            halves = (leaf + number).cos().chunk(2)
            total = total + (half * half.sin()).float().sum() + (turned.conj() * turned.conj()[3:4]).imag.exp().sum()
            total = total + halves[0].sin().sum() + halves[1].sin().sum()
        return total

    leaf = half_leaf(5 * _KIB + 301)  # no storage ends where the next may begin
    with tiered_offload(store, min_bytes=0):
        loss = loss_of(leaf)
    batches = [record for record in inspect(store).records if record.ranges]
    assert max(record.num_members for record in batches) > 2
    assert {first % 512 for record in batches for first, _ in record.ranges} == {0}
    assert torch.equal(gradient_of(loss, leaf), gradient_of(loss_of(leaf), leaf))


def test_graph_of_batches_that_is_dropped_leaves_nothing(store: TierStore, copies: _Streams) -> None:
    with tiered_offload(store, min_bytes=0):
        loss = sine_chain(_leaf(), _NUM)
        assert copies.out, "while the others are saved"
    del loss
    copies.synchronize()
    stats = store.stats()
    assert (stats.live_handles, stats.host_bytes, stats.device_bytes) == (0, 0, 0)


def test_blocks_of_a_batch_are_kept_for_every_stream_that_may_use_them(store: TierStore, copies: _Streams) -> None:
    leaf = _leaf()
    for _ in range(2):
        copies.now = "first"
        with tiered_offload(store, min_bytes=0, device_bytes="64MiB"):
            first = sine_chain(leaf, 4)
        copies.now = "second"
        gradient_of(first, leaf)
        del first
    copies.now = "first"
    with tiered_offload(store, min_bytes=0):
        loss = sine_chain(leaf, 9)
    copies.now = "second"
    copies.synchronize()
    store.stats()
    assert sorted(copies.shared) == [(_NBYTES, "first")] * 8 + [(_NBYTES, "second")] * 8
    copies.shared.clear()
    copies.now = "third"
    assert torch.equal(gradient_of(loss, leaf), gradient_of(sine_chain(leaf, 9), leaf))
    assert copies.shared.count((_NBYTES, "third")) == 8


def test_second_derivative_of_what_came_back_in_batches(store: TierStore) -> None:
    def second(leaf: torch.Tensor, context: Any) -> torch.Tensor:
        with context:
            loss = sine_chain(leaf, 12)
            (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
            return gradient_of((first * first).sum(), leaf)

    leaf = _leaf()
    expected = second(leaf, torch.enable_grad())
    assert torch.equal(second(leaf, tiered_offload(store, min_bytes=0)), expected)


@pytest.mark.parametrize("room_bytes", [_NBYTES, 5 * _NBYTES])
def test_full_device_gets_one_member(make_store: MakeStore, room_bytes: int) -> None:
    copies = _Streams(room_bytes)
    store = make_store(host_bytes="64MiB", staging_bytes="256KiB", copies=copies)
    expected = gradient_of(sine_chain(leaf := _leaf(), _NUM), leaf)
    for _ in range(3):
        with tiered_offload(store, min_bytes=0):
            loss = sine_chain(leaf, _NUM)
        copies.synchronize()  # so that no bytes are handed over which are on the device still
        store.flush()
        assert max(_sizes(store)) > 1
        for _ in range(2):
            assert torch.equal(gradient_of(loss, leaf), expected)
        del loss
    assert copies.num_refused
    assert copies.num_dead == 0
    copies.end()


def test_closed_store_drops_the_memory_of_batches(store: TierStore, copies: _Streams) -> None:
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
