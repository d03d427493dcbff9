"""Modes of torch around pack, unpack, put and get: they see nothing of the store's, nor run under its lock."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.conftest import MakeStore
from tests.hooks.programs import IN_MODES, SIDE, DispatchMode, bits, forget_after_error
from tests.inspect_store import inspect
from tierstore import Handle, ModifiedInPlaceError, TierStore, tiered_offload

NBYTES = SIDE * SIDE * 4
Ask = Callable[[Any], object]


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
    handle = store.put(PUT)
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


@pytest.mark.parametrize("name", [name for name in IN_MODES if name != "inference"])
def test_put_and_get_inside_a_mode_are_of_the_bytes(store: TierStore, name: str) -> None:
    """A fake alias has no bytes: to write those would end the process."""
    tensors = [torch.randn(SIDE, SIDE)]
    expected = bits(tensors[0])
    handles = []
    IN_MODES[name](lambda: handles.append(store.put(tensors.pop())))
    store.flush()
    IN_MODES[name](lambda: store.get(handles[0]))
    assert bits(store.get(handles[0])) == expected


def _seen_by(make_mode: Callable[[Ask], Any], scope: AbstractContextManager[object]) -> list[str]:
    """The operators that a mode around forward sees. (It also sees when attributes are read, which changes nothing.)"""
    seen: list[str] = []
    leaf = torch.ones(SIDE, SIDE, requires_grad=True)
    with scope, make_mode(lambda function: seen.append(str(function))):
        loss_of(leaf)
    return [name for name in seen if "__get__" not in name]


@pytest.mark.parametrize("make_mode", [DispatchMode, FunctionMode])
def test_mode_around_forward_sees_nothing_of_the_store(store: TierStore, make_mode: Callable[[Ask], Any]) -> None:
    found = _seen_by(make_mode, tiered_offload(store, min_bytes=0))
    assert found == [name for name in _seen_by(make_mode, nullcontext()) if "detach" not in name]  # autograd's own


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by the mode itself
def test_saved_while_shapes_are_asked_for_keeps_its_own_bytes(store: TierStore) -> None:
    """A fake alias would not hold the storage, whose owners are counted later."""
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        hidden = weight.exp()
        IN_MODES["fake"](hidden.sin)
        loss = hidden.cos().sum()
    assert all(type(each.alias) is torch.Tensor for each in inspect(store).tracked if each.alias is not None)
    del hidden
    store.flush()
    loss.backward()
    (expected,) = torch.autograd.grad(weight.exp().cos().sum(), weight)
    assert bits(weight.grad) == bits(expected)


@pytest.mark.parametrize("host_bytes", [0, "1GiB"])
@pytest.mark.parametrize("name", [name for name in IN_MODES if name not in ("fake", "grad", "vmap")])
def test_backward_inside_a_mode_same_bits_and_same_error(make_store: MakeStore, name: str, host_bytes: object) -> None:
    store = make_store(host_bytes=host_bytes)
    leaf = torch.randn(SIDE, SIDE, requires_grad=True)
    expected = bits(gradient_without_store(leaf))
    with tiered_offload(store, min_bytes=0):
        losses = [loss_of(leaf), loss_of(leaf)]
        hidden = leaf.exp()
        edited = hidden.sin().sum()
    found: list[Any] = []

    def backward() -> None:
        store.stats()
        found.extend(torch.autograd.grad(losses.pop(), leaf))
        with pytest.raises(ModifiedInPlaceError):
            torch.autograd.grad(edited, leaf)

    hidden.detach().add_(1)
    IN_MODES[name](backward)
    assert bits(found[0]) == expected
    forget_after_error()
    losses.pop().backward()
    assert bits(leaf.grad) == expected


PUT = torch.ones(SIDE, SIDE)
LEAF = torch.ones(SIDE, SIDE, requires_grad=True)


def _another_scope(store: TierStore) -> None:
    """Its packs need room, and its end looks at the owners of what others have saved."""
    with suppress(RuntimeError), tiered_offload(store, min_bytes=0):  # `torch.func.grad` refuses hooks
        loss_of(LEAF)


def _let_go(store: TierStore) -> None:
    """A finalizer asks the store, in whatever mode its thread is."""

    class Cycle:
        def __del__(self) -> None:
            store.stats()

    cycle = Cycle()
    cycle.itself = cycle  # type: ignore[attr-defined]
    del cycle
    gc.collect()


CALLS: dict[str, Callable[[TierStore], object]] = {
    "stats": TierStore.stats,
    "flush": TierStore.flush,
    "put": lambda store: store.put(PUT),
    "put and get": lambda store: store.get(store.put(PUT)),
    "prefetch": lambda store: store.prefetch([store.put(PUT)]),
    "memory_use": TierStore.memory_use,
    "scope": _another_scope,
    "finalizer": _let_go,
    "collected": lambda store: gc.collect(),
}
"""Public calls, and what may come over a thread by itself."""

TAKEN_IN = {"in a group, to disk": (SIDE, 0), "alone": (8 * SIDE, "1GiB")}  # tensors under and over 1 MiB


def _saves_noise_and_output(side: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, Callable[[], None]]:
    """Leaves, the noise of a dropout (saved at version 2), an output (at version 0), and backward."""
    leaves = [torch.randn(side, side, requires_grad=True) for _ in range(2)]
    outputs = [leaf.exp() for leaf in leaves]
    noisy = torch.nn.functional.dropout(outputs[0].sin(), 0.5)
    results = [(noisy * outputs[1].exp()).sin()]

    def backward() -> None:
        results.pop().sum().backward()

    return leaves, noisy, outputs[1], backward


@pytest.mark.parametrize(("side", "host_bytes"), TAKEN_IN.values(), ids=TAKEN_IN)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", IN_MODES)
def test_call_inside_a_mode_changes_no_guard(
    make_store: MakeStore, name: str, call: str, side: int, host_bytes: object
) -> None:
    """What registers tracked tensors there makes aliases, which have to share the saved tensor's version counter."""
    store = make_store(host_bytes=host_bytes)
    expected = [leaf.grad for leaf in _backward_of(_saves_noise_and_output(side))]
    torch.manual_seed(0)
    with tiered_offload(store):
        graph = _saves_noise_and_output(side)
    IN_MODES[name](lambda: CALLS[call](store))
    assert [bits(leaf.grad) for leaf in _backward_of(graph)] == [bits(gradient) for gradient in expected]
    for edited in (1, 2):
        with tiered_offload(store):
            graph = _saves_noise_and_output(side)
        IN_MODES[name](lambda: CALLS[call](store))
        with torch.no_grad():
            graph[edited].add_(1)  # type: ignore[union-attr]
        with pytest.raises(ModifiedInPlaceError):
            graph[3]()
        forget_after_error()


@pytest.mark.parametrize("name", IN_MODES)
def test_tensor_that_is_put_inside_a_mode_is_guarded(store: TierStore, name: str) -> None:
    tensor, handles = torch.ones(SIDE, SIDE), list[Handle]()
    IN_MODES[name](lambda: handles.append(store.put(tensor)))
    tensor.add_(1)
    with pytest.raises(ModifiedInPlaceError):
        store.get(handles[0])


def _backward_of(
    graph: tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, Callable[[], None]],
) -> list[torch.Tensor]:
    leaves, *_, backward = graph
    del graph, _
    backward()
    return leaves
