"""A block is computed again as it was before its forward, whatever the program has done with it since, or not at all.

Each program runs plainly, and with its block computed again. Either the bits are the same, or the error that the case
names is raised. Where plain PyTorch refuses, so does a plan.
"""

from __future__ import annotations

import copy
import enum
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.conftest import MakeStore
from tests.existing import set_existing
from tests.hooks.programs import SIDE, all_bits, assert_same_bits, forget_after_error, grads, in_threads
from tests.memory_plan.blocks import RECOMPUTE, Inner, Normed, planned, the_batch
from tierstore import ModifiedInPlaceError, TierStore
from tierstore.memory_plan.applied import PlannedCalls
from tierstore.memory_plan.decision import Action, BlockPlan, HeldOutput
from tierstore.memory_plan.steps import with_calls

IN_PLACE, BETWEEN = "modified by an inplace operation", "was changed between forward and backward"
ACTIONS = [RECOMPUTE, Action("recompute", (HeldOutput(1, "aten.addmm.default"),), True)]
Take = Callable[[Any, Any], list[Any]]


@pytest.fixture
def store(make_store: MakeStore) -> TierStore:
    """The matrices that an action stores leave memory, each by itself."""
    return make_store(staging_bytes="128KiB")


class Mode(enum.Enum):
    """An option."""

    SIN = 1
    COS = 2


@dataclass
class Options:
    """Options of a block, as users write them."""

    power: int = 2
    mode: Mode = Mode.SIN
    scales: list[float] = field(default_factory=lambda: [1.0, 2.0])


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Block(nn.Module):
    """Computes with every kind of state that a module may have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.Linear(SIDE, SIDE), nn.Parameter(torch.ones(SIDE))
        self.register_buffer("shift", torch.zeros(SIDE))
        self.factor, self.mask, self.options, self.slotted = 1.0, torch.ones(SIDE), Options(), Slotted()
        self.named, self.array, self.number = {"bias": 0.5}, np.ones(SIDE, dtype=np.float32), np.float32(1)
        self.hidden_member = [nn.Linear(SIDE, SIDE)]
        self.activation: Callable[[torch.Tensor], torch.Tensor] = functools.partial(torch.pow, exponent=2)

    def forward(self, batch: torch.Tensor, argument: Any = None) -> torch.Tensor:
        hidden = self.inner(batch * 2) * self.gain * self.factor + self.shift
        hidden = hidden * self.mask * torch.from_numpy(self.array.copy()) * float(self.number) + self.named["bias"]
        hidden = self.hidden_member[0](hidden) * self.options.scales[0] * self.slotted.scale
        if argument is not None:
            hidden = hidden * float(argument["scale"] if isinstance(argument, dict) else argument.scale)
        hidden = hidden.sin() if self.options.mode is Mode.SIN else hidden.cos()
        return self.activation(hidden) ** self.options.power if self.training else hidden.cos()


class Model(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, batch: torch.Tensor, *rest: Any) -> torch.Tensor:
        return self.block(batch * 1.5, *rest)  # type: ignore[no-any-return]


def run_both(make: Callable[[], nn.Module], take: Take, calls: Callable[[], PlannedCalls]) -> tuple[Any, Any]:
    """What a program gives plainly, and with a plan: tensors, or an error."""
    torch.manual_seed(0)
    model = Model(make())
    found: list[Any] = []
    for mine, around in ((copy.deepcopy(model), {}), (model, {"block": calls()})):
        torch.manual_seed(1)
        with with_calls(mine, around):
            try:
                found.append(all_bits(take(mine, mine.block)))
            except RuntimeError as error:
                forget_after_error()
                found.append(error)
    return found[0], found[1]


def calls_of(action: Action, store: TierStore, *buffers: str, evaluates: tuple[str, ...] = ()) -> Any:
    def make() -> PlannedCalls:
        calls = planned(["block"], action, buffers, store)["block"]
        set_existing(calls, _block=BlockPlan("", "", buffers=buffers, evaluates=evaluates))
        return calls

    return make


@pytest.fixture(params=ACTIONS, ids=str)
def action(request: pytest.FixtureRequest) -> Action:
    return request.param  # type: ignore[no-any-return]


# --- what is put back -------------------------------------------------------------------------------------------


def between(change: Callable[[Any], Any]) -> Take:
    """A step in which the block is changed between forward and backward."""

    def take(model: Any, block: Any) -> list[Any]:
        parameters = list(model.parameters())
        loss = model(the_batch()).square().mean()
        change(block)
        loss.backward()
        return [parameter.grad for parameter in parameters]

    return take


def functional(model: Any, _: Any) -> list[Any]:
    other = {name: (value.detach() * 2).requires_grad_() for name, value in model.named_parameters()}
    torch.func.functional_call(model, other, (the_batch(),)).square().mean().backward()
    return [value.grad for value in other.values()]


def two_forwards(change: Callable[[Any, int], Any]) -> Take:
    """The block is changed before each of two forwards; one backward."""

    def take(model: Any, block: Any) -> list[Any]:
        loss = torch.zeros(())
        for number in (1, 2):
            change(block, number)
            loss = loss + model(the_batch()).square().mean()
        loss.backward()
        return grads(model)

    return take


def exchanged_for_good(model: Any, block: Any) -> list[Any]:
    """What was exchanged is the module's own again after backward."""
    parameters, other = list(model.parameters()), nn.Parameter(torch.full((SIDE,), 0.5))
    loss = model(the_batch()).square().mean()
    block.gain, block.factor = other, 3.0
    loss.backward()
    assert block.gain is other
    assert block.factor == 3.0
    return [parameter.grad for parameter in parameters]


def frozen_in_forward(model: Any, block: Any) -> list[Any]:
    batch = the_batch()
    block.gain.requires_grad_(False)
    loss = model(batch).square().mean()
    block.gain.requires_grad_(True)
    loss.backward()
    assert block.gain.requires_grad
    return [batch.grad, *grads(model)]


def frozen_in_backward(model: Any, block: Any) -> list[Any]:
    batch = the_batch()
    loss = model(batch).square().mean()
    block.inner.weight.requires_grad_(False)
    loss.backward()
    assert not block.inner.weight.requires_grad
    return [batch.grad, block.gain.grad]


def hooked_in_forward(model: Any, block: Any) -> list[Any]:
    hook = block.inner.register_forward_pre_hook(lambda _, given: (given[0] * 2,))
    loss = model(the_batch()).square().mean()
    hook.remove()
    loss.backward()
    return grads(model)


PUT_BACK: dict[str, Take] = {
    "functional_call": functional,
    "a buffer exchanged": between(lambda block: setattr(block, "shift", torch.full((SIDE,), 0.5))),
    "a parameter and an attribute exchanged": exchanged_for_good,
    "a member exchanged": between(lambda block: setattr(block, "inner", nn.Linear(SIDE, SIDE))),
    "an attribute deleted": between(lambda block: delattr(block, "factor")),
    "a tensor attribute set": between(lambda block: setattr(block, "mask", torch.full((SIDE,), 0.5))),
    "options exchanged": between(lambda block: setattr(block, "options", Options(power=3))),
    "an array exchanged": between(lambda block: setattr(block, "array", np.zeros(SIDE, dtype=np.float32))),
    "a function exchanged": between(lambda block: setattr(block, "activation", torch.abs)),
    "the mode": between(lambda block: block.eval()),
    "a member's attribute": between(lambda block: setattr(block.inner, "more", 1)),
    "a factor for each forward": two_forwards(lambda block, number: setattr(block, "factor", float(number))),
    "a mask for each forward": two_forwards(lambda block, number: setattr(block, "mask", torch.full((SIDE,), number))),
    "a buffer for each forward": two_forwards(lambda block, number: setattr(block, "shift", torch.ones(SIDE) * number)),
    "a parameter frozen in forward": frozen_in_forward,
    "a parameter frozen in backward": frozen_in_backward,
    "a hook in forward alone": hooked_in_forward,
}


@pytest.mark.parametrize("take", PUT_BACK.values(), ids=PUT_BACK.keys())
def test_what_was_exchanged_is_put_back(store: TierStore, action: Action, take: Take) -> None:
    plain, found = run_both(Block, take, calls_of(action, store))
    assert_same_bits(found, plain)


# --- what is refused ----------------------------------------------------------------------------------------------


def halved(block: Any) -> None:
    with torch.no_grad():
        block.gain.mul_(0.5)


def doubled_in_a_list(block: Any) -> None:
    with torch.no_grad():
        block.hidden_member[0].weight.mul_(2)


def argument_changed(argument: Any, change: Callable[[Any], Any]) -> Take:
    def take(model: Any, _: Any) -> list[Any]:
        mine = copy.deepcopy(argument)
        loss = model(the_batch(), mine).square().mean()
        change(mine)
        loss.backward()
        return grads(model)

    return take


REFUSED: dict[str, tuple[Take, str]] = {
    "a parameter": (between(halved), IN_PLACE),
    "a parameter of a module in a list": (between(doubled_in_a_list), IN_PLACE),
    "a buffer": (between(lambda block: block.shift.add_(1)), IN_PLACE),
    "a tensor attribute": (between(lambda block: block.mask.mul_(2)), IN_PLACE),
    "the data of a parameter": (
        between(lambda block: setattr(block.gain, "data", torch.full((SIDE,), 0.5))),
        f"the data of attribute 'gain' of a Block {BETWEEN}",
    ),
    "a dictionary": (between(lambda block: block.named.update(bias=1.0)), f"attribute 'named' of a Block {BETWEEN}"),
    "a list in an object": (between(lambda block: block.options.scales.reverse()), f"'options' of a Block {BETWEEN}"),
    "an enumeration in an object": (between(lambda block: setattr(block.options, "mode", Mode.COS)), "'options'"),
    "an object with slots": (between(lambda block: setattr(block.slotted, "scale", 2.0)), "'slotted'"),
    "an array": (between(lambda block: block.array.fill(0.5)), f"attribute 'array' of a Block {BETWEEN}"),
    "an argument": (
        argument_changed(SimpleNamespace(scale=1.0), lambda argument: setattr(argument, "scale", 2.0)),
        f"an argument of a Block {BETWEEN}",
    ),
}


@pytest.mark.parametrize(("take", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_was_changed_in_place_is_refused(store: TierStore, action: Action, take: Take, message: str) -> None:
    _, found = run_both(Block, take, calls_of(action, store))
    assert isinstance(found, RuntimeError)
    assert message in str(found)
    assert isinstance(found, ModifiedInPlaceError) == (message == IN_PLACE)


# --- what the block does itself -------------------------------------------------------------------------------------


class Sets(nn.Module):
    """Sets an attribute in forward, and clears it at the end, which a second computation does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.num_calls = nn.Linear(SIDE, SIDE), 0
        self.temporary: torch.Tensor | None = None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        assert self.temporary is None
        self.temporary = batch.mean()
        self.num_calls += 1
        found = (self.inner(batch) * self.temporary).sin()
        self.temporary = None
        return found


class Draws(Inner):
    """Draws from generators of its own, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.of_torch, self.of_python = torch.Generator().manual_seed(5), random.Random(5)
        self.of_numpy, self.old = np.random.default_rng(5), np.random.RandomState(5)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(batch)
        if self.training:
            hidden = hidden * torch.rand(SIDE, generator=self.of_torch) * self.of_python.random()
            hidden = hidden * self.of_numpy.random() * self.old.random_sample()
        return hidden.sin()


def steps(model: Any, block: Any) -> list[Any]:
    found = []
    for _ in range(2):
        model.zero_grad()
        model(the_batch()).square().mean().backward()
        found += [value.clone() for value in (*grads(model), *model.buffers()) if value is not None]
    drawn = [getattr(block, name) for name in ("of_torch", "of_python") if hasattr(block, name)]
    if drawn:
        found += [torch.rand(2, generator=drawn[0]), torch.tensor(drawn[1].random())]
    return [*found, torch.tensor(getattr(block, "num_calls", 0))]


@pytest.mark.parametrize("make", [Sets, Draws], ids=lambda make: make.__name__)
def test_what_forward_sets_and_draws_is_done_once(store: TierStore, action: Action, make: Any) -> None:
    plain, found = run_both(make, steps, calls_of(action, store))
    assert_same_bits(found, plain)


# --- what is not computed again -------------------------------------------------------------------------------------


class Linear(nn.Linear):
    """A class of these tests alone: calls of planned modules change their class."""


def cached_weight(model: Any, block: Any) -> list[Any]:
    batch = the_batch()
    with parametrize.cached():
        found = model(model(batch))
    found.square().mean().backward()
    return [batch.grad, *grads(model)]


@pytest.mark.parametrize(
    ("make", "take", "evaluates"),
    [
        (lambda: parametrizations.weight_norm(Linear(SIDE, SIDE)), cached_weight, ()),
        (Draws, steps, ("",)),
        (Normed, steps, ("", "inner", "norm")),
        (Normed, steps, ()),
    ],
    ids=["weights cached", "draws, planned in eval", "statistics, planned in eval", "statistics, unknown"],
)
def test_block_that_cannot_be_computed_again_as_it_was_is_not(
    store: TierStore, action: Action, make: Any, take: Take, evaluates: tuple[str, ...]
) -> None:
    made: list[PlannedCalls] = []

    def calls() -> PlannedCalls:
        made.append(calls_of(action, store, evaluates=evaluates)())
        return made[0]

    plain, found = run_both(make, take, calls)
    assert_same_bits(found, plain)
    assert made[0].recompute_seconds == 0


# --- several threads ------------------------------------------------------------------------------------------------


def test_backwards_on_two_threads_leave_the_buffers_the_modules_own(store: TierStore, action: Action) -> None:
    torch.manual_seed(0)
    model = Model(Normed())
    buffers = dict(model.named_buffers())
    with with_calls(model, planned(["block"], action, [name.removeprefix("block.") for name in buffers], store)):
        losses = [model(the_batch()).square().mean() for _ in range(8)]
        statistics = all_bits(buffers.values())
        in_threads(*(loss.backward for loss in losses))
    assert all(model.get_buffer(name) is buffer for name, buffer in buffers.items())
    assert all_bits(buffers.values()) == statistics
