"""Small tensors leave memory together: NOTE [Groups] in `tierstore/residency/groups.py`."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from tests.conftest import MakeStore
from tests.hooks.programs import forget_after_error, gradient_of, half_leaf, sine_chain
from tests.inspect_store import inspect
from tierstore import ModifiedInPlaceError, TierStore, tiered_offload
from tierstore.tensors.slab import Slab

_KIB = 2**10
_NUM = 40


@pytest.fixture
def store(make_store: MakeStore) -> TierStore:
    """Groups are of 64 KiB at most, of tensors of 16 KiB at most."""
    return make_store(host_bytes=0, staging_bytes="256KiB", disk_bytes="64MiB")


def _group_sizes(store: TierStore) -> list[int]:
    return sorted(record.num_members for record in inspect(store).records)


def test_small_tensors_of_a_graph_are_written_and_read_in_groups(store: TierStore) -> None:
    expected = gradient_of(sine_chain(leaf := half_leaf(), _NUM), leaf)
    for number in range(3):  # with a plan too
        with tiered_offload(store, min_bytes=0):
            loss = sine_chain(leaf, _NUM)
        store.flush()
        sizes = _group_sizes(store)
        assert sum(sizes) == store.stats().live_handles == _NUM - 1  # the leaf stays
        assert len(sizes) <= 6, "16 tensors of 4 KiB fit into a group"
        assert torch.equal(gradient_of(loss, leaf), expected)
        assert torch.equal(gradient_of(loss, leaf), expected), "again"
        del loss
        stats = store.stats()
        assert (stats.live_handles, stats.host_bytes, stats.staging_used_bytes) == (0, 0, 0)
        assert number or stats.restored_bytes <= 2 * stats.spilled_bytes, "each backward reads a group once"


def test_group_on_disk_counts_as_used_once_its_last_member_was_asked_for(store: TierStore) -> None:
    """Then its memory may be taken for what is asked for next, in a retained graph too."""
    with tiered_offload(store, min_bytes=0):
        loss = sine_chain(leaf := half_leaf(), _NUM)
    store.flush()
    gradient_of(loss, leaf)
    queues = inspect(store).books.eviction.queues
    assert len(queues["used"]) > 1
    assert not queues["clean"]


def test_what_others_hold_is_in_no_group(store: TierStore) -> None:
    leaf = half_leaf()
    with tiered_offload(store, min_bytes=0):
        values = [leaf.sin()]
        for _ in range(8):
            values.append(values[-1].sin())
        loss = values[-1].sum()
        for _ in range(2):  # at first it might still be let go of
            store.flush()
    assert set(_group_sizes(store)) == {1}
    assert store.stats().spilled_bytes == 0
    values.clear()
    assert torch.equal(*(gradient_of(each, leaf) for each in (loss, sine_chain(leaf, 9))))


def test_views_of_one_storage_are_in_a_group_once_and_large_tensors_in_none(store: TierStore) -> None:
    def loss_of(leaf: torch.Tensor) -> torch.Tensor:
        halves = leaf.cos().chunk(2)
        return halves[0].sin().sum() + halves[1].sin().sum() + leaf.repeat(5).sin().sin().sum() + sine_chain(leaf, 5)

    leaf = half_leaf()
    expected = gradient_of(loss_of(leaf), leaf)
    with tiered_offload(store, min_bytes=0):
        loss = loss_of(leaf)
    store.flush()
    stats = store.stats()
    assert 1 < _group_sizes(store)[-1] <= 6, "two halves, and four of the chain"
    assert stats.spilled_bytes == stats.packed_bytes
    assert torch.equal(gradient_of(loss, leaf), expected)


def test_what_was_handed_out_is_in_no_group(store: TierStore) -> None:
    leaf = half_leaf()
    with tiered_offload(store, min_bytes=0):
        first = _Editing.apply(leaf)
        loss = _edited(first)
        node: Any = first.grad_fn
        del first
        (held,) = node.saved_tensors  # as a function in backward gets it, on another thread perhaps
    store.flush()
    assert _group_sizes(store)[-1] == 10
    assert torch.equal(held, torch.full_like(held, 1.5))
    loss.backward()


def test_groups_have_one_dtype_and_keep_lazy_bits(store: TierStore) -> None:
    def loss_of(leaf: torch.Tensor) -> torch.Tensor:
        total = leaf.new_zeros(())
        for number in range(12):
            half, turned = (leaf * number).bfloat16(), torch.complex(leaf, leaf + number)
            total = total + (half * half.sin()).float().sum() + (turned.conj() * turned.conj()[3:4]).imag.exp().sum()
        return total

    leaf = half_leaf(100)
    expected = gradient_of(loss_of(leaf), leaf)
    with tiered_offload(store, min_bytes=0):
        loss = loss_of(leaf)
    store.flush()
    kinds = {record.kind for record in inspect(store).records if record.num_members > 1}
    assert len(kinds) >= 2
    assert torch.equal(gradient_of(loss, leaf), expected)


def test_group_of_which_backward_ended_early_makes_room_for_others(store: TierStore) -> None:
    stops = [True]

    def stop(gradient: torch.Tensor) -> None:
        if stops:
            raise ValueError(stops.pop())

    leaf, large = half_leaf(), half_leaf(60 * _KIB)
    with tiered_offload(store, min_bytes=0):
        value = leaf
        for number in range(9):
            value = value.sin()
            if number == 4:
                value.register_hook(stop)
        loss = value.sum()
        del value
    store.flush()
    with pytest.raises(ValueError, match="True"):
        loss.backward(retain_graph=True)
    forget_after_error()
    with tiered_offload(store, min_bytes=0):
        other = (large * 2).sin().sum()
    store.flush()  # the two do not fit into staging together
    assert store.stats().host_bytes + store.stats().staging_used_bytes <= 256 * _KIB
    assert torch.equal(gradient_of(other, large), gradient_of((large * 2).sin().sum(), large))
    assert torch.equal(gradient_of(loss, leaf), gradient_of(sine_chain(leaf, 9), leaf))


class _Editing(torch.autograd.Function):
    """Changes what it has saved, as a function may in its last backward."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        context.save_for_backward(value * 3)
        return value * 2

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (saved,) = context.saved_tensors
        return saved.mul_(gradients[0])


def _edited(leaf: torch.Tensor) -> torch.Tensor:
    value = leaf
    for _ in range(10):
        value = _Editing.apply(value)
    return value.sum()


def test_change_of_one_member_is_seen_in_that_one_alone(store: TierStore) -> None:
    leaf = half_leaf()
    _edited(leaf).backward()
    expected, leaf.grad = leaf.grad, None
    with tiered_offload(store, min_bytes=0):
        loss = _edited(leaf)
    store.flush()
    assert _group_sizes(store) == [10]
    loss.backward(retain_graph=True)
    assert leaf.grad is not None
    assert expected is not None
    assert torch.equal(leaf.grad, expected)
    with pytest.raises(ModifiedInPlaceError):
        loss.backward()
    forget_after_error()


def test_member_that_outlives_the_others_is_still_right(store: TierStore) -> None:
    leaf = half_leaf()
    with tiered_offload(store, min_bytes=0):
        middle = sine_chain(leaf, 5)
        loss = sine_chain(leaf, 5)
    store.flush()
    assert max(_group_sizes(store)) == 8
    del loss
    assert store.stats().live_handles, "the group goes with its last member"
    assert torch.equal(*(gradient_of(each, leaf) for each in (middle, sine_chain(leaf, 5))))
    del middle
    assert store.stats().live_handles == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_group_that_is_formed_in_inference_mode(
    store: TierStore, mode: Callable[[], AbstractContextManager[object]]
) -> None:
    leaf = half_leaf()
    with tiered_offload(store, min_bytes=0):
        loss = sine_chain(leaf, _NUM)
    with torch.inference_mode():
        store.flush()
    assert _group_sizes(store)[-1] > 1
    expected = gradient_of(sine_chain(leaf, _NUM), leaf)
    with mode():  # backward
        assert torch.equal(gradient_of(loss, leaf), expected)


def test_groups_are_small_beside_host_memory(make_store: MakeStore) -> None:
    store = make_store(host_bytes="64KiB", staging_bytes="1MiB")
    leaf = half_leaf()
    with tiered_offload(store, min_bytes=0):
        loss = sine_chain(leaf, 20)
    store.flush()
    assert _group_sizes(store)[-1] == 4
    assert store.stats().spilled_bytes == 2**14, "all else fits into host memory"
    loss.backward()


def test_large_tensor_has_the_room_of_small_ones_that_others_hold(make_store: MakeStore) -> None:
    """Nothing else takes room there, so to wait for it would be in vain."""
    chance = random.Random(131)
    num_mib = chance.choice([1, 2])
    store = make_store(host_bytes=0, staging_bytes=f"{num_mib}MiB", disk_bytes="1GiB")
    leaf, held = half_leaf(), []
    with tiered_offload(store, min_bytes=0):
        total = leaf.sum()
        for _ in range(60):
            value = leaf.repeat(chance.choice([1, 1, 1, 4, 16, 60, 225, 250]) * num_mib).sin()
            if chance.random() < 0.3:
                held.append(value)
            if chance.random() < 0.2:
                held.clear()
            total = total + value.cos().sum()
            del value
    total.backward()


def test_without_memory_for_a_group_each_tensor_leaves_by_itself(
    store: TierStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = Slab.allocate
    leaf = half_leaf()
    with tiered_offload(store, min_bytes=0):
        loss = sine_chain(leaf, _NUM)
        monkeypatch.setattr(Slab, "allocate", os.fstat)  # no file has that number: an OSError from C
        store.flush()
    monkeypatch.setattr(Slab, "allocate", allocate)
    assert 1 in _group_sizes(store)
    assert torch.equal(*(gradient_of(each, leaf) for each in (loss, sine_chain(leaf, _NUM))))


@pytest.mark.filterwarnings("default")  # the compiler's own
def test_conjugate_in_a_group_comes_back_as_saved_and_to_a_traced_backward_too(store: TierStore) -> None:
    def loss_of(leaf: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(leaf.sin().view(-1, 2))
        return (turned.conj() * turned.exp()).real.exp().sum() + sine_chain(leaf, 8)

    leaf = half_leaf()
    expected = gradient_of(loss_of(leaf), leaf)
    with tiered_offload(store, min_bytes=0):
        loss = loss_of(leaf)
    store.flush()
    assert _group_sizes(store)[-1] > 1
    for is_traced in (False, True, False):
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")) if is_traced else nullcontext():
            assert torch.equal(gradient_of(loss, leaf), expected)
