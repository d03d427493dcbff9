"""Outputs that a selective checkpoint holds, and that the program changes later."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, noop_context_fn

from tests.conftest import MakeStore
from tests.hooks.programs import SIDE, DispatchMode, bits
from tierstore import TierStore, selective_checkpoint_contexts, tiered_offload

ATEN = torch.ops.aten
SAVE, OFFLOAD = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_CPU_OFFLOAD
each_decision = pytest.mark.parametrize("decision", [OFFLOAD, SAVE], ids=str)


def through_a_view(batch: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hidden = batch @ weight
    one, other = hidden.view(-1), hidden.view(-1)
    hidden.view(-1).mul_(2)
    return (one.sin() * other.cos()).sin()


def in_place(batch: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hidden = batch @ weight
    hidden.mul_(2)
    return hidden.sin().sin()


def through_hidden_views(batch: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hidden = batch @ weight
    one, other = (ATEN._unsafe_view(hidden, [-1]) for _ in range(2))
    hidden.detach().mul_(2)
    return (one.sin() * other.cos()).sin()


def through_a_hidden_view(batch: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product of more than two dimensions is `_unsafe_view` of `mm`."""
    hidden = batch.view(2, -1, SIDE) @ weight
    hidden.mul_(2)
    return hidden.sin().sin()


def by_an_argument_out(batch: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hidden = batch @ weight
    torch.mul(hidden.detach(), 2, out=hidden.detach())
    return hidden.sin().sin()


CHANGED = {
    "a view": (through_a_view, ATEN.view.default),
    "what lies under a view": (through_a_view, ATEN.mm.default),
    "a result in place": (in_place, ATEN.mul_.Tensor),
    "what is changed in place": (in_place, ATEN.mm.default),
    "a hidden view": (through_a_hidden_view, ATEN._unsafe_view.default),
    "several hidden views": (through_hidden_views, ATEN._unsafe_view.default),
    "what lies under a hidden view": (through_a_hidden_view, ATEN.mm.default),
    "what is written to": (by_an_argument_out, ATEN.mm.default),
}


@each_decision
@pytest.mark.parametrize(("forward", "operator"), CHANGED.values(), ids=CHANGED.keys())
def test_output_that_the_region_changes_is_computed_again(
    store: TierStore, forward: Callable[..., torch.Tensor], operator: object, decision: CheckpointPolicy
) -> None:
    """The policy wants it held. Backward would get it back changed, and change it again."""
    asked = []

    def policy(context: object, other: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        asked.append(other)
        return decision if other is operator else CheckpointPolicy.PREFER_RECOMPUTE

    batch, weight = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE, requires_grad=True)
    (plain,) = torch.autograd.grad(forward(batch, weight).sum(), [weight])
    contexts = functools.partial(selective_checkpoint_contexts, policy)
    with tiered_offload(store, min_bytes=0):
        loss = checkpoint(forward, batch, weight, use_reentrant=False, context_fn=contexts).sum()
    (gradient,) = torch.autograd.grad(loss, [weight])
    assert operator in asked
    assert bits(gradient) == bits(plain)


class Layer(nn.Module):
    """Gives the layer's result, and what is computed from it; may change the result before that."""

    def __init__(self, *, changes: bool = False) -> None:
        super().__init__()
        self.layer, self.changes = nn.Linear(SIDE, SIDE, bias=False), changes

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.layer(batch)
        if self.changes:
            hidden.mul_(2)
        return hidden, hidden.sin().sin()


def gradient_of(
    module: Layer, store: TierStore, decision: CheckpointPolicy | None, change: Callable[[torch.Tensor], object]
) -> tuple[torch.Tensor, int]:
    """The gradient of the weight, and how many products backward computes. `change`: of the layer's result."""

    def policy(context: object, operator: object, *args: object, **kwargs: object) -> object:
        return decision if operator is ATEN.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    batch = torch.randn(2, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    context_fn = functools.partial(selective_checkpoint_contexts, policy) if decision else noop_context_fn
    with tiered_offload(store, min_bytes=0):
        hidden, result = checkpoint(module, batch, use_reentrant=False, context_fn=context_fn)
    with torch.no_grad():
        change(hidden)
    seen: list[object] = []
    with DispatchMode(seen.append):  # a replay around which it is passes on no others
        (gradient,) = torch.autograd.grad(result.sum(), [module.layer.weight])
    return gradient, seen.count(ATEN.mm.default)


@each_decision
def test_product_of_a_layer_without_bias_is_not_computed_again(store: TierStore, decision: CheckpointPolicy) -> None:
    """Its result is a hidden view of the product."""
    module = Layer()
    again, num_again = gradient_of(module, store, None, lambda _: store.flush())
    held, num_held = gradient_of(module, store, decision, lambda _: store.flush())
    assert num_held == num_again - 1
    assert bits(held) == bits(again)


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "the result": lambda hidden: hidden.mul_(2),
    "a view of the result": lambda hidden: hidden.view(-1)[3:].zero_(),
    "the result's alias": lambda hidden: hidden.detach().mul_(2),
    "in the region": lambda hidden: None,
}


@each_decision
@pytest.mark.parametrize("name", CHANGES)
def test_product_of_a_layer_that_is_changed_is_computed_again(
    make_store: MakeStore, decision: CheckpointPolicy, name: str
) -> None:
    """The view has a version counter of its own, so that of the product does not tell."""
    module, store = Layer(changes=name == "in the region"), make_store(host_bytes=0)
    again, num_again = gradient_of(module, store, None, lambda _: None)
    for settle in (lambda: None, store.flush):
        held, num_held = gradient_of(module, store, decision, lambda hidden: (settle(), CHANGES[name](hidden)))  # noqa: B023
        assert num_held == num_again
        assert bits(held) == bits(again)
