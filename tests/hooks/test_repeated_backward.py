"""One graph used more than once, several graphs at once, backward in odd places."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch

from tests.conftest import MakeStore
from tests.hooks.programs import MODELS, SIDE, Around, Results, Settle, assert_same_gradients, grads, program_of
from tierstore import ModifiedInPlaceError, TierStore, tiered_offload


@pytest.mark.parametrize("model", MODELS)
def test_retain_graph_three_backwards_same_bits(store: TierStore, model: str) -> None:
    def program(around: Around, settle: Settle) -> Results:
        make, shape = MODELS[model]
        module = make()
        with around():
            loss = module(torch.randn(shape))
        results: Results = []
        for last in (False, False, True):
            settle()
            loss.backward(retain_graph=not last)
            results += [grad if grad is None else grad.clone() for grad in grads(module)]
        return results

    assert_same_gradients(program, store)


@pytest.mark.parametrize("host_bytes", [0, "20KiB", "1GiB"])
def test_double_backward_same_bits(make_store: MakeStore, host_bytes: object) -> None:
    """The gradient of a penalty on gradients; the first backward saves what it unpacks once more."""

    def program(create_inside: bool, around: Around, settle: Settle) -> Results:
        weight = torch.randn(SIDE, SIDE, requires_grad=True)
        batch = torch.randn(SIDE, SIDE, requires_grad=True)
        with around():
            loss = (batch @ weight).tanh().exp().pow(3).mean()
            if create_inside:
                inner = torch.autograd.grad(loss, [weight, batch], create_graph=True)
        settle()
        if not create_inside:
            inner = torch.autograd.grad(loss, [weight, batch], create_graph=True)
        settle()
        penalty = sum((part.square().sum() for part in inner), loss)
        with around():
            third = torch.autograd.grad(penalty, [weight, batch], create_graph=True)
        settle()
        (third[0].sin().sum() + penalty).backward()
        return [*inner, *third, weight.grad, batch.grad]

    store = make_store(host_bytes=host_bytes)
    for create_inside in (True, False):
        assert_same_gradients(partial(program, create_inside), store)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_over_backward_same_bits(store: TierStore) -> None:
    def program(around: Around, settle: Settle) -> Results:
        with torch.autograd.forward_ad.dual_level():
            point = torch.randn(SIDE, SIDE, requires_grad=True)
            dual = torch.autograd.forward_ad.make_dual(point, torch.randn(SIDE, SIDE))
            with around():
                loss = (dual.sin().exp() * dual).sum()
            settle()
            (gradient,) = torch.autograd.grad(loss, dual)
            return list(torch.autograd.forward_ad.unpack_dual(gradient))

    assert_same_gradients(program, store)


def test_vmap_inside_the_scope_same_bits(store: TierStore) -> None:
    def loss(weight: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: (row @ weight).tanh().exp())(torch.randn(SIDE, SIDE)).sum()

    assert_same_gradients(program_of(loss), store)


def test_hooks_on_tensors_and_nodes_same_bits(store: TierStore) -> None:
    def program(around: Around, settle: Settle) -> Results:
        weight, seen = torch.randn(SIDE, SIDE, requires_grad=True), []
        with around():
            hidden = (weight * 3).exp()
            hidden.register_hook(lambda gradient: gradient * 2)
            hidden.retain_grad()
            loss = hidden.tanh().sum()
            loss.grad_fn.register_prehook(lambda gradients: seen.append(gradients[0].clone()))  # type: ignore[union-attr]
        settle()
        loss.backward()
        return [weight.grad, hidden.grad, *seen]

    assert_same_gradients(program, store)


def test_what_double_backward_saves_again_is_not_written_again(store: TierStore) -> None:
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        loss = (weight * 1).sin().sum()  # saves its argument
    store.flush()
    first = store.stats()
    with tiered_offload(store, min_bytes=0):
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)  # saves it again
    store.flush()
    second = store.stats()
    assert second.deduplicated_bytes - first.deduplicated_bytes == first.spilled_bytes
    assert second.spilled_bytes - first.spilled_bytes < first.spilled_bytes / 2
    gradient.square().sum().backward()
    assert weight.grad is not None


def _num_calls(step: Callable[[], object]) -> int:
    """Calls of functions in Python that this thread makes in it."""
    num_calls = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return num_calls


@pytest.mark.usefixtures("unvalidated")
@pytest.mark.parametrize("host_bytes", [0, "64MiB"])
def test_bookkeeping_of_a_tensor_costs_no_more_among_many_nested_graphs(
    make_store: MakeStore, host_bytes: object
) -> None:
    """Each Hessian-vector product goes through the first graph again, and saves once more what that has saved."""

    def products(num_products: int) -> None:
        weights = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
        hidden = torch.randn(8, 8)
        with tiered_offload(store, min_bytes=0):
            for weight in weights:
                hidden = torch.tanh(hidden @ weight)
            gradients = torch.autograd.grad(hidden.square().sum(), weights, create_graph=True)
            total = torch.zeros(())
            for _ in range(num_products):
                direction = torch.stack([(part * torch.randn(8, 8)).sum() for part in gradients]).sum()
                for part in torch.autograd.grad(direction, weights, create_graph=True):
                    total = total + part.square().sum()
        torch.autograd.grad(total, weights)

    store = make_store(host_bytes=host_bytes)

    def calls_for_each(num_products: int) -> float:
        products(num_products)  # what is done in the first step only
        num_before = store.stats().packed_tensors
        num_calls = _num_calls(lambda: products(num_products))
        return num_calls / (store.stats().packed_tensors - num_before)

    assert calls_for_each(16) < 1.3 * calls_for_each(4)


OTHER_COUNTERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "data": lambda values: values.data,
    "unsafe_chunk": lambda values: values.detach().unsafe_chunk(1)[0],
}


@pytest.mark.parametrize("is_stored", [False, True], ids=["plain", "stored"])
@pytest.mark.parametrize("other_counter", OTHER_COUNTERS.values(), ids=OTHER_COUNTERS)
def test_restored_bytes_saved_again_by_another_counter_are_guarded_by_it(
    store: TierStore, other_counter: Callable[[torch.Tensor], torch.Tensor], is_stored: bool
) -> None:
    """They are the record's, so they join it; the edit comes later, and the record's counter tells nothing of it."""

    class Edits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(values)
            return values * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (values,) = ctx.saved_tensors
            same = other_counter(values)
            product = gradient * same
            same.add_(1)
            return product

    def around() -> AbstractContextManager[object]:
        return tiered_offload(store, min_bytes=0) if is_stored else nullcontext()

    weight, factor = torch.randn(SIDE, SIDE, requires_grad=True), torch.randn(SIDE, SIDE, requires_grad=True)
    with around():
        loss = (Edits.apply(weight.exp()) * factor).sum()
    store.flush()
    with around():
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match=rf"shape \[{SIDE}, {SIDE}\]|FloatTensor \[{SIDE}, {SIDE}\]") as refused:
        torch.autograd.grad(gradient.sum(), factor)
    assert isinstance(refused.value, ModifiedInPlaceError) == is_stored
    if is_stored:
        assert store.stats().deduplicated_bytes >= SIDE * SIDE * 4, "it has not joined"


@pytest.mark.parametrize("behind_its_back", [False, True])
def test_restored_bytes_that_a_function_changed_are_saved_as_they_are(
    make_store: MakeStore, behind_its_back: bool
) -> None:
    """Backward overwrites its saved tensor through another counter, which nobody sees, and saves it once more."""
    store = make_store(staging_bytes="64KiB")

    class Overwrites(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(values)
            return values.sin()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (values,) = ctx.saved_tensors
            if behind_its_back:
                values.data.mul_(2)
            return gradient.detach() * values.exp() * values

    def program(around: Around, settle: Settle) -> Results:
        weight = torch.randn(SIDE, SIDE, requires_grad=True)
        with around():
            loss = Overwrites.apply(weight * 1).square().sum()
            settle()
            (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        others = [store.put(torch.zeros(SIDE, SIDE)) for _ in range(8)]  # what was restored leaves memory for them
        settle()
        gradient.square().sum().backward()
        del others
        return [gradient, weight.grad]

    assert_same_gradients(program, store)
