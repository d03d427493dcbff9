"""Modes of torch around pack, unpack, put and get: they see nothing of the store's, nor run under its lock."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import MakeStore
from tests.hooks.programs import IN_MODES, SIDE, bits
from tierstore import TierStore, tiered_offload

NBYTES = SIDE * SIDE * 4
Ask = Callable[[Any], object]


class DispatchMode(TorchDispatchMode):
    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self.ask = ask

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ask(function)
        return function(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self.ask = ask

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ask(function)
        return function(*args, **(kwargs or {}))


def loss_of(weight: torch.Tensor) -> torch.Tensor:
    return weight.exp().sin().cos().sum()


def gradient_without_store(weight: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(loss_of(weight), weight)
    return gradient


@pytest.mark.parametrize("host_bytes", [0, 2 * NBYTES, "1GiB"])
@pytest.mark.parametrize("mode", [DispatchMode, FunctionMode])
def test_mode_that_calls_the_store_throughout_a_step_same_bits(
    make_store: MakeStore, mode: Callable[[Ask], Any], host_bytes: object
) -> None:
    """Under the lock such a call would be refused, and end the store."""
    store = make_store(host_bytes=host_bytes)
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    with mode(lambda _: store.stats()):
        with tiered_offload(store, min_bytes=0):
            loss = loss_of(weight)
            more = loss_of(weight)
        store.flush()
        loss.backward()
        assert torch.equal(store.get(store.put(weight.detach() + 1)), weight + 1)
    assert bits(weight.grad) == bits(gradient_without_store(weight))
    more.backward()
    store.flush()


def test_closed_inside_a_function_mode(make_store: MakeStore) -> None:
    store = make_store(host_bytes=0)
    handle = store.put(torch.ones(SIDE, SIDE))
    seen: list[Any] = []
    with FunctionMode(seen.append):
        store.close()
    assert not seen
    del handle


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by the mode itself
def test_backward_under_fake_tensors_and_then_without_same_bits(store: TierStore) -> None:
    """What is handed out under the mode is kept for later; it has to be the tensor itself."""
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        loss = loss_of(weight)
    store.flush()
    IN_MODES["fake"](lambda: torch.autograd.grad(loss, weight, retain_graph=True))
    (gradient,) = torch.autograd.grad(loss, weight)
    assert bits(gradient) == bits(gradient_without_store(weight))


@pytest.mark.parametrize("name", ["fake", "grad", "vmap"])
def test_put_and_get_inside_a_mode_are_of_the_bytes(store: TierStore, name: str) -> None:
    """A fake alias has no bytes: to write those would end the process."""
    tensors = [torch.randn(SIDE, SIDE)]
    expected = bits(tensors[0])
    handles = []
    IN_MODES[name](lambda: handles.append(store.put(tensors.pop())))
    store.flush()
    IN_MODES[name](lambda: store.get(handles[0]))
    assert bits(store.get(handles[0])) == expected
