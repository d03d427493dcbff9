"""Errors reach the thread that trains. What is told of a full disk: tests/reliability/test_full_disk.py."""

import pytest
import torch

from tests.conftest import MakeStore
from tests.hooks.programs import SIDE, forget_after_error
from tierstore import StoreClosedError, tiered_offload

NBYTES = 256 * 256 * 4


def test_store_full_of_graphs_in_cycles_collected_instead_of_raised(make_store: MakeStore) -> None:
    store = make_store(disk_bytes=8 * NBYTES, staging_bytes=NBYTES)
    weight = torch.randn(256, 256, requires_grad=True)
    for _ in range(30):
        held: list[object] = []
        with tiered_offload(store, min_bytes=0):
            held.append((weight * 2).exp().sum())
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
