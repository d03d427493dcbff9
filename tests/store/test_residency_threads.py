"""The store under many threads, and under a garbage collector that runs inside its critical sections."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.conftest import MakeStore
from tests.inspect_store import inspect
from tests.waiting import until, until_empty
from tierstore import Handle


@pytest.mark.usefixtures("no_gc")
def test_collector_inside_every_critical_section_does_no_harm(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is garbage is found there, and nowhere else."""
    store = make_store(host_bytes="8KiB", staging_bytes="8KiB")
    drain = inspect(store).ledger.drain

    def collect_and_drain() -> bool:
        gc.collect()
        return drain()

    monkeypatch.setattr(inspect(store).ledger, "drain", collect_and_drain)
    kept: list[tuple[int, Handle]] = []
    for i in range(60):
        cycle: list[object] = [store.put(torch.arange(500.0) - i)]
        cycle.append(cycle)
        del cycle
        kept.append((i, store.put(torch.arange(500.0) + i)))
        if i % 3 == 0:
            result: list[object] = [store.get(kept[i // 2][1])]
            result.append(result)
    for i, handle in kept:
        _assert_equal(store.get(handle), torch.arange(500.0) + i)
    del kept, handle, result
    gc.collect()
    until_empty(store)


def test_who_begins_to_wait_is_told_what_had_ended_before(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore.store.worker._PATIENCE_SECONDS", 600.0)  # the worker has still to tell it
    store = make_store(host_bytes=0)
    handle = store.put(torch.arange(5000.0))
    until(lambda: inspect(store).disk.usage().num_records == 1)
    threads = ThreadPoolExecutor(1)
    threads.submit(store.flush).result(20)
    del handle
    threads.submit(store.flush).result(20)
    threads.shutdown()


def _assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
