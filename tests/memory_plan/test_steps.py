"""Steps that leave no trace, and what is measured in them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.hooks.programs import SIDE, all_bits, forget_after_error, grads
from tests.memory_plan.blocks import RECOMPUTE, Chain, Mlp, Normed, planned, step
from tierstore import ConfigError, TierStore
from tierstore.hooks.in_place import around_calls_of
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


def test_timeline_calls_in_order_and_peaks_of_each(store: TierStore) -> None:
    """One moment for each call in forward, then one for each in backward, of what is left without the store's own."""
    meter = CountingMeter([100, 110, 120, 130, 140, 150])  # the fifth is the whole step's
    tidied: list[None] = []
    timeline = StepTimeline(meter, lambda: tidied.append(None), lambda: 1)
    model = Chain(Mlp)
    around = {name: timeline.around(name, calls) for name, calls in planned(NAMES, RECOMPUTE, [], store).items()}
    Steps(model, lambda: step(model), meter).take(around, timeline=timeline)
    assert timeline.names == NAMES
    assert timeline.order == [1, 0]
    assert timeline.first_bytes == 99
    assert timeline.forward_bytes == {0: 109, 1: 119}
    assert timeline.backward_bytes == {1: 129, 0: 149}
    assert len(tidied) == 5


def test_timeline_leaves_out_calls_without_gradients_and_nested_ones(store: TierStore) -> None:
    timeline = StepTimeline(ResidentMeter(), lambda: None, lambda: 0)
    model = Chain(Mlp)

    def run() -> torch.Tensor:
        with torch.no_grad():
            step(model)
        return step(model) + step(model)

    around = {name: timeline.around(name, calls) for name, calls in planned(NAMES, RECOMPUTE, [], store).items()}
    Steps(model, run, ResidentMeter()).take(around, timeline=timeline)
    assert timeline.names == NAMES * 2
    assert sorted(timeline.order) == [0, 1, 2, 3]
    assert timeline.forward_bytes.keys() == timeline.backward_bytes.keys() == {0, 1, 2, 3}
