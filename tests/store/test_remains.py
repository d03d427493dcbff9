"""What is left of an object that has died: in which queue it comes, and that nothing, not even Ctrl-C, loses it."""

from __future__ import annotations

import ctypes
import gc
import operator
import signal
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import MakeStore
from tests.inspect_store import inspect
from tierstore import TierStore, tiered_offload
from tierstore.base.remains import Remains

NBYTES = 2**20


class Mortal:
    """Something to refer to."""


class Number(Remains[Mortal]):
    __slots__ = ("number",)

    def __init__(self, living: Mortal, note_death: Callable[[Number], None], number: int) -> None:
        self.number = number


def test_remains_give_what_they_refer_to_and_come_into_the_queue_when_it_dies() -> None:
    dead: deque[Number] = deque()
    living = Mortal()
    one, other = (Number(living, dead.append, number) for number in (1, 2))
    assert one() is living
    assert not dead
    del living
    assert one() is None
    assert sorted(remains.number for remains in dead) == [1, 2]
    assert {one, other} == set(dead)


def test_remains_of_garbage_come_into_the_queue_if_they_are_held_by_what_is_none() -> None:
    dead: deque[Number] = deque()
    held, own = Mortal(), Mortal()
    remains = Number(held, dead.append, 1)
    for living in (held, own):
        living.me = living  # type: ignore[attr-defined]
    own.remains = Number(own, dead.append, 2)  # type: ignore[attr-defined]
    del held, own, living
    gc.collect()
    assert list(dead) == [remains]


class Interrupt(BaseException):
    """What the handler raises, as that of Ctrl-C does."""


@pytest.fixture
def interrupted() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Calls something that is of C alone while a signal waits to be handled, as after a long backward."""

    def interrupt(*_: object) -> None:
        raise Interrupt

    def call(action: Callable[[], object]) -> None:
        send = partial(getattr(ctypes.PyDLL(None), "raise"), signal.SIGUSR1)  # unlike Python's, handles nothing itself
        with pytest.raises(Interrupt):
            deque(map(operator.call, (send, action)), maxlen=0)

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield call
    signal.signal(signal.SIGUSR1, before)


Interrupted = Callable[[Callable[[], object]], None]


def test_interrupt_where_handles_die_loses_no_release(make_store: MakeStore, interrupted: Interrupted) -> None:
    store = make_store(host_bytes="1MiB")
    handles = [store.put(torch.empty(NBYTES // 4)) for _ in range(3)]
    store.flush()
    interrupted(handles.clear)
    stats = store.stats()
    assert (stats.live_handles, stats.host_bytes) == (0, 0)
    store.flush()
    assert store.stats().disk_bytes == 0


@pytest.mark.parametrize("is_closed", [False, True], ids=["open", "closed"])
def test_interrupt_where_a_store_dies_is_not_lost_nor_is_its_end(
    store_directory: Path, interrupted: Interrupted, is_closed: bool
) -> None:
    stores = [TierStore(store_directory)]
    thread = inspect(stores[0]).thread  # not the engine, which may know what dies
    if is_closed:
        stores[0].close()
    interrupted(stores.clear)
    thread.join(60)
    assert not thread.is_alive()


def _losses(store: TierStore, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    with tiered_offload(store, min_bytes=0):
        return [(weight * 2).exp().sum() for weight in weights]


def test_interrupt_where_a_graph_dies_what_it_had_tracked_is_not_counted(
    make_store: MakeStore, interrupted: Interrupted
) -> None:
    store = make_store(host_bytes="1GiB")
    graph: list[Any] = _losses(store, [torch.randn(256, 256, requires_grad=True) for _ in range(3)])
    assert inspect(store).tracked_bytes == 3 * 256 * 256 * 4
    interrupted(graph.clear)
    store.stats()
    assert inspect(store).tracked_bytes == 0


def _num_misses(store: TierStore, end: Callable[[list[Any]], None]) -> int:
    """Of the second of two backwards through the same graph, in an odd order; `end` lets the first graph go."""
    weights = [torch.randn(256, 256, requires_grad=True) for _ in range(6)]
    for _ in range(2):
        graph: list[Any] = _losses(store, weights)
        store.flush()
        before = store.stats()
        for number in (3, 0, 5, 1, 4, 2):
            graph[number].backward(retain_graph=True)
        misses = store.stats().prefetch_misses - before.prefetch_misses
        end(graph)
    return misses


def test_graph_ends_as_garbage_its_order_is_learned(make_store: MakeStore) -> None:
    store = make_store(host_bytes=0, staging_bytes="3MiB")  # a group takes in none of them

    def end(graph: list[Any]) -> None:
        (reference,) = store._core.of_thread.logs.values()
        log = reference()
        log.me = log
        del log, graph[:]
        gc.collect()

    assert _num_misses(store, end) <= 1
