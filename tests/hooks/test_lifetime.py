"""What the graph holds goes with the graph, at once and without the garbage collector; what was handed out stays."""

import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import product

import pytest
import torch

from tests.conftest import MakeStore
from tests.hooks.programs import MODELS, SIDE, bits, forget_after_error
from tierstore import TierStore, tiered_offload

pytestmark = pytest.mark.usefixtures("no_gc")

NBYTES = SIDE * SIDE * 4


def assert_empty(store: TierStore) -> None:
    stats = store.stats()
    held = (stats.live_handles, stats.host_bytes, stats.disk_bytes, stats.lent_bytes, stats.staging_used_bytes)
    assert held == (0, 0, 0, 0, 0)


ENDS: dict[str, Callable[[torch.Tensor], object]] = {
    "dropped": lambda loss: None,
    "used": lambda loss: loss.backward(),
    "used twice": lambda loss: [loss.backward(retain_graph=True), loss.backward()],
    "retained and dropped": lambda loss: loss.backward(retain_graph=True),
}


@pytest.mark.parametrize("host_bytes", [0, "40KiB", "1GiB"])
def test_graph_ends_nothing_is_held(make_store: MakeStore, host_bytes: object) -> None:
    store = make_store(host_bytes=host_bytes)
    for name, end, flushed in product(("mlp", "transformer", "branches"), ENDS.values(), (True, False)):
        make, shape = MODELS[name]
        model = make()
        with tiered_offload(store, min_bytes=0):
            loss = model(torch.randn(shape))
        if flushed:
            store.flush()
        assert store.stats().live_handles > 0
        end(loss)
        del loss
        store.flush()  # a write that ran when its graph ended is over now
        del model
        assert_empty(store)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exception_nothing_is_held(store: TierStore, where: str) -> None:
    weight = torch.randn(SIDE, SIDE, requires_grad=True)

    def explode(gradient: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    def step() -> None:
        with tiered_offload(store, min_bytes=0):
            hidden = (weight * 2).exp()
            loss = hidden.tanh().sin().sum()
            if where == "forward":
                explode(loss)
            hidden.register_hook(explode)
        store.flush()
        del hidden
        loss.backward()

    with suppress(ZeroDivisionError):
        step()
    forget_after_error()
    store.flush()
    assert_empty(store)


@pytest.mark.parametrize("min_bytes", [0, "1GiB"])
def test_tensors_of_the_user_die_with_their_last_reference(store: TierStore, min_bytes: object) -> None:
    """Saved inputs, saved outputs, and the loss: no hook makes a cycle of them. What is kept is the graph's too."""
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=min_bytes):
        batch = torch.randn(SIDE, SIDE)
        product = batch * weight
        output = product.exp()
        loss = output.softmax(1).sum()
    watched = [weakref.ref(tensor) for tensor in (batch, product, output, loss)]
    del batch, product, output
    assert [ref() is None for ref in watched] == [min_bytes == 0, True, True, False]
    del loss
    assert [ref() for ref in watched] == [None] * 4


def test_memory_handed_out_outlives_graph_and_handle_then_is_returned(store: TierStore) -> None:
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        node = (weight * 2).exp().sin().grad_fn
    store.flush()
    taken = node._saved_self.detach()  # type: ignore[union-attr]
    expected = bits((weight * 2).exp())
    del node
    assert store.stats().live_handles == 0
    assert store.stats().lent_bytes == NBYTES
    for _ in range(3):  # other tensors pass through the same slab
        with tiered_offload(store, min_bytes=0):
            loss = (weight * 3).cos().exp().sum()
        store.flush()
        loss.backward()
        del loss
    assert bits(taken) == expected
    view = taken[3:5]
    del taken
    assert store.stats().lent_bytes == NBYTES
    del view
    assert_empty(store)
