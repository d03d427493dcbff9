"""Views of one storage: stored once where that is right, apart where it would not be."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.conftest import MakeStore
from tests.hooks.programs import SIDE, Around, Results, Settle, assert_same_gradients, program_of
from tierstore import TierStore, tiered_offload


def test_chunks_of_one_product_stored_once_and_restored_as_one(store: TierStore) -> None:
    layer = nn.Linear(SIDE, 3 * SIDE)
    with tiered_offload(store, min_bytes=0, prefetch="none"):
        query, key, value = layer(torch.randn(SIDE, SIDE)).chunk(3, -1)
        nodes = [part.sin().grad_fn for part in (query, key, value)]
    expected = [part.detach().clone() for part in (query, key, value)]
    nbytes = query.untyped_storage().nbytes()
    before = store.stats()
    assert before.deduplicated_bytes == nbytes * 2 // 3
    assert before.packed_bytes == nbytes + SIDE * SIDE * 4  # and the batch
    del query, key, value
    store.flush()
    parts = [node._saved_self for node in nodes]  # type: ignore[union-attr]
    assert all(torch.equal(part, wanted) for part, wanted in zip(parts, expected, strict=True))
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert [part.stride() for part in parts] == [(3 * SIDE, 1)] * 3
    assert [part.storage_offset() for part in parts] == [0, SIDE, 2 * SIDE]
    assert store.stats().restored_bytes == nbytes


def _workspace(weight: Tensor) -> Tensor:
    """Every row is saved through `.data`, with a counter of its own, then the next row is written."""
    workspace, terms = torch.empty(4, SIDE), []
    for row in workspace.data:
        row.data.copy_(torch.randn(SIDE))
        terms += [(weight * row.data).sum(), (weight * workspace.data[0]).sin().sum()]
    return torch.stack(terms).sum()


def _numpy_workspace(weight: Tensor) -> Tensor:
    workspace, terms = np.zeros((4, SIDE), dtype=np.float32), []
    for number in range(4):
        workspace[number] = torch.randn(SIDE).numpy()
        terms += [(weight[0] * torch.from_numpy(part)).sin().sum() for part in (workspace[number], workspace)]
    return torch.stack(terms).sum()


def _geometries(weight: Tensor) -> Tensor:
    base = torch.randn(2 * SIDE, SIDE)
    views = [
        base[4 : 4 + SIDE], base[::2], base[:SIDE].t(), base[3:4].expand(SIDE, SIDE), base.view(SIDE, -1)[:, 1::2],
        base.as_strided((SIDE, SIDE), (3, 1), 5), base.view(-1)[8 : 8 + SIDE**2].view(SIDE, SIDE),
        base.unfold(0, SIDE, 1)[0], base.view(torch.complex64)[:SIDE].repeat(1, 2).real, base.view(torch.int32)[SIDE:],
    ]  # fmt: skip
    return torch.stack([(weight * view).sin().sum() for view in views]).sum()


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        total = sum(float(saved.abs().double().sum()) for saved in ctx.saved_tensors)
        return (gradient * total).expand(SIDE, SIDE), None, None, None, None


def _odd_end(weight: Tensor) -> Tensor:
    """The record is made by a complex view; the base has one float more than that can reach."""
    base = torch.randn(2 * SIDE + 1)
    pairs = base[:-1].view(torch.complex64)
    return _Saves.apply(weight, pairs, base, base.view(torch.int32), pairs[3:].conj())


@pytest.mark.parametrize("host_bytes", [0, "1GiB"])
@pytest.mark.parametrize("loss", [_workspace, _numpy_workspace, _geometries, _odd_end])
def test_views_of_one_storage_same_bits(
    make_store: MakeStore, loss: Callable[[Tensor], Tensor], host_bytes: object
) -> None:
    assert_same_gradients(program_of(loss), make_store(host_bytes=host_bytes))


def test_slice_of_a_big_storage_only_its_span_written(store: TierStore) -> None:
    weight = torch.randn(SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        big = torch.randn(1000, SIDE)
        loss = (big[500:502] * weight).sum()
        expected = big[500:502].sum(0).clone()
        del big
    store.flush()
    assert store.stats().packed_bytes == 1000 * SIDE * 4
    assert store.stats().spilled_bytes == 2 * SIDE * 4
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)


def test_saved_edited_and_saved_again_second_graph_not_refused(store: TierStore) -> None:
    """The first graph is done with, but lives: the version that it saved is not that of the second."""

    def program(around: Around, settle: Settle) -> Results:
        weight = torch.randn(SIDE, requires_grad=True)
        with around():
            buffer = torch.ones(SIDE)
            first = (weight * buffer).sum()
            results = [torch.autograd.grad(first, weight, retain_graph=True)[0]]
            buffer.mul_(3)
            second = (weight * buffer).sum()
        del buffer
        settle()
        second.backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            first.backward()
        return [*results, weight.grad]

    assert_same_gradients(program, store)


def test_two_counters_of_one_storage_edit_of_one_refuses_only_its_graph(store: TierStore) -> None:
    """The parts of `unsafe_chunk` share a storage and, when they are saved, a version; not a version counter."""

    def program(around: Around, settle: Settle) -> Results:
        weight = torch.randn(SIDE, SIDE, requires_grad=True)
        with around():
            left, right = (weight * 2).unsafe_chunk(2)
            of_left, of_right = left.sin().sum(), right.cos().sum()
        with torch.no_grad():
            left.add_(1)
        del left, right
        settle()
        of_right.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            of_left.backward()
        return [weight.grad]

    assert_same_gradients(program, store)


def test_copy_on_write_clone_saved_is_not_copied(store: TierStore) -> None:
    """Who asks a copy-on-write storage for its address in the usual way has it copied."""
    weight, batch = torch.randn(SIDE, requires_grad=True), torch.randn(SIDE)
    clone = torch._lazy_clone(batch)
    with tiered_offload(store, min_bytes=0):
        loss = (weight * clone).sum()
    store.flush()
    assert torch._C._is_cow_tensor(clone)
    assert torch._C._is_cow_tensor(batch)
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, batch)


def test_restored_base_saved_again_by_double_backward_same_bits(store: TierStore) -> None:
    def program(around: Around, settle: Settle) -> Results:
        weight = torch.randn(SIDE, SIDE, requires_grad=True)
        with around():
            parts = (weight * 2).chunk(2)
            loss = (parts[0].exp() * parts[1].sin()).sum()
            del parts
            settle()
            (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
            settle()
            loss = gradient.square().sum() + loss
        settle()
        loss.backward(retain_graph=True)
        first = weight.grad.clone()  # type: ignore[union-attr]
        settle()
        loss.backward()
        return [gradient, first, weight.grad]

    assert_same_gradients(program, store)
