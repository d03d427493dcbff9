"""The store under many threads, and under a garbage collector that runs inside its critical sections."""

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.conftest import MakeStore
from tests.inspect_store import inspect
from tests.waiting import until_empty
from tierstore import Handle


@pytest.fixture
def _eager_collector() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("no_gc")
def test_collector_inside_every_critical_section_does_no_harm(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is garbage is found there, and nowhere else."""
    store = make_store(host_bytes="8KiB", staging_bytes="8KiB")
    drain = inspect(store).rules.drain

    def collect_and_drain() -> bool:
        gc.collect()
        return drain()

    monkeypatch.setattr(inspect(store).rules, "drain", collect_and_drain)
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


@pytest.mark.usefixtures("_eager_collector")
def test_collector_on_other_threads_does_no_harm(make_store: MakeStore) -> None:
    store = make_store(host_bytes="8KiB", staging_bytes="8KiB")
    over = threading.Event()
    num_collections = [0]

    def collect() -> None:
        while not over.is_set():
            gc.collect(0)
            num_collections[0] += 1

    collector = threading.Thread(target=collect)
    collector.start()
    try:
        for i in range(60):
            cycle: list[object] = [store.put(torch.arange(700.0) + i)]
            cycle.append(cycle)
            _assert_equal(store.get(cycle[0]), torch.arange(700.0) + i)
            if i % 10 == 0:
                store.prefetch([cycle[0]])
                store.flush()
    finally:
        over.set()
        collector.join(20)
    assert num_collections[0]
    del cycle
    gc.collect()
    until_empty(store)


@pytest.mark.parametrize(
    "budgets",
    [(0, 0), (0, 40_000), (60_000, 0), (60_000, 40_000)],
    ids=["nothing", "staging", "host", "both"],
)
def test_hammered_by_many_threads_every_get_is_right(make_store: MakeStore, budgets: tuple[int, int]) -> None:
    store = make_store(host_bytes=budgets[0], staging_bytes=budgets[1], disk_bytes="64MiB", inline_bytes="4KiB")
    end = time.monotonic() + 0.8
    sizes = (0, 1, 3, 100, 1000, 1025, 5000, 30_000)

    def hammer(seed: int) -> int:
        generator = torch.Generator().manual_seed(seed)
        held: list[tuple[int, int, Handle]] = []
        kept: list[tuple[int, int, torch.Tensor]] = []
        rounds = 0
        while time.monotonic() < end or rounds < 20:
            rounds += 1
            choice = int(torch.randint(0, 8, (1,), generator=generator))
            if choice < 3 or not held:
                size = sizes[int(torch.randint(0, len(sizes), (1,), generator=generator))]
                held.append((size, seed * 10_000 + rounds, store.put(_content(size, seed * 10_000 + rounds))))
                continue
            place = int(torch.randint(0, len(held), (1,), generator=generator))
            size, number, handle = held[place]
            if choice < 6:
                result = store.get(handle)
                _assert_equal(result, _content(size, number))
                kept.append((size, number, result))
                del kept[: max(0, len(kept) - 3)]
            elif choice == 6:
                store.prefetch([handle for _, _, handle in held[place:]])
            else:
                del held[place]
            del handle
            del held[: max(0, len(held) - 20)]
        for size, number, handle in held:
            _assert_equal(store.get(handle), _content(size, number))
        for size, number, result in kept:
            _assert_equal(result, _content(size, number))
        return rounds

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(hammer, range(8)))
    gc.collect()
    until_empty(store)
    assert store.stats().host_bytes_peak <= budgets[0]


def _content(size: int, number: int) -> torch.Tensor:
    return (torch.arange(size, dtype=torch.int32) ^ number).view(torch.float32)


def _assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
