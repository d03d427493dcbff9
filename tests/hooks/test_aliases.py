"""Views of one storage: stored once where that is right, apart where it would not be."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.conftest import MakeStore
from tests.hooks.programs import (
    SIDE,
    Around,
    Results,
    Settle,
    assert_same_bits,
    assert_same_gradients,
    run_offloaded,
    run_plain,
)
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


@pytest.mark.parametrize("host_bytes", [0, "1GiB"])
def test_rows_of_a_workspace_saved_and_overwritten_in_turn_same_bits(make_store: MakeStore, host_bytes: object) -> None:
    """Every row is saved through `.data`, with a counter of its own, then the next row is written."""

    def program(around: Around, settle: Settle) -> Results:
        weight, workspace = torch.randn(SIDE, requires_grad=True), torch.empty(4, SIDE)
        with around():
            terms = []
            for row in workspace.data:
                row.data.copy_(torch.randn(SIDE))
                terms.append((weight * row.data).sum())
                terms.append((weight * workspace.data[0]).sin().sum())
            loss = torch.stack(terms).sum()
        del workspace, row
        settle()
        loss.backward()
        return [weight.grad]

    assert_same_gradients(program, make_store(host_bytes=host_bytes))


def test_rows_of_a_numpy_workspace_same_bits(store: TierStore) -> None:
    def program(around: Around, settle: Settle) -> Results:
        weight = torch.randn(SIDE, requires_grad=True)
        workspace = np.zeros((4, SIDE), dtype=np.float32)
        with around():
            terms = []
            for number in range(4):
                workspace[number] = torch.randn(SIDE).numpy()
                terms.append((weight * torch.from_numpy(workspace[number])).sum())
                terms.append((weight * torch.from_numpy(workspace)).sin().sum())
            loss = torch.stack(terms).sum()
        settle()
        loss.backward()
        return [weight.grad]

    assert_same_gradients(program, store)


@pytest.mark.parametrize("make", ["from_numpy", "frombuffer", "dlpack"])
def test_foreign_memory_changed_by_its_owner_as_plain(store: TierStore, make: str) -> None:
    """The memory is not torch's: plain autograd sees its owner's changes, and takes no offence."""

    def program(around: Around, settle: Settle) -> Results:
        weight, workspace = torch.ones(SIDE, requires_grad=True), np.ones(SIDE, dtype=np.float32)
        with around():
            batch = {
                "from_numpy": torch.from_numpy,
                "frombuffer": lambda array: torch.frombuffer(array, dtype=torch.float32),
                "dlpack": torch.from_dlpack,
            }[make](workspace)
            loss = (weight * batch).sum()
        del batch
        settle()
        workspace[:] = 7
        loss.backward()
        return [weight.grad]

    assert_same_bits(run_offloaded(program, store), run_plain(program))


def test_shared_memory_changed_elsewhere_as_plain(store: TierStore) -> None:
    def program(around: Around, settle: Settle) -> Results:
        weight, shared = torch.ones(SIDE, requires_grad=True), torch.ones(SIDE).share_memory_()
        other = shared.numpy()
        with around():
            loss = (weight * shared).sum()
        del shared
        settle()
        other[:] = 7
        loss.backward()
        return [weight.grad]

    assert_same_bits(run_offloaded(program, store), run_plain(program))


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


def test_many_geometries_of_one_base_same_bits(store: TierStore) -> None:
    def program(around: Around, settle: Settle) -> Results:
        weight = torch.randn(8, 8, dtype=torch.float32, requires_grad=True)
        with around():
            base = torch.randn(16, 8)
            views = [
                base[4:12], base[::2], base[:8].t(), base[3:4].expand(8, 8), base.view(8, 16)[:, 1::2],
                base.as_strided((8, 8), (3, 1), 5), base.view(-1)[8:72].view(8, 8), base.unfold(0, 8, 1)[0],
                base.view(torch.complex64)[:8, :4].repeat(1, 2).real, base.view(torch.int32)[8:],
            ]  # fmt: skip
            loss = torch.stack([(weight * view).sin().sum() for view in views]).sum()
            del base, views
        settle()
        loss.backward()
        return [weight.grad]

    assert_same_gradients(program, store)


def test_views_of_other_dtypes_of_a_storage_with_an_odd_end_same_bits(store: TierStore) -> None:
    """The record is made by a complex view; the base has one float more than that can reach."""

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, *saved):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(*saved)
            return weight.sum()

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            total = sum(float(saved.abs().double().sum()) for saved in ctx.saved_tensors)
            return gradient * total, None, None, None, None

    def program(around: Around, settle: Settle) -> Results:
        weight = torch.zeros((), requires_grad=True)
        with around():
            base = torch.randn(2 * SIDE + 1)
            pairs = base[:-1].view(torch.complex64)
            loss = Saves.apply(weight, pairs, base, base.view(torch.int32), pairs[3:].conj())
            del base, pairs
        settle()
        loss.backward()
        return [weight.grad]

    assert_same_gradients(program, store)


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


def test_copy_on_write_clone_saved_original_edited_same_bits(store: TierStore) -> None:
    def program(around: Around, settle: Settle) -> Results:
        weight, batch = torch.randn(SIDE, requires_grad=True), torch.randn(SIDE)
        with around():
            loss = (weight * torch._lazy_clone(batch)).sum()
            batch.zero_()
        settle()
        batch.fill_(3)
        loss.backward()
        return [weight.grad, batch]

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
