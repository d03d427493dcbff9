"""Nothing waits for ever: any budget down to zero, tensors larger than all of them, many threads, a slow disk.

A thread that is not done within a minute fails the test, after the stacks of all threads were printed.
"""

from __future__ import annotations

import faulthandler
import itertools
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.census import Census
from tests.testing.faulty_step import assert_nothing_is_held, flush_to_the_end
from tierstore import StoreClosedError, tiered_offload
from tierstore.testing import FaultPlan, FaultyStore, Late, Latency, Rule

NUM_THREADS = 5
SIDE = 64
NBYTES = SIDE * SIDE * 4
BUDGETS = (0, NBYTES - 1, NBYTES, 3 * NBYTES)
SLOW = FaultPlan.of(
    Rule(("write", "read", "discard"), Latency(0.001, "exponential")),
    Rule(("write", "read"), Late(2), probability=0.3),
)

pytestmark = pytest.mark.timeout(100)
Work = Callable[[FaultyStore, int], None]


def train(store: FaultyStore, number: int) -> None:
    """Two steps; the first saved tensor is larger than every budget."""
    torch.manual_seed(number)
    weights = [torch.randn(SIDE, SIDE, requires_grad=True) for _ in range(4)]
    large = torch.randn(4 * SIDE, SIDE)

    def loss_of() -> torch.Tensor:
        hidden = large
        for weight in weights:
            hidden = (hidden @ weight).tanh()
        return hidden.square().sum()

    expected = torch.autograd.grad(loss_of(), weights)
    for _ in range(2):
        with tiered_offload(store, min_bytes=0):
            loss = loss_of()
        found = torch.autograd.grad(loss, weights)
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
        del loss


def put_and_get(store: FaultyStore, number: int) -> None:
    """Handles of all sizes, held many at once, got in any order, flushed in between."""
    draw = random.Random(number)
    held = []
    for turn in range(8):
        content = torch.full((draw.choice((1, NBYTES // 4, NBYTES)),), float(turn))
        held.append((store.put(content.clone()), content))
        store.prefetch([handle for handle, _ in held])
        if turn % 3 == 2:
            store.flush()
        handle, content = draw.choice(held)
        assert torch.equal(store.get(handle), content)
    draw.shuffle(held)
    for handle, content in held:
        assert torch.equal(store.get(handle), content)


WORK: dict[str, Work] = {"train": train, "put and get": put_and_get}


@pytest.mark.parametrize(("host_bytes", "staging_bytes"), list(itertools.product(BUDGETS, BUDGETS)))
def test_any_budget_and_many_threads_on_a_slow_disk_end(
    store_directory: Path, census: Census, host_bytes: int, staging_bytes: int
) -> None:
    with FaultyStore(
        store_directory, SLOW, host_bytes=host_bytes, staging_bytes=staging_bytes, disk_bytes="1GiB", codec="none"
    ) as store:
        works = list(WORK.values())
        at_once(store, lambda number: works[number % len(works)](store, number))
        flush_to_the_end(store)
        assert store.stats().host_bytes_peak <= host_bytes
        assert_nothing_is_held(store)
    census.count("deadlock freedom", "pairs of budgets", 1)


def test_close_ends_every_wait_on_a_slow_disk(store_directory: Path) -> None:
    """Threads that wait for room and for bytes are told when the store is closed under them."""
    store = FaultyStore(store_directory, host_bytes=0, staging_bytes=NBYTES, disk_bytes="1GiB", codec="none")
    handles = [store.put(torch.full((NBYTES // 4,), float(number))) for number in range(8)]
    store.flush()
    store.faults.set(FaultPlan.of(Rule(("write", "read"), Latency(0.05))))
    is_closing = threading.Event()

    def work(number: int) -> None:
        try:
            for turn in itertools.count():
                if turn == 2:
                    is_closing.set()
                store.get(handles[(number + turn) % len(handles)])
                store.put(torch.ones(NBYTES // 4))
        except StoreClosedError:
            pass

    def close() -> None:
        assert is_closing.wait(60)
        store.close()

    at_once(store, lambda number: work(number) if number else close())


def at_once(store: FaultyStore, work: Callable[[int], None]) -> None:
    """On some threads, begun together; what any of them raises is raised, after the store was closed under the rest."""
    barrier = threading.Barrier(NUM_THREADS)

    def begin(number: int) -> None:
        barrier.wait(60)
        work(number)

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        try:
            for future in [threads.submit(begin, number) for number in range(NUM_THREADS)]:
                future.result(60)
        except BaseException:
            faulthandler.dump_traceback(sys.__stderr__ or 2)
            store.close()  # ends every wait, and so the threads
            raise
