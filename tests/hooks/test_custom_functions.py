"""Functions written by users: those that keep, return or overwrite what they saved."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from tests.conftest import MakeStore
from tests.hooks.programs import (
    SIDE,
    Around,
    Results,
    Settle,
    assert_same_gradients,
    bits,
    program_of,
    run_offloaded,
    run_plain,
    sine_chain,
)
from tests.inspect_store import inspect
from tierstore import tiered_offload

WITH_AND_WITHOUT_ROOM = pytest.mark.parametrize("host_bytes", [0, "1GiB"])


class Product(Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right, None, left)
        return left * right

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        left, right, nothing, again = ctx.saved_tensors
        assert nothing is None
        assert torch.equal(left, again)
        return gradient * right, gradient * left


class AddOne(Function):
    """Saves its input, which it has changed in place."""

    @staticmethod
    def forward(ctx: Any, batch: Tensor) -> Tensor:
        ctx.mark_dirty(batch.add_(1))
        ctx.save_for_backward(batch)
        return batch

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


class ReturnFirst(Function):
    """Returns the first of what it saved as the gradient of its first input, as a loss does that computes its own.

    `between`: called when it has asked for that, and before autograd gets it.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, between: Callable[[], object] | None, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        ctx.between = between
        return weight.sum() * 0 + saved[0].sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if ctx.between is not None:
            ctx.between()
        return saved[0], None, *(None for _ in saved)


class ReturnOneOfEach(Function):
    """The gradients are the first of one read of what was saved, and the second of another read."""

    num_reads = 1

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        return left.sum() + right.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        reads = [ctx.saved_tensors for _ in range(ReturnOneOfEach.num_reads)]
        return reads[0][0], reads[-1][1], None, None


class Overwriting(Function):
    """Uses the memory of what it saved for its result."""

    @staticmethod
    def forward(ctx: Any, batch: Tensor) -> Tensor:
        ctx.save_for_backward(batch.cos())
        return batch.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.saved_tensors[0].mul_(gradient)


class OverwritingOneOfTwo(Function):
    """Two saved parts of one storage and one counter; backward overwrites the first."""

    @staticmethod
    def forward(ctx: Any, batch: Tensor) -> Tensor:
        ctx.save_for_backward(*(batch * 2).chunk(2))
        return batch.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        left, right = ctx.saved_tensors
        left.mul_(3)
        return torch.cat([left, right]) * gradient


def _products(weight: Tensor) -> Tensor:
    hidden = weight.exp()
    return Product.apply(hidden, Product.apply(weight, hidden * 2)).sum()


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "saved inputs": _products,
    "dirty input": lambda weight: AddOne.apply(weight * 2).sum(),
    "overwritten once": lambda weight: Overwriting.apply(Overwriting.apply(weight * 2)).sum(),
}


@WITH_AND_WITHOUT_ROOM
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_function_same_bits(make_store: MakeStore, loss: Callable[[Tensor], Tensor], host_bytes: object) -> None:
    assert_same_gradients(program_of(loss), make_store(host_bytes=host_bytes))


@WITH_AND_WITHOUT_ROOM
def test_gradient_is_restored_memory_later_steps_leave_it_alone(make_store: MakeStore, host_bytes: object) -> None:
    """`weight.grad` aliases what was handed out: that memory is not used again while it lives."""
    store = make_store(host_bytes=host_bytes, staging_bytes="128KiB")
    batches = [torch.randn(SIDE, SIDE) for _ in range(12)]
    kept: list[Tensor] = []
    for batch in batches:
        weight = torch.randn(SIDE, SIDE, requires_grad=True)
        with tiered_offload(store, min_bytes=0):
            loss = ReturnFirst.apply(weight, None, batch * 2)
        store.flush()
        loss.backward()
        del loss
        assert weight.grad is not None
        kept.append(weight.grad)
    if host_bytes == 0:
        assert store.stats().lent_bytes == len(batches) * SIDE * SIDE * 4
    for gradient, batch in zip(kept, batches, strict=True):
        assert bits(gradient) == bits(batch * 2)
    del kept, weight, gradient
    assert store.stats().lent_bytes == 0


@pytest.mark.parametrize("is_settled", [True, False])
@pytest.mark.parametrize("is_live", [True, False])
@WITH_AND_WITHOUT_ROOM
def test_saved_tensor_returned_by_two_nodes_gradients_independent(
    make_store: MakeStore, host_bytes: object, is_live: bool, is_settled: bool
) -> None:
    """Accumulating into a gradient must write neither to the other one nor to the batch that was saved."""

    def program(around: Around, settle: Settle) -> Results:
        leaves, batch = [torch.zeros(SIDE, requires_grad=True) for _ in range(2)], torch.ones(SIDE)
        for _ in range(3):
            with around():
                saved = batch if is_live else batch * 2
                loss = sum(ReturnFirst.apply(leaf, None, saved) for leaf in leaves)
                del saved
            if is_settled:
                settle()
            loss.backward()
            leaves[0].grad.mul_(5)
        return [batch, *(leaf.grad for leaf in leaves)]

    assert_same_gradients(program, make_store(host_bytes=host_bytes))


@WITH_AND_WITHOUT_ROOM
def test_saved_twice_and_returned_twice_gradients_independent(make_store: MakeStore, host_bytes: object) -> None:
    """It has left memory in a group, which is gone when autograd gets the two gradients."""
    store = make_store(host_bytes=host_bytes)

    def program(around: Around, settle: Settle) -> Results:
        leaves = [torch.zeros(SIDE, requires_grad=True) for _ in range(3)]
        with around():
            saved = torch.ones(SIDE)
            loss = ReturnOneOfEach.apply(*leaves[:2], saved, saved) + (leaves[2] * torch.ones(SIDE)).sum()
            del saved
        settle()
        num_members.extend(record.num_members for record in inspect(store).records)
        loss.backward()
        leaves[0].grad.mul_(5)
        return [leaf.grad for leaf in leaves]

    num_members: list[int] = []
    assert_same_gradients(program, store)
    assert max(num_members) == 3


@WITH_AND_WITHOUT_ROOM
def test_gradient_that_the_user_keeps_later_backwards_leave_it_alone(make_store: MakeStore, host_bytes: object) -> None:
    """It was handed out while it was only tracked; then what was saved got a record."""

    def program(around: Around, settle: Settle) -> Results:
        leaf = torch.ones(SIDE, requires_grad=True)
        with around():
            loss = ReturnFirst.apply(leaf, None, torch.randn(SIDE))
            kept = torch.autograd.grad(loss, leaf, retain_graph=True)
            sine_chain(leaf, 8)
            settle()
        settle()
        loss.backward()
        (leaf * 2).sum().backward()
        return [*kept, leaf.grad]

    assert_same_gradients(program, make_store(host_bytes=host_bytes))


@pytest.mark.parametrize("num_reads", [1, 2])
def test_saved_tensor_returned_after_its_room_was_taken_same_bits(make_store: MakeStore, num_reads: int) -> None:
    """The second tensor of the node takes the room of the first, which autograd must not take for its own then."""

    def loss(left: Tensor, right: Tensor) -> Tensor:
        ReturnOneOfEach.num_reads = num_reads
        return ReturnOneOfEach.apply(left, right, torch.randn(SIDE * SIDE), torch.randn(SIDE * SIDE))

    shape = (SIDE * SIDE,)
    assert_same_gradients(program_of(loss, shape, shape, num_backwards=4), make_store(staging_bytes=0))


def test_saved_tensor_waits_as_gradient_while_its_room_is_taken_same_bits(make_store: MakeStore) -> None:
    """It passes unchanged through a node that comes after others, which ask for what they saved."""

    def loss(weight: Tensor, other: Tensor) -> Tensor:
        first = weight + 0
        branch = other.sin().exp().sin().sum()
        return ReturnFirst.apply(first, None, torch.randn(SIDE * SIDE)) + branch

    shape = (SIDE * SIDE,)
    assert_same_gradients(program_of(loss, shape, shape, num_backwards=4), make_store(staging_bytes=0))


@WITH_AND_WITHOUT_ROOM
def test_saved_tensor_returned_after_the_store_was_flushed_same_bits(make_store: MakeStore, host_bytes: object) -> None:
    """A tensor that is only tracked is registered then. What keeps it must keep what autograd was given."""
    store = make_store(host_bytes=host_bytes)

    def program(around: Around, settle: Settle) -> Results:
        def loss(weight: Tensor) -> Tensor:
            return ReturnFirst.apply(weight, store.flush, torch.randn(SIDE))

        return list(program_of(loss, (SIDE,), num_backwards=4)(around, lambda: None))

    assert_same_gradients(program, store)


def test_what_was_outstanding_comes_back_when_nobody_uses_it(make_store: MakeStore) -> None:
    store = make_store(staging_bytes=0)
    weight = torch.randn(SIDE * SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        loss = ReturnFirst.apply(weight, None, torch.randn(SIDE * SIDE), torch.randn(SIDE * SIDE))
    store.flush()
    loss.backward(retain_graph=True)
    first, second = loss.grad_fn.saved_tensors
    nbytes = first.untyped_storage().nbytes()
    assert store.stats().lent_bytes == nbytes
    del first
    assert store.stats().lent_bytes == 0
    first, second = loss.grad_fn.saved_tensors
    del loss, second
    assert store.stats().lent_bytes == nbytes
    del first
    assert store.stats().lent_bytes == 0


@pytest.mark.parametrize("kind", [Overwriting, OverwritingOneOfTwo])
@WITH_AND_WITHOUT_ROOM
def test_overwriting_what_was_saved_second_backward_raises_as_plain(
    make_store: MakeStore, kind: type[Function], host_bytes: object
) -> None:
    store = make_store(host_bytes=host_bytes)

    def program(around: Around, settle: Settle) -> Results:
        weight = torch.randn(SIDE, SIDE, requires_grad=True)
        with around():
            loss = kind.apply(weight * 2).sum()
        settle()
        results = [torch.autograd.grad(loss, weight, retain_graph=True)[0].clone()]
        settle()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return results

    assert run_offloaded(program, store) == run_plain(program)
