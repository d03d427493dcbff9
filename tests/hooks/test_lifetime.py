"""What the graph holds goes with the graph, at once and without the garbage collector; what was handed out stays."""

import weakref
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from tests.conftest import MakeStore
from tests.hooks.programs import MODELS, SIDE, Mlp, bits, forget_after_error
from tierstore import TierStore, tiered_offload

pytestmark = pytest.mark.usefixtures("no_gc")

NBYTES = SIDE * SIDE * 4


def assert_empty(store: TierStore) -> None:
    stats = store.stats()
    held = (stats.live_handles, stats.host_bytes, stats.disk_bytes, stats.lent_bytes, stats.staging_used_bytes)
    assert held == (0, 0, 0, 0, 0)


def drop(loss: torch.Tensor) -> None:
    """The graph ends without backward: the caller's reference is the last."""


def gradients(loss: torch.Tensor) -> None:
    loss.backward()


def gradients_twice(loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def penalty(loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)


ENDS = [drop, gradients, gradients_twice, penalty]


@pytest.mark.parametrize("flushed", [True, False])
@pytest.mark.parametrize("host_bytes", [0, "40KiB", "1GiB"])
@pytest.mark.parametrize("end", ENDS)
def test_graph_ends_nothing_is_held(
    make_store: MakeStore, end: Callable[[torch.Tensor], None], host_bytes: object, flushed: bool
) -> None:
    store = make_store(host_bytes=host_bytes)
    for name in ("mlp", "transformer", "branches"):
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


def test_exception_in_forward_nothing_is_held(store: TierStore) -> None:
    model = Mlp()

    def forward() -> None:
        with tiered_offload(store, min_bytes=0):
            model(torch.randn(SIDE, SIDE))
            raise ZeroDivisionError

    with suppress(ZeroDivisionError):
        forward()
    store.flush()
    assert_empty(store)


def test_exception_in_backward_nothing_is_held(store: TierStore) -> None:
    weight = torch.randn(SIDE, SIDE, requires_grad=True)

    def explode(gradient: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    def step() -> None:
        with tiered_offload(store, min_bytes=0):
            hidden = (weight * 2).exp()
            hidden.register_hook(explode)
            loss = hidden.tanh().sin().sum()
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


def test_memory_of_stored_tensors_is_freed_while_the_graph_lives(store: TierStore) -> None:
    """Of what backward needs, no byte stays in memory once it is on disk."""
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        hidden = (weight * 2).exp()
        storage = weakref.ref(hidden.untyped_storage())
        loss = hidden.sin().sum()
    del hidden
    assert storage() is not None
    store.flush()
    assert storage() is None
    assert store.stats().disk_bytes >= NBYTES
    loss.backward()


def test_one_saved_output_used_by_its_own_node_and_the_next_stored_once(store: TierStore) -> None:
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        loss = (weight * 2).exp().sin().sum()
    stats = store.stats()
    assert (stats.packed_bytes, stats.deduplicated_bytes) == (NBYTES, NBYTES)
    loss.backward()


def test_unpacked_through_the_node_any_number_of_times_same_bits(make_store: MakeStore) -> None:
    store = make_store(staging_bytes=0)
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    hidden = weight * 2
    expected_input, expected_output = bits(hidden), bits(hidden.exp())
    with tiered_offload(store, min_bytes=0):
        sine, output = hidden.sin(), hidden.exp()
    del hidden
    sine_node, exp_node = sine.grad_fn, output.grad_fn
    del output
    store.flush()
    for _ in range(5):
        assert bits(sine_node._saved_self) == expected_input  # type: ignore[union-attr]
        assert bits(exp_node._saved_result) == expected_output  # type: ignore[union-attr]
        with torch.no_grad():
            weight.add_(1)  # not what was saved
        store.flush()
    del sine, sine_node, exp_node
    assert_empty(store)


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


def test_memory_handed_out_survives_the_store(make_store: MakeStore) -> None:
    store = make_store()
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        node = (weight * 2).exp().sin().grad_fn
    store.flush()
    taken, expected = node._saved_self.detach(), bits((weight * 2).exp())  # type: ignore[union-attr]
    store.close()
    del store, node
    assert bits(taken) == expected


def test_graph_dropped_while_it_is_written_or_read_nothing_is_held(make_store: MakeStore) -> None:
    """No flush in between: handles die in every state that a job can be in."""
    store = make_store(staging_bytes="128KiB")
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    for number in range(60):
        with tiered_offload(store, min_bytes=0):
            loss = (weight * 2).exp().sin().cos().tanh().sigmoid().sum()
        if number % 3 == 1:
            (node,) = [function for function, _ in loss.grad_fn.next_functions]  # type: ignore[union-attr]
            assert node._saved_result is not None  # type: ignore[union-attr]
            del node
        elif number % 3 == 2:
            loss.backward()
        del loss
    store.flush()
    assert_empty(store)
