"""Steps that leave no trace, and what is measured in them."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.hooks.programs import SIDE, all_bits, forget_after_error, grads
from tests.memory_plan.blocks import KEEP, RECOMPUTE, Chain, Mlp, Normed, planned, step, the_batch
from tierstore import ConfigError, TierStore
from tierstore.hooks.in_place import around_calls_of
from tierstore.memory_plan.decision import Action
from tierstore.memory_plan.meter import ResidentMeter
from tierstore.memory_plan.steps import Steps, StepTimeline

NAMES = ["blocks.0", "blocks.1"]


class Drawing(nn.Module):
    """Draws from every kind of generator, and replaces a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Normed()
        self.own, self.own_python, self.own_numpy = torch.Generator(), random.Random(1), np.random.default_rng(1)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("nothing", None)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, batch.detach().mean().view(1)])
        self.nothing = batch.detach()
        self.inner.eval()
        noise = torch.rand(SIDE, generator=self.own) + self.own_python.random() + self.own_numpy.random()
        return self.inner(batch * noise * torch.rand(SIDE)) * random.random() * np.random.rand()


def state_of(model: Any) -> list[Any]:
    """All that a step may change."""
    draws = []
    for block in model.blocks:
        states = block.own.get_state(), block.own_python.getstate(), block.own_numpy.bit_generator.state
        draws.append((bytes(states[0].numpy()), *states[1:], block.inner.training, block.nothing, block.seen.shape))
    generators = bytes(torch.get_rng_state().numpy()), random.getstate(), str(np.random.get_state())
    arounds = [around_calls_of(module) for module in model.modules()]
    return [all_bits(model.state_dict().values()), all_bits(grads(model)), draws, generators, arounds]


def interrupted(model: nn.Module) -> torch.Tensor:
    step(model)
    raise KeyboardInterrupt


def in_backward(model: nn.Module) -> torch.Tensor:
    loss = step(model) * 1

    def fail(_: object) -> None:
        raise ValueError("in backward")

    loss.register_hook(fail)
    return loss


@pytest.mark.parametrize(
    ("run", "error"),
    [(step, None), (interrupted, KeyboardInterrupt), (in_backward, ValueError)],
    ids=["step", "interrupt", "error in backward"],
)
def test_step_leaves_everything_as_found(
    store: TierStore, run: Callable[[nn.Module], torch.Tensor], error: type[BaseException] | None
) -> None:
    model = Chain(Drawing)
    gradients = [torch.rand_like(parameter) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    buffers = list(model.buffers())
    before = state_of(model)
    steps = Steps(model, lambda: run(model), ResidentMeter())
    around = planned(NAMES, RECOMPUTE, [], store)
    for has_backward in (True, False):
        if error is None or (error is ValueError and not has_backward):
            measured = steps.take({} if has_backward else around, has_backward=has_backward)
            assert measured.seconds > 0
            assert measured.peak_bytes > 2**20
        else:
            with pytest.raises(error):
                steps.take({}, has_backward=has_backward)
            forget_after_error()
        assert state_of(model) == before
        assert [parameter.grad is gradient for parameter, gradient in zip(model.parameters(), gradients, strict=True)]
        assert all(one is other for one, other in zip(model.buffers(), buffers, strict=True))


class WithLeaves(nn.Module):
    """Leaves of every kind: weights of the model and of a head beside it, a prompt, and the batch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain(Mlp)
        self.prompt = torch.randn(SIDE, requires_grad=True)
        self.head, self.unused = [nn.Linear(SIDE, 1)], [nn.Linear(SIDE, 1)]  # in lists: no members
        self.batch = the_batch()

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [*self.parameters(), self.prompt, *self.head[0].parameters(), *self.unused[0].parameters(), self.batch]

    def forward(self, prompt: torch.Tensor) -> torch.Tensor:
        return self.head[0](self.chain(self.batch + prompt)).square().mean()  # type: ignore[no-any-return]


class FailsInBackward(torch.autograd.Function):
    """Fails when all other gradients are there."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("in backward")


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("action", [None, RECOMPUTE], ids=str)
def test_leaves_outside_of_the_model_keep_their_gradients(
    store: TierStore, action: Action | None, fails: bool, has_gradients: bool
) -> None:
    model = WithLeaves()
    gradients = [torch.rand_like(leaf) if has_gradients else None for leaf in model.leaves]
    for leaf, gradient in zip(model.leaves, gradients, strict=True):
        leaf.grad = gradient
    reached = []
    model.head[0].weight.register_hook(lambda _: reached.append("head"))  # type: ignore[no-untyped-call]

    def run() -> torch.Tensor:
        prompt = model.prompt * 1
        return model(FailsInBackward.apply(prompt) if fails else prompt)  # type: ignore[no-any-return]

    around = {} if action is None else planned([f"chain.{name}" for name in NAMES], action, [], store)
    with pytest.raises(ValueError, match="in backward") if fails else nullcontext():
        Steps(model, run, ResidentMeter()).take(around)
    if fails:
        forget_after_error()
    assert reached
    assert all(leaf.grad is gradient for leaf, gradient in zip(model.leaves, gradients, strict=True))


@pytest.mark.parametrize("is_of_model", [True, False])
def test_leaf_whose_gradient_is_used_at_once_refused(is_of_model: bool) -> None:
    """An optimizer would train the model while it is planned."""
    model = WithLeaves()
    leaf = model.chain.blocks[0].first.weight if is_of_model else model.prompt
    optimizer = torch.optim.SGD([leaf], lr=0.1)
    hook = leaf.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    before = all_bits(model.leaves)
    with pytest.raises(ConfigError, match="before register_post_accumulate_grad_hook") as caught:
        Steps(model, lambda: model(model.prompt), ResidentMeter()).take({})
    assert ("first.weight" in str(caught.value)) == is_of_model
    assert all_bits(model.leaves) == before
    hook.remove()
    Steps(model, lambda: model(model.prompt), ResidentMeter()).take({})
    assert all_bits(model.leaves) == before
    loss = torch.ones((), requires_grad=True)
    Steps(model, lambda: loss, ResidentMeter()).take({})
    assert loss.grad is None


@pytest.mark.parametrize("loss", [None, 1.0, torch.zeros(2, requires_grad=True), torch.zeros(())], ids=str)
def test_run_that_gives_no_loss_refused(loss: object) -> None:
    with pytest.raises(ConfigError, match=r"run=.*computes the loss"):
        Steps(Chain(Mlp), lambda: loss, ResidentMeter()).take({})  # type: ignore[arg-type, return-value]


class CountingMeter(ResidentMeter):
    """Peaks are given in advance."""

    def __init__(self, peaks: list[int]) -> None:
        super().__init__()
        self.peaks = peaks

    def peak(self) -> int:
        return self.peaks.pop(0)

    def reset(self) -> None:
        pass


def test_timeline_calls_with_gradients_in_order_and_peaks_of_each(store: TierStore) -> None:
    """One moment for each call in forward, then one for each in backward, of what is left without the store's own."""
    meter = CountingMeter([100, 110, 120, 130, 140, 150, 160, 170, 999, 180])  # the last but one is the whole step's
    tidied: list[None] = []
    model, timeline = Chain(Mlp), StepTimeline(meter, lambda: tidied.append(None), lambda: 1)

    def run() -> torch.Tensor:
        with torch.no_grad():
            step(model)
        return step(model) + step(model)

    around = {name: timeline.around(name, calls) for name, calls in planned(NAMES, RECOMPUTE, [], store).items()}
    with timeline:
        Steps(model, run, meter).take(around)
    assert (timeline.names, timeline.order, timeline.first_bytes) == (NAMES * 2, [3, 2, 1, 0], 99)
    assert timeline.forward_bytes == {0: 109, 1: 119, 2: 129, 3: 139}
    assert timeline.backward_bytes == {3: 149, 2: 159, 1: 169, 0: 179}
    assert len(tidied) == 9


class GivesLeaves(nn.Module):
    """Returns a leaf and, the same each time, a tensor with a history."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.shared = Mlp(), torch.ones(SIDE, requires_grad=True) * 2

    def forward(self, batch: torch.Tensor) -> Any:
        return self.inner(batch), self.inner.last.bias, self.shared


@pytest.mark.parametrize("fails", [False, True])
def test_timeline_leaves_no_hooks_on_what_a_block_returns(store: TierStore, fails: bool) -> None:
    model, timeline = GivesLeaves(), StepTimeline(ResidentMeter(), lambda: None, lambda: 0)
    begun: list[int] = []

    def run() -> torch.Tensor:
        result, leaf, shared = model(the_batch())
        begun.append(len(shared._backward_hooks))
        if fails:
            raise KeyboardInterrupt
        return (result + leaf + shared).sum()  # type: ignore[no-any-return]

    around = {"": timeline.around("", planned([""], KEEP, [], store)[""])}
    with pytest.raises(KeyboardInterrupt) if fails else nullcontext(), timeline:
        Steps(model, run, ResidentMeter()).take(around)
    if fails:
        forget_after_error()
    assert begun == [1]
    assert timeline.order == ([] if fails else [0])
    assert not model.inner.last.bias._backward_hooks
    assert not model.shared._backward_hooks
