"""What planning finds out about the calls of a block."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that everybody uses

from tests.hooks.programs import SIDE
from tests.memory_plan.blocks import Chain, Inner, Mlp, recorded, step
from tierstore import TierStore
from tierstore.memory_plan.recording import RecordedCall
from tierstore.tensors.layout import is_foreign

MATRIX_BYTES = SIDE * SIDE * 4


class Block(Inner):
    """Does what the test says, with a generator, a list and a counter of its own."""

    def __init__(self, compute: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.own, self.cache = torch.Generator(), []
        self.own_python, self.own_numpy = random.Random(1), np.random.default_rng(1)
        self.num_calls = 0
        self.register_buffer("mean", torch.zeros(SIDE))
        self.compute = compute

    def forward(self, batch: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        return self.compute(self, self.inner(batch), *rest, **named)


def only_call(compute: Callable[..., torch.Tensor], store: TierStore, take: Any = step) -> RecordedCall:
    torch.manual_seed(0)
    calls = recorded(Chain(lambda: Block(compute), 1), ["blocks.0"], store, take)
    assert len(calls) == 1
    return calls[0]


def counts(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    block.num_calls += 1
    return hidden.sin()


def appends(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    block.cache.append(hidden.mean())
    return hidden.sin()


def remembers(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    block.last = hidden.detach()
    return hidden.sin()


CACHE: list[torch.Tensor] = []


def reads_a_cache(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    CACHE.append(hidden.detach())
    return hidden.sin() * len(CACHE)


def fails_twice(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    if CACHE:
        raise ValueError("no second call")
    CACHE.append(hidden)
    return hidden.sin()


DIFFERING: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "appends to a list": (appends, "changes its module, or its arguments, in place"),
    "a cache elsewhere": (reads_a_cache, "other bits"),
    "a second call fails": (fails_twice, "a second call failed: ValueError"),
}


@pytest.fixture(autouse=True)
def _empty_cache() -> None:
    CACHE.clear()


@pytest.mark.parametrize(("compute", "reason"), DIFFERING.values(), ids=DIFFERING.keys())
def test_block_that_cannot_be_repeated_is_found(
    store: TierStore, compute: Callable[..., torch.Tensor], reason: str
) -> None:
    assert reason in only_call(compute, store).differs


REPEATING: dict[str, Callable[..., torch.Tensor]] = {
    "the generator of Python": lambda block, hidden: hidden.sin() * random.random(),
    "the generator of NumPy": lambda block, hidden: hidden.sin() * np.random.rand(),
    "the generator of torch": lambda block, hidden: F.dropout(hidden.sin(), 0.5) * torch.rand(SIDE),
    "its own generator of torch": lambda block, hidden: hidden * torch.rand(SIDE, generator=block.own),
    "its own generator of Python": lambda block, hidden: hidden * block.own_python.random(),
    "its own generator of NumPy": lambda block, hidden: hidden * block.own_numpy.random(),
    "counts its calls": counts,
    "keeps a tensor": remembers,
}


@pytest.mark.parametrize("compute", REPEATING.values(), ids=REPEATING.keys())
def test_generators_and_attributes_are_put_back_for_the_second_call(
    store: TierStore, compute: Callable[..., torch.Tensor]
) -> None:
    assert only_call(compute, store).differs == ""


def test_what_was_recorded_can_still_be_stored(store: TierStore) -> None:
    """A storage whose memory numpy has seen belongs to numpy too: it would never leave memory again."""

    def keeps(_: Any, hidden: torch.Tensor) -> torch.Tensor:
        CACHE.append(hidden)
        return hidden.sin()

    only_call(keeps, store)
    assert len(CACHE) == 2
    assert not any(is_foreign(saved.untyped_storage()) for saved in CACHE)


@pytest.mark.parametrize("much", [list(range(10_000)), np.zeros(10**7)], ids=["many values", "a large array"])
def test_block_whose_state_is_too_large_to_be_watched_is_found(store: TierStore, much: Any) -> None:
    model = Chain(lambda: Block(counts), 1)
    model.blocks[0].much = much
    (call,) = recorded(model, ["blocks.0"], store)
    assert "too large to be watched" in call.differs


class ChangesItsArgument(nn.Module):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.relu_()


def test_block_that_changes_an_argument_is_found(store: TierStore) -> None:
    (call,) = recorded(Chain(ChangesItsArgument, 1), ["blocks.0"], store)
    assert "changes its module, or its arguments, in place" in call.differs


@pytest.mark.parametrize("by_view", [False, True])
def test_argument_changed_after_the_call_is_found(store: TierStore, by_view: bool) -> None:
    """A checkpoint would refuse in backward, where a plain step may not."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Mlp() for _ in range(3))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            given = batch * 2
            first = self.blocks[0](given)
            second = self.blocks[1](first * 2)
            (given[3:] if by_view else given).mul_(2)
            return self.blocks[2](second + given)

    calls = recorded(Model(), ["blocks.0", "blocks.1", "blocks.2"], store)
    assert [call.differs for call in calls] == ["its arguments are changed after the call", "", ""]


def test_what_a_call_saves_and_is_given(store: TierStore) -> None:
    calls = recorded(Chain(Mlp), ["blocks.0", "blocks.1"], store)
    for call in calls:
        assert list(call.inputs.values()) == [MATRIX_BYTES]
        assert call.inputs.items() <= call.saved.items()
        # The batch, the first product, the mask of dropout, its result, and tanh's.
        assert sorted(call.saved.values()) == [MATRIX_BYTES, MATRIX_BYTES, *[2 * MATRIX_BYTES] * 2, 2 * MATRIX_BYTES]
    assert not calls[0].saved.keys() & calls[1].saved.keys()
    assert calls[0].kind == calls[1].kind


def holdable(call: RecordedCall) -> Sequence[str]:
    return [operator.name for operator in call.operators if operator.can_be_held]


def draws(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    noise = torch.rand_like(hidden) + torch.bernoulli(torch.full_like(hidden, 0.5))
    return F.dropout(hidden.sin() * noise, 0.5).exp()


def changes_in_place(block: Any, hidden: torch.Tensor, *, by_view: bool = False) -> torch.Tensor:
    changed, other = hidden.exp(), hidden.sin()
    (changed.view(-1)[::2] if by_view else changed).add_(1)
    return (changed * other).cos().tanh()


def casts(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    return hidden.double().sin().float().cos()


@pytest.mark.parametrize(
    ("compute", "never"),
    [
        (draws, ("rand", "bernoulli", "dropout")),
        (changes_in_place, ("exp", "add_")),
        (partial(changes_in_place, by_view=True), ("exp", "add_")),
        (casts, ("_to_copy",)),
    ],
    ids=["random", "changed in place", "changed by a view", "casts"],
)
def test_what_is_random_changed_later_or_cast_is_never_held(
    store: TierStore, compute: Callable[..., torch.Tensor], never: Sequence[str]
) -> None:
    names = holdable(only_call(compute, store))
    assert "aten.sin.default" in names
    assert not [name for name in names if any(word in name for word in never)]


def test_result_that_is_not_saved_is_never_held(store: TierStore) -> None:
    """The caller may change it."""

    class Two(Inner):
        def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first = batch * 2
            return first, self.inner(batch.sin())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Two()

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            first, second = self.block(batch * 1)
            return first.mul_(3) + second

    (call,) = recorded(Model(), ["block"], store)
    assert "aten.sin.default" in holdable(call)
    assert "aten.mul.Tensor" not in holdable(call)
