"""Errors reach the thread that trains, with their figures, and training can go on."""

import pytest
import torch

from tests.conftest import MakeStore
from tests.hooks.programs import (
    SIDE,
    all_bits,
    assert_same_bits,
    assert_same_gradients,
    forget_after_error,
    training,
)
from tierstore import StoreClosedError, StoreFullError, TierStore, tiered_offload

NBYTES = 256 * 256 * 4


def fill(store: TierStore, held: list[torch.Tensor], num_graphs: int = 100) -> None:
    weight = torch.randn(256, 256, requires_grad=True)
    for _ in range(num_graphs):
        with tiered_offload(store, min_bytes=0):
            held.append((weight * 2).exp().sum())


@pytest.mark.parametrize("host_bytes", [0, 2 * NBYTES])
def test_disk_and_host_full_pack_raises_with_figures_and_graphs_that_were_made_are_right(
    make_store: MakeStore, host_bytes: int
) -> None:
    store = make_store(host_bytes=host_bytes, disk_bytes=5 * NBYTES, staging_bytes=2 * NBYTES)
    weight = torch.randn(256, 256, requires_grad=True)
    held: list[torch.Tensor] = []

    def fill_with_different() -> None:
        for number in range(50):
            with tiered_offload(store, min_bytes=0):
                held.append((weight * number / 50).exp().sum())

    with pytest.raises(StoreFullError) as caught:
        fill_with_different()
    error = caught.value
    assert error.needed_bytes == NBYTES
    assert (error.disk_budget_bytes, error.host_budget_bytes) == (5 * NBYTES, host_bytes)
    assert 0 < error.disk_bytes <= 5 * NBYTES
    assert error.host_bytes <= host_bytes
    assert str(error.needed_bytes) in str(error)
    assert len(held) >= 5
    for number, loss in enumerate(held):
        expected = torch.autograd.grad((weight * number / 50).exp().sum(), [weight])
        assert_same_bits(all_bits(torch.autograd.grad(loss, [weight])), all_bits(expected))


def test_store_full_graphs_dropped_training_goes_on(make_store: MakeStore) -> None:
    store = make_store(disk_bytes="700KiB", staging_bytes=NBYTES)
    for _ in range(3):
        held: list[torch.Tensor] = []
        with pytest.raises(StoreFullError):
            fill(store, held)
        del held
        store.flush()
        assert store.stats().live_handles == 0
        assert_same_gradients(training("mlp", num_steps=2), store)


def test_store_full_of_graphs_in_cycles_collected_instead_of_raised(make_store: MakeStore) -> None:
    store = make_store(disk_bytes=8 * NBYTES, staging_bytes=NBYTES)
    for _ in range(30):
        held: list[object] = []
        fill(store, held, 1)  # type: ignore[arg-type]
        held.append(held)  # nothing but the garbage collector frees this graph
        del held


@pytest.mark.parametrize("host_bytes", [0, "1GiB"])
@pytest.mark.parametrize("flushed", [True, False])
def test_closed_store_live_graph_raises_each_time(make_store: MakeStore, host_bytes: object, flushed: bool) -> None:
    store = make_store(host_bytes=host_bytes, staging_bytes="64KiB")
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        loss = (weight * 2).exp().sum()
    if flushed:
        store.flush()
    store.close()
    for _ in range(2):
        with pytest.raises(StoreClosedError) as caught:
            loss.backward(retain_graph=True)
        assert caught.value.reason == "it was closed"
    del loss, caught  # the traceback refers to the graph
    forget_after_error()
    stats = store.stats()
    assert (stats.live_handles, stats.disk_bytes, stats.host_bytes) == (0, 0, 0)


def test_store_closed_inside_the_scope_packs_and_backward_raise_and_training_goes_on_outside(store: TierStore) -> None:
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        loss = (weight * 2).exp().sum()
        store.close()
        with pytest.raises(StoreClosedError):
            (weight * 2).exp()
    with pytest.raises(StoreClosedError):
        loss.backward()
    (weight * 2).exp().sum().backward()
