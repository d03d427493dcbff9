"""Small tensors leave an accelerator together: NOTE [Groups] in `tierstore/residency/groups.py`."""

from __future__ import annotations

from collections.abc import Iterator
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
from tierstore import TierStore, tiered_offload

_KIB = 2**10
_NUM = 40


class _Streams(LateCopies):
    def __init__(self) -> None:
        super().__init__()
        self.now = "first"
        self.shared: list[tuple[int, str]] = []

    def current_stream(self, device: torch.device) -> str:
        return f"{self.now} of {device}"

    def share(self, memory: torch.Tensor, stream: str) -> None:
        self.shared.append((len(memory), stream))


@pytest.fixture
def copies() -> Iterator[_Streams]:
    engine = _Streams()
    yield engine
    engine.end()
    assert engine.num_dead == 0, "no block is used again before its copy is over"


@pytest.fixture
def store(make_store: MakeStore, copies: _Streams) -> TierStore:
    """Groups are of 64 KiB at most, of tensors of 16 KiB at most."""
    return make_store(host_bytes="64MiB", staging_bytes="256KiB", copies=copies)


def _group_sizes(store: TierStore) -> list[int]:
    return sorted(record.num_members for record in inspect(store).records)


@pytest.mark.parametrize("host_bytes", ["64MiB", 0])
def test_small_tensors_leave_and_come_back_in_groups(make_store: MakeStore, copies: _Streams, host_bytes: Any) -> None:
    store = make_store(host_bytes=host_bytes, staging_bytes="256KiB", copies=copies)
    expected = gradient_of(sine_chain(leaf := half_leaf(), _NUM), leaf)
    for _ in range(3):  # with a plan too
        num_before = copies.num_out
        with tiered_offload(store, min_bytes=0):
            loss = sine_chain(leaf, _NUM)
            assert inspect(store).device_window.resident.used_bytes <= 64 * _KIB, "a full group has left"
        store.flush()
        sizes = _group_sizes(store)
        assert sum(sizes) == store.stats().live_handles == _NUM - 1  # the leaf stays
        assert len(sizes) <= 5, "16 tensors of 4 KiB fit into a group"
        assert copies.num_out - num_before == len(sizes)
        for _ in range(2):
            assert torch.equal(gradient_of(loss, leaf), expected)
        del loss
        stats = store.stats()
        assert (stats.live_handles, stats.host_bytes, stats.device_bytes) == (0, 0, 0)
    assert copies.num_in <= copies.num_out * 2


def test_what_stays_is_in_no_group_and_what_leaves_by_the_plan_is(store: TierStore, copies: _Streams) -> None:
    expected = gradient_of(sine_chain(leaf := half_leaf(), _NUM), leaf)
    for step in range(3):
        num_before = copies.num_out
        with tiered_offload(store, min_bytes=0, device_bytes=64 * _KIB):
            loss = sine_chain(leaf, _NUM)
        num_tracked = _NUM - 1 - sum(_group_sizes(store))
        assert step == 0 or num_tracked == 16, "the last ones need no record"
        assert copies.num_out - num_before <= 12, "four tensors of 4 KiB are a fourth of what may stay"
        assert torch.equal(gradient_of(loss, leaf), expected)
        del loss
    assert store.stats().device_bytes == 0


@pytest.mark.parametrize(("device_bytes", "num_registered"), [(0, 0), (64 * _KIB, 16)])
def test_what_others_hold_waits_once_or_while_there_is_room_and_leaves_alone(
    store: TierStore, device_bytes: int, num_registered: int
) -> None:
    leaf = half_leaf()
    with tiered_offload(store, min_bytes=0, device_bytes=device_bytes):
        values = [leaf.sin()]
        for number in range(_NUM):
            values.append(values[-1].sin())
            assert number != 16 or sum(_group_sizes(store)) >= num_registered
        loss = values[-1].sum()
    assert set(_group_sizes(store)) == {1}
    assert store.stats().offloaded_bytes == 0
    values.clear()
    assert torch.equal(*(gradient_of(each, leaf) for each in (loss, sine_chain(leaf, _NUM + 1))))


def test_change_in_place_is_found_as_one_of_the_tensor_that_was_changed(store: TierStore) -> None:
    assert_a_change_in_place_is_found(half_leaf(), 24, store)


def test_views_lazy_bits_and_dtypes_come_back(store: TierStore) -> None:
    def loss_of(leaf: torch.Tensor) -> torch.Tensor:
        total = leaf.new_zeros(())
        for number in range(8):
            half, turned = (leaf * number).bfloat16(), torch.complex(leaf, leaf + number)
            halves = (leaf + number).cos().chunk(2)
            total = total + (half * half.sin()).float().sum() + (turned.conj() * turned.conj()[3:4]).imag.exp().sum()
            total = total + halves[0].sin().sum() + halves[1].sin().sum()
        return total

    leaf = half_leaf(301)  # no storage ends where the next may begin
    with tiered_offload(store, min_bytes=0):
        loss = loss_of(leaf)
    assert max(_group_sizes(store)) > 2
    log = store._core.of_thread.logs.popitem()[1]()
    assert {member.first_byte % 512 for member in log.members.values()} == {0}
    assert torch.equal(gradient_of(loss, leaf), gradient_of(loss_of(leaf), leaf))


def test_graph_of_groups_that_is_dropped_leaves_nothing(store: TierStore, copies: _Streams) -> None:
    leaf = half_leaf()
    with tiered_offload(store, min_bytes=0):
        loss = sine_chain(leaf, _NUM)
        assert copies.num_out, "while the others are saved"
    del loss
    copies.synchronize()
    stats = store.stats()
    assert (stats.live_handles, stats.host_bytes, stats.device_bytes) == (0, 0, 0)


def test_memory_of_members_is_kept_for_every_stream_that_may_use_it(store: TierStore, copies: _Streams) -> None:
    leaf = half_leaf()
    for _ in range(2):
        copies.now = "first"
        with tiered_offload(store, min_bytes=0, device_bytes="64MiB"):
            first = sine_chain(leaf, 4)
        copies.now = "second"
        gradient_of(first, leaf)
        del first
    copies.now = "first"
    with tiered_offload(store, min_bytes=0):
        loss = sine_chain(leaf, 11)
        copies.shared.clear()
    assert max(_group_sizes(store)) >= 4
    names = [name.split()[0] for nbytes, name in copies.shared if nbytes == 4 * _KIB]
    assert names.count("second") >= max(_group_sizes(store))
    assert torch.equal(gradient_of(loss, leaf), gradient_of(sine_chain(leaf, 11), leaf))


@pytest.mark.parametrize("why", ["another stream", "no room"])
def test_each_leaves_alone_where_no_group_can_be_made(
    store: TierStore, copies: _Streams, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    leaf = half_leaf()
    with tiered_offload(store, min_bytes=0):
        loss = sine_chain(leaf, 10)
        if why == "another stream":
            copies.now = "second"
        else:
            monkeypatch.setattr(torch, "cat", _no_room)
    assert _group_sizes(store) == [1] * 9
    assert torch.equal(gradient_of(loss, leaf), gradient_of(sine_chain(leaf, 10), leaf))


def _no_room(_: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("for the test")


def test_second_derivative_of_what_came_back_in_groups(store: TierStore) -> None:
    def second(leaf: torch.Tensor, context: Any) -> torch.Tensor:
        with context:
            loss = sine_chain(leaf, 12)
            (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
            return gradient_of((first * first).sum(), leaf)

    leaf = half_leaf()
    expected = second(leaf, torch.enable_grad())
    assert torch.equal(second(leaf, tiered_offload(store, min_bytes=0)), expected)


@pytest.mark.parametrize("room_bytes", [4 * _KIB, 20 * _KIB])
def test_full_device_gets_one_member(make_store: MakeStore, room_bytes: int) -> None:
    copies = LateCopies(room_bytes)
    store = make_store(host_bytes="64MiB", staging_bytes="256KiB", copies=copies)
    expected = gradient_of(sine_chain(leaf := half_leaf(), _NUM), leaf)
    for _ in range(3):
        with tiered_offload(store, min_bytes=0):
            loss = sine_chain(leaf, _NUM)
        copies.synchronize()  # so that no bytes are handed over which are on the device still
        store.flush()
        assert max(_group_sizes(store)) > 1
        for _ in range(2):
            assert torch.equal(gradient_of(loss, leaf), expected)
        del loss
    assert copies.num_refused
    assert copies.num_dead == 0
    copies.end()


def test_device_without_room_for_one_member_says_where_the_bytes_are(make_store: MakeStore) -> None:
    copies = LateCopies(room_bytes=2 * _KIB)
    store = make_store(host_bytes="64MiB", staging_bytes="256KiB", copies=copies)
    with tiered_offload(store, min_bytes=0):
        loss = sine_chain(leaf := half_leaf(), _NUM)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        gradient_of(loss, leaf)
    assert "bytes that backward asks for are in host memory still" in raised.value.__notes__[0]
    set_existing(copies, _room_bytes=None)
    forget_after_error()
    assert torch.equal(gradient_of(loss, leaf), gradient_of(sine_chain(leaf, _NUM), leaf))
    copies.end()
