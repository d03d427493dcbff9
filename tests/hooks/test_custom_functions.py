"""Functions written by users: those that keep, return or overwrite what they saved."""

from typing import Any

import pytest
import torch
from torch.autograd import Function

from tests.conftest import MakeStore
from tests.hooks.programs import SIDE, Around, Results, Settle, assert_same_gradients, bits, run_offloaded, run_plain
from tierstore import TierStore, tiered_offload


class Product(Function):
    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(left, right, None, left)
        return left * right

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right, nothing, again = ctx.saved_tensors
        assert nothing is None
        assert torch.equal(left, again)
        return gradient * right, gradient * left


class FusedLoss(Function):
    """Computes its gradient in forward, saves it, and returns it in backward as it is."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(batch * 2)
        return (weight * batch).sum() * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0], None


class ReturnSaved(Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(saved)
        return weight.sum() * 0 + saved.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0], None


class Overwriting(Function):
    """Uses the memory of what it saved for its result."""

    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor) -> torch.Tensor:
        saved = batch.cos()
        ctx.save_for_backward(saved)
        return batch.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (saved,) = ctx.saved_tensors
        return saved.mul_(gradient)


class OverwritingOneOfTwo(Function):
    """Two saved parts of one storage and one counter; backward overwrites the first."""

    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor) -> torch.Tensor:
        left, right = (batch * 2).chunk(2)
        ctx.save_for_backward(left, right)
        return batch.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        left, right = ctx.saved_tensors
        left.mul_(3)
        return torch.cat([left, right]) * gradient


@pytest.mark.parametrize("host_bytes", [0, "1GiB"])
def test_function_with_saved_inputs_same_bits(make_store: MakeStore, host_bytes: object) -> None:
    def program(around: Around, settle: Settle) -> Results:
        weight = torch.randn(SIDE, SIDE, requires_grad=True)
        with around():
            hidden = weight.exp()
            loss = Product.apply(hidden, Product.apply(weight, hidden * 2)).sum()
        del hidden
        settle()
        loss.backward()
        return [weight.grad]

    assert_same_gradients(program, make_store(host_bytes=host_bytes))


@pytest.mark.parametrize("host_bytes", [0, "1GiB"])
def test_gradient_is_restored_memory_later_steps_leave_it_alone(make_store: MakeStore, host_bytes: object) -> None:
    """`weight.grad` aliases what was handed out: that memory is not used again while it lives."""
    store = make_store(host_bytes=host_bytes, staging_bytes="128KiB")
    batches = [torch.randn(SIDE, SIDE) for _ in range(12)]
    kept: list[torch.Tensor] = []
    for batch in batches:
        weight = torch.randn(SIDE, SIDE, requires_grad=True)
        with tiered_offload(store, min_bytes=0):
            loss = FusedLoss.apply(weight, batch)
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


def test_saved_input_returned_as_gradient_live_input_not_changed(store: TierStore) -> None:
    """Accumulating into the gradient must not write to the batch that was saved."""

    def program(around: Around, settle: Settle) -> Results:
        weight, batch = torch.zeros(SIDE, requires_grad=True), torch.ones(SIDE)
        for _ in range(3):
            with around():
                loss = ReturnSaved.apply(weight, batch)
            settle()
            loss.backward()
        return [weight.grad, batch]

    assert_same_gradients(program, store)


def test_saved_tensor_returned_by_two_nodes_gradients_independent(store: TierStore) -> None:
    def program(around: Around, settle: Settle) -> Results:
        first, second = torch.zeros(SIDE, requires_grad=True), torch.zeros(SIDE, requires_grad=True)
        with around():
            hidden = torch.ones(SIDE) * 2
            loss = ReturnSaved.apply(first, hidden) + ReturnSaved.apply(second, hidden)
        del hidden
        settle()
        loss.backward()
        assert first.grad is not None
        first.grad.mul_(5)
        return [first.grad, second.grad]

    assert_same_gradients(program, store)


class ReturnFirstOfTwo(Function):
    """What it returns was saved before another tensor, which it asks for too."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(first, second)
        return (weight * first).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.saved_tensors[0], None, None


@pytest.mark.parametrize("num_reads", [1, 2])
def test_saved_tensor_returned_after_its_room_was_taken_same_bits(make_store: MakeStore, num_reads: int) -> None:
    """The second tensor of the node takes the room of the first, which autograd must not take for its own then."""

    class ReturnSome(Function):
        @staticmethod
        def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor, *saved: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*saved)
            return left.sum() + right.sum()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            reads = [ctx.saved_tensors for _ in range(num_reads)]
            return reads[0][0], reads[-1][1], None, None

    def program(around: Around, settle: Settle) -> Results:
        leaves = [torch.randn(SIDE * SIDE, requires_grad=True) for _ in range(2)]
        with around():
            saved = torch.randn(SIDE * SIDE), torch.randn(SIDE * SIDE)
            loss = ReturnSome.apply(*leaves, *saved)
        del saved
        results: Results = []
        for _ in range(4):
            settle()
            loss.backward(retain_graph=True)
            results += [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
        return results

    assert_same_gradients(program, make_store(staging_bytes=0))


def test_saved_tensor_waits_as_gradient_while_its_room_is_taken_same_bits(make_store: MakeStore) -> None:
    """It passes unchanged through a node that comes after others, which ask for what they saved."""

    def program(around: Around, settle: Settle) -> Results:
        weight, other = torch.randn(SIDE * SIDE, requires_grad=True), torch.randn(SIDE * SIDE, requires_grad=True)
        with around():
            first = weight + 0
            branch = other.sin().exp().sin().sum()
            loss = FusedLoss.apply(first, torch.randn(SIDE * SIDE)) + branch
        del first, branch
        results: Results = []
        for _ in range(4):
            settle()
            loss.backward(retain_graph=True)
            results.append(None if weight.grad is None else weight.grad.clone())
        return results

    assert_same_gradients(program, make_store(staging_bytes=0))


@pytest.mark.parametrize("host_bytes", [0, "1GiB"])
def test_saved_tensor_returned_after_the_store_was_flushed_same_bits(make_store: MakeStore, host_bytes: object) -> None:
    """A tensor that is only noted is booked then: what keeps it from then on must keep what autograd was given."""
    store = make_store(host_bytes=host_bytes)

    class Flushing(FusedLoss):
        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            (saved,) = ctx.saved_tensors
            store.flush()
            return saved, None

    def program(around: Around, settle: Settle) -> Results:
        weight = torch.randn(SIDE, requires_grad=True)
        with around():
            loss = Flushing.apply(weight, torch.randn(SIDE))
        results: Results = []
        for _ in range(4):
            loss.backward(retain_graph=True)
            results.append(None if weight.grad is None else weight.grad.clone())
        return results

    assert_same_gradients(program, store)


def test_what_was_lent_comes_back_when_nobody_uses_it(make_store: MakeStore) -> None:
    store = make_store(staging_bytes=0)
    weight = torch.randn(SIDE * SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        loss = ReturnFirstOfTwo.apply(weight, torch.randn(SIDE * SIDE), torch.randn(SIDE * SIDE))
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


def test_overwriting_what_was_saved_once_same_bits(store: TierStore) -> None:
    def program(around: Around, settle: Settle) -> Results:
        weight = torch.randn(SIDE, SIDE, requires_grad=True)
        with around():
            loss = Overwriting.apply(Overwriting.apply(weight * 2)).sum()
        settle()
        loss.backward()
        return [weight.grad]

    assert_same_gradients(program, store)


@pytest.mark.parametrize("kind", [Overwriting, OverwritingOneOfTwo])
@pytest.mark.parametrize("host_bytes", [0, "1GiB"])
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


def test_dirty_input_saved_same_bits(store: TierStore) -> None:
    class AddOne(Function):
        @staticmethod
        def forward(ctx: Any, batch: torch.Tensor) -> torch.Tensor:
            batch.add_(1)
            ctx.mark_dirty(batch)
            ctx.save_for_backward(batch)
            return batch

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * ctx.saved_tensors[0]

    def program(around: Around, settle: Settle) -> Results:
        weight = torch.randn(SIDE, SIDE, requires_grad=True)
        with around():
            loss = AddOne.apply(weight * 2).sum()
        settle()
        loss.backward()
        return [weight.grad]

    assert_same_gradients(program, store)
