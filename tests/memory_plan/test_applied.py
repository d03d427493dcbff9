"""What an applied plan does around the calls of a block, where programs do unusual things."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that everybody uses
from torch.utils.checkpoint import checkpoint

from tests.conftest import MakeStore
from tests.hooks.programs import all_bits, assert_same_bits, forget_after_error, grads
from tests.memory_plan.blocks import (
    KEEP,
    RECOMPUTE,
    RECOMPUTE_STORED,
    STORE,
    Chain,
    Compiled,
    Inner,
    Mlp,
    Normed,
    step,
    the_batch,
    trained,
    with_action,
)
from tests.waiting import until
from tierstore import TierStore, keep_resident, tiered_offload
from tierstore.memory_plan.decision import Action, HeldOutput

NAMES = ["blocks.0", "blocks.1"]
STATISTICS = ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
HOLDING = [
    Action("recompute", (HeldOutput(1, "aten.addmm.default"),), stores=True),
    Action("recompute", (HeldOutput(0, "aten.mul.Tensor"),)),
]
ACTIONS = [KEEP, STORE, RECOMPUTE, RECOMPUTE_STORED, *HOLDING]
AGAIN = [RECOMPUTE, RECOMPUTE_STORED, *HOLDING]
each_action = pytest.mark.parametrize("action", ACTIONS, ids=str)
each_recomputing = pytest.mark.parametrize("action", AGAIN, ids=str)


@pytest.fixture
def store(make_store: MakeStore) -> TierStore:
    """The matrices that an action stores leave memory, each by itself."""
    return make_store(staging_bytes="128KiB")


def run(model: nn.Module, take: Callable[[nn.Module], Any], names: list[str], action: Any, store: Any) -> Any:
    """What `take` returns, with an action on blocks of the model; `action` None: without."""
    torch.manual_seed(5)
    model = copy.deepcopy(model)
    with with_action(model, names, action, [], store):
        return take(model)


class Odd(Inner):
    """Takes nested arguments, some by keyword, and gives nested results."""

    def forward(
        self,
        pair: tuple[torch.Tensor, list[torch.Tensor]],
        nothing: None,
        *,
        scale: torch.Tensor,
        named: dict[str, Any],
    ) -> dict[str, Any]:
        first, (second,) = pair
        hidden = self.inner(first * scale)
        if named["bias"] is not None:
            hidden = hidden + named["bias"].sin() * named["factor"]
        return {"main": F.dropout(hidden.tanh(), 0.2) * second, "others": (second.exp(), None, 3), "none": nothing}


class OddModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Odd(), Odd()])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for block, bias in zip(self.blocks, (None, batch * 3), strict=True):
            named = {"bias": bias, "factor": 0.5}
            found = block((batch * 2, [batch.cos()]), None, scale=batch.sigmoid(), named=named)
            assert found["others"][1:] == (None, 3)
            assert found["none"] is None
            batch = found["main"] + found["others"][0]
        return batch


class Several(Inner):
    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.inner(batch * 2)
        return hidden.tanh(), hidden.exp(), batch.sin()


class Last(Inner):
    """Saves neither its argument nor its result."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.inner((batch + 1) * 3)  # type: ignore[no-any-return]


class Drawing(Inner):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        batch = self.inner(batch * 2)
        if random.random() < 0.5:
            return batch.sin() * np.random.rand()
        return batch.exp() * random.random()


class Marked(torch.Tensor):
    """A class of the user's."""


def one_step(model: nn.Module) -> list[Any]:
    batch = the_batch()
    loss = model(batch).square().mean()
    loss.backward()
    return [loss, batch.grad, *grads(model)]


def parts_of_the_results(model: nn.Module) -> list[Any]:
    found = []
    for parts in ([0], [1], [2], [2, 0], [1, 0, 2]):
        batch = the_batch()
        results = model.blocks[0](batch)
        model.zero_grad()
        for part in parts:
            results[part].sum().backward(retain_graph=True)
        found += [batch.grad, *grads(model)]
    return found


def result_changed_in_place(model: nn.Module) -> list[Any]:
    batch = the_batch()
    model.blocks[0](batch * 2).mul_(2).sum().backward()
    return [batch.grad, *grads(model)]


def double_backward(model: nn.Module) -> list[Any]:
    batch = the_batch()
    loss = model(batch).square().mean()
    (gradient,) = torch.autograd.grad(loss, batch, create_graph=True)
    (loss + gradient.square().sum()).backward()
    return [gradient, batch.grad, *grads(model)]


def without_gradients_and_in_eval(model: nn.Module) -> list[Any]:
    with torch.no_grad():
        first = step(model)
    with torch.inference_mode():
        second = step(model).clone()
    loss = step(model.eval())
    loss.backward()
    return [first, second.clone(), loss, *grads(model)]


def random_numbers_of_python_and_numpy(model: nn.Module) -> list[Any]:
    random.seed(1)
    np.random.seed(1)
    for _ in range(4):
        step(model).backward()
    return [*grads(model), torch.tensor([random.random(), np.random.rand()])]


def tensor_of_the_users_class(model: nn.Module) -> list[Any]:
    batch = the_batch().detach().as_subclass(Marked).requires_grad_()
    result = model(batch)
    assert type(result) is Marked
    result.square().mean().backward()
    return [torch.Tensor(batch.grad), *grads(model)]


@contextmanager
def their_hooks() -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        yield


def inside_scopes_of_the_user(model: nn.Module) -> list[Any]:
    found = []
    with TierStore("/tmp", host_bytes=0, staging_bytes=0, disk_bytes="1GiB") as store:
        for around in (lambda: tiered_offload(store, min_bytes=0), keep_resident, their_hooks):
            model.zero_grad()
            with around():
                loss = step(model)
            loss.backward()
            found += [gradient.clone() for gradient in grads(model)]
    return found


def checkpointed_by_the_user(model: nn.Module) -> list[Any]:
    found = []
    for use_reentrant in (False, True):
        model.zero_grad()
        checkpoint(model, the_batch(), use_reentrant=use_reentrant).square().mean().backward()
        found += [gradient.clone() for gradient in grads(model)]
    return found


def with_members_compiled(model: nn.Module) -> list[Any]:
    torch.compiler.reset()
    return one_step(model)


def compiled_as_a_whole(model: nn.Module) -> list[Any]:
    torch.compiler.reset()
    for block in model.blocks:
        block.compile(backend="aot_eager")  # what is compiled in it is part of that
    return one_step(model)


PROGRAMS = {
    "nested arguments and results": (OddModel, one_step),
    "a result changed in place by the caller": (lambda: Chain(Last, 1), result_changed_in_place),
    "backward of a part of the results": (lambda: Chain(Several, 1), parts_of_the_results),
    "double backward": (lambda: Chain(Mlp), double_backward),
    "without gradients, and in eval": (lambda: Chain(Mlp), without_gradients_and_in_eval),
    "generators of Python and NumPy": (lambda: Chain(Drawing), random_numbers_of_python_and_numpy),
    "a tensor of the user's class": (lambda: Chain(Mlp), tensor_of_the_users_class),
    "scopes of the user around the model": (lambda: Chain(Mlp), inside_scopes_of_the_user),
    "checkpoints of the user around the model": (lambda: Chain(Mlp), checkpointed_by_the_user),
    "members compiled": (lambda: Chain(Compiled), with_members_compiled),
    "compiled": (lambda: Chain(Compiled), compiled_as_a_whole),
}


@each_action
@pytest.mark.parametrize(("make", "take"), PROGRAMS.values(), ids=PROGRAMS.keys())
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo looks there
def test_same_bits_as_without_the_action(store: TierStore, action: Action, make: Any, take: Any) -> None:
    torch.manual_seed(0)
    model = make()
    names = [name for name in NAMES if name in dict(model.named_modules())]
    plain, found = (run(model, take, names, each, store) for each in (None, action))
    assert_same_bits(all_bits(found), all_bits(plain))
    assert store.stats().live_handles == 0


@each_recomputing
@pytest.mark.parametrize("changed", ["first", "second", "bias"])
def test_nested_argument_changed_before_backward_refused(store: TierStore, action: Action, changed: str) -> None:
    """Autograd in a plain run refuses the same."""
    model = nn.Module()
    model.inner = Odd()
    for each in (None, action):
        batch = the_batch()
        inputs = {"first": batch * 2, "second": batch * 3, "bias": batch * 4}
        named = {"bias": inputs["bias"], "factor": 0.5}
        with with_action(model, ["inner"], each, [], store):
            found = model.inner((inputs["first"], [inputs["second"]]), None, scale=batch, named=named)
            with torch.no_grad():
                inputs[changed].add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                found["main"].sum().backward()
        forget_after_error()


@each_action
@pytest.mark.usefixtures("no_gc")
def test_graph_dropped_without_backward_nothing_stays(store: TierStore, action: Action) -> None:
    model = Chain(Mlp)
    with with_action(model, NAMES, action, [], store):
        loss = step(model)
        assert (store.stats().live_handles > 0) == action.uses_store
        del loss
        until(lambda: store.stats().live_handles == 0)  # a write that is on its way keeps its handle


@each_action
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_error_in_forward_or_in_the_recomputation_later_steps_are_right(
    store: TierStore, action: Action, kind: type[BaseException]
) -> None:
    class Failing(Normed):
        fails_at = 0
        num_calls = 0

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            Failing.num_calls += 1
            hidden = super().forward(batch * 2)
            if Failing.num_calls == Failing.fails_at:
                raise kind("on purpose")
            return hidden.exp()

    for fails_at in (1, 2, 3, 4):
        Failing.fails_at = Failing.num_calls = 0
        model = Chain(Failing)
        plain = copy.deepcopy(model)
        with with_action(model, NAMES, action, STATISTICS, store):
            Failing.fails_at, Failing.num_calls = fails_at, 0
            try:
                step(model).backward()
            except kind:
                forget_after_error()
            else:
                assert fails_at > 2
                assert action.kind != "recompute"
            Failing.fails_at = 0
            model.load_state_dict(plain.state_dict())
            found = trained(model)
        assert_same_bits(found, trained(plain))
        assert store.stats().live_handles == 0


@each_action
def test_copies_compute_with_their_own_weights_and_buffers(store: TierStore, action: Action) -> None:
    model, file = Chain(Normed), io.BytesIO()
    expected = trained(copy.deepcopy(model))
    state = all_bits(model.state_dict().values())
    with with_action(model, NAMES, action, STATISTICS, store):
        assert_same_bits(trained(copy.deepcopy(model)), expected)
        assert all_bits(model.state_dict().values()) == state
        torch.save(model, file)
        file.seek(0)
        num_packed = store.stats().packed_tensors
        assert_same_bits(trained(torch.load(file, weights_only=False)), expected)
        assert store.stats().packed_tensors == num_packed, "in a pickled module there is no plan"
