"""Every action on every kind of block: gradients, parameters, buffers and generators as without a plan."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.hooks.programs import assert_same_bits
from tests.memory_plan.blocks import BLOCKS, Chain, Step, actions_of, recorded, step, trained, with_action
from tierstore import TierStore

NAMES = [f"blocks.{number}" for number in range(2)]


def twice(model: nn.Module) -> torch.Tensor:
    return step(model) + step(model)


def under_autocast(model: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return step(model).float() + step(model).float()


def twice_through_a_graph(model: nn.Module) -> torch.Tensor:
    loss = step(model)
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return loss


@pytest.mark.parametrize(
    "take",
    [pytest.param(step, marks=pytest.mark.slow), twice, under_autocast, twice_through_a_graph],
    ids=lambda take: take.__name__,
)
@pytest.mark.parametrize("make", BLOCKS.values(), ids=BLOCKS.keys())
def test_same_bits(store: TierStore, make: Callable[[], nn.Module], take: Step) -> None:
    """Under each action, each from a copy of the model."""
    model = Chain(make)
    calls = recorded(copy.deepcopy(model), NAMES, store, take)
    assert not {call.differs for call in calls} - {""}
    of_first = [call for call in calls if call.name == NAMES[0]]
    buffers = sorted({name for call in calls for name in call.buffers})
    expected = trained(copy.deepcopy(model), take)
    for action in actions_of(of_first, each_output=take is step):
        mine = copy.deepcopy(model)
        with with_action(mine, NAMES, action, buffers, store):
            assert_same_bits(trained(mine, take), expected)
        assert store.stats().live_handles == 0, action
