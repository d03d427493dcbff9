"""Budgets: kept at every moment, exact to the byte, down to nothing at all."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.conftest import MakeStore
from tests.inspect_store import inspect
from tests.waiting import until_empty
from tierstore import Handle, StoreFullError, StoreStats, TierStore, tiered_offload
from tierstore.ledger.lookahead import Lookahead
from tierstore.ledger.state import State

pytestmark = pytest.mark.usefixtures("validated")
NBYTES = 40_000
HOST_BUDGETS = (0, 1, NBYTES - 1, NBYTES, NBYTES + 1, 3 * NBYTES, 8 * NBYTES)
STAGING_BUDGETS = (0, 1, NBYTES - 1, NBYTES, 3 * NBYTES)


def _tensor(number: int = 0, nbytes: int = NBYTES) -> torch.Tensor:
    return torch.arange(nbytes // 4, dtype=torch.float32) + number


def _held(stats: StoreStats) -> int:
    return stats.host_bytes + stats.staging_used_bytes + stats.lent_bytes


@contextmanager
def _watched(store: TierStore, host_bytes: int, staging_bytes: int, overdraft_bytes: int) -> Iterator[None]:
    """Looks at the store all the time, from another thread."""
    over = threading.Event()
    violations: list[StoreStats] = []
    num_looks = 0

    def watch() -> None:
        nonlocal num_looks
        while True:
            stats = store.stats()
            num_looks += 1
            allowed = host_bytes + staging_bytes + overdraft_bytes + stats.lent_bytes
            if stats.host_bytes > host_bytes or _held(stats) > allowed:
                violations.append(stats)
            if over.wait(0.0003):  # lets the others have the interpreter, too
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join(20)
    assert num_looks
    assert not violations, violations[0]


@pytest.mark.parametrize("staging_bytes", STAGING_BUDGETS)
def test_every_budget_keeps_its_limits_and_the_bytes(make_store: MakeStore, staging_bytes: int) -> None:
    for host_bytes in HOST_BUDGETS:
        store = make_store(host_bytes=host_bytes, staging_bytes=staging_bytes)
        # one tensor passes through the staging, one more is in the hands of the thread that asks
        with _watched(store, host_bytes, staging_bytes, 2 * NBYTES):
            handles = [store.put(_tensor(i)) for i in range(8)]
            for i in (7, 6, 5, 0, 4, 3, 3, 2, 1):
                assert torch.equal(store.get(handles[i]), _tensor(i))
            del handles[::2]
            store.flush()
            for i in (3, 2, 1, 0):
                assert torch.equal(store.get(handles[i]), _tensor(2 * i + 1))
        stats = store.stats()
        assert stats.host_bytes_peak <= host_bytes
        assert stats.live_handles == 4
        assert stats.staging_bytes == staging_bytes + inspect(store).disk.scratch_bytes
        del handles
        until_empty(store)
        store.close()


@pytest.mark.parametrize("budgets", [(0, 0), (NBYTES, 0), (0, NBYTES), (2 * NBYTES, 2 * NBYTES)])
def test_forward_and_backward_each_alone_are_held_within_both_budgets_and_one_tensor(
    make_store: MakeStore, budgets: tuple[int, int]
) -> None:
    store = make_store(host_bytes=budgets[0], staging_bytes=budgets[1])
    with _watched(store, *budgets, NBYTES):
        handles = [store.put(_tensor(i)) for i in range(20)]
        store.flush()
    with _watched(store, *budgets, NBYTES):
        for i in reversed(range(20)):
            store.prefetch(handles[max(0, i - 3) : i])
            assert torch.equal(store.get(handles[i]), _tensor(i))


def test_pack_that_needs_all_of_staging_gets_it_from_the_prefetch(make_store: MakeStore) -> None:
    """What is dropped for a pack that waits is not fetched again before it has its room."""
    store = make_store(host_bytes=400, staging_bytes=300)
    small = [store.put(_tensor(i, 96)) for i in range(8)]
    large = [store.put(_tensor(8, 384))]
    store.flush()
    records = [handle.record for handle in small]
    assert {record.state for record in records} == {State.DISK}
    ahead = Lookahead(10_000)
    ahead.begin(records, range(8))
    for i in range(3):
        assert torch.equal(
            inspect(store).residency.handing_out.fetch(records[i], records[i].layout, ahead, None, i), _tensor(i, 96)
        )
        large.append(store.put(_tensor(9 + i, 384)))
    for i, handle in enumerate([*small, *large]):
        assert torch.equal(store.get(handle), _tensor(i, 96 if i < 8 else 384))


@pytest.mark.parametrize("host_bytes", [0, NBYTES, 6 * NBYTES, 16 * NBYTES + 1])
@pytest.mark.parametrize("staging_bytes", [0, 1, NBYTES, 2 * NBYTES + 1])
def test_window_that_takes_from_host_keeps_both_budgets(
    make_store: MakeStore, host_bytes: int, staging_bytes: int
) -> None:
    store = make_store(host_bytes=host_bytes, staging_bytes=staging_bytes)
    inspect(store).let_staging_grow()
    with _watched(store, host_bytes, staging_bytes, 2 * NBYTES):
        handles = [store.put(_tensor(i, NBYTES if i % 3 else NBYTES // 4)) for i in range(30)]
        store.flush()
        store.prefetch(handles)
        for i in reversed(range(30)):
            assert torch.equal(store.get(handles[i]), _tensor(i, NBYTES if i % 3 else NBYTES // 4))
    assert store.stats().host_bytes_peak <= host_bytes
    del handles
    until_empty(store)


@pytest.mark.parametrize("missing", [0, 1])
def test_budget_of_all_tensors_writes_nothing_and_of_a_byte_less_what_was_saved_first(
    make_store: MakeStore, missing: int
) -> None:
    store = make_store(host_bytes=5 * NBYTES - missing)
    handles = [store.put(_tensor(i)) for i in range(5)]
    store.flush()
    stats, num_kept = store.stats(), 5 - missing
    assert stats.host_bytes == num_kept * NBYTES
    assert [handle.record.state for handle in handles] == missing * [State.DISK] + num_kept * [State.HOST]
    assert (stats.written_bytes > 0) == missing


def test_outstanding_memory_is_counted_until_it_comes_back(make_store: MakeStore) -> None:
    store = make_store(staging_bytes=4 * NBYTES)
    handles = [store.put(_tensor(i)) for i in range(3)]
    store.flush()
    results = [store.get(handle) for handle in handles]
    assert store.stats().lent_bytes == 0
    del handles
    assert store.stats().lent_bytes == 3 * NBYTES
    assert store.stats().staging_used_bytes == 0
    results.pop()
    assert store.stats().lent_bytes == 2 * NBYTES
    assert [torch.equal(result, _tensor(i)) for i, result in enumerate(results)] == [True, True]
    del results
    assert store.stats().lent_bytes == 0


# --- the disk's budget --------------------------------------------------------------------------------------------


def _fill(store: TierStore, nbytes: int = NBYTES) -> tuple[list[Handle], StoreFullError]:
    handles: list[Handle] = []
    for i in range(1000):
        try:
            handles.append(store.put(_tensor(i, nbytes)))
        except StoreFullError as error:
            return handles, error.with_traceback(None)
    raise AssertionError("it took everything")


@pytest.mark.parametrize("inline_bytes", [0, None], ids=["extents", "LMDB"])
@pytest.mark.parametrize("budgets", [(0, 0), (3 * NBYTES, 0), (0, 3 * NBYTES), (2 * NBYTES, 2 * NBYTES)])
def test_disk_full_is_told_with_figures_and_loses_nothing(
    make_store: MakeStore, budgets: tuple[int, int], inline_bytes: int | None
) -> None:
    store = make_store(
        host_bytes=budgets[0], staging_bytes=budgets[1], disk_bytes=8 * 40_960, inline_bytes=inline_bytes
    )
    handles, error = _fill(store)
    assert error.needed_bytes == NBYTES
    assert error.disk_budget_bytes == 8 * 40_960
    assert error.host_budget_bytes == budgets[0]
    assert 0 < error.disk_bytes <= error.disk_budget_bytes
    assert error.host_bytes <= budgets[0]
    stats = store.stats()
    assert (stats.disk_bytes, stats.live_handles) == (error.disk_bytes, len(handles))
    for i, handle in enumerate(handles):
        assert torch.equal(store.get(handle), _tensor(i))
    assert store.stats().host_bytes_peak <= budgets[0]
    assert store.stats().kept_bytes["alive elsewhere"] == 0


def test_disk_full_collects_cycles_before_it_gives_up(make_store: MakeStore) -> None:
    store = make_store(disk_bytes=4 * 40_960, staging_bytes=NBYTES, inline_bytes=0)
    gc.collect()
    gc.disable()
    try:
        for i in range(30):
            cycle: list[object] = [store.put(_tensor(i))]
            cycle.append(cycle)
    finally:
        gc.enable()


# --- what need not be written is not ------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_caching_allocator")
def test_free_pages_of_restored_tensors_are_kept_for_reuse_and_count_against_the_budget(make_store: MakeStore) -> None:
    mib = 2**20
    store = make_store(host_bytes=8 * mib, staging_bytes=4 * mib)
    inside = inspect(store)
    held, cached = [], []

    def look(tensor: torch.Tensor) -> bool:
        with inside.lock:
            host_bytes = min(inside.window("host").used_bytes + inside.pending_bytes, 8 * mib)
            held.append(host_bytes + inside.window("staging").used_bytes + inside.slab.cached_bytes)
        cached.append(inside.slab.cached_bytes)
        return True

    x = torch.ones(2 * mib // 4, requires_grad=True)
    for _ in range(2):
        with tiered_offload(store, select=look):
            y = x
            for _ in range(16):
                y = (y * y.exp()).cos()
        y.sum().backward()
    handles = []
    for number in range(4):
        look(x)
        handles.append(store.put(_tensor(number, 2 * mib)))
    look(x)
    assert max(cached) > 4 * mib, "what the host window leaves free is not used"
    assert max(held) <= 12 * mib


def test_tensor_larger_than_the_whole_disk_budget_is_told_so(make_store: MakeStore) -> None:
    store = make_store(host_bytes=0, staging_bytes=0, disk_bytes=NBYTES // 2, inline_bytes=0, codec="none")
    _handles, error = _fill(store)
    assert error.reason == "that is more than the whole disk budget"
