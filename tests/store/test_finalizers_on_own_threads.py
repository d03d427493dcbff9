"""Garbage may be collected on a store's own thread: a finalizer there is refused what would wait for that thread."""

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.inspect_store import inspect
from tierstore import StoreBusyError, tiered_offload

NUM_ELEMENTS = 2**18
LIMIT_SECONDS = 60
REFUSED = "on a thread of a store"


@pytest.fixture
def garbage_at_once() -> Iterator[None]:
    """Where garbage collection is enabled, each thread that makes an object collects."""
    threshold = gc.get_threshold()
    gc.disable()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*threshold)
    gc.enable()


class Garbage:
    """A cycle whose finalizer acts on a thread with that name; elsewhere, or if it is to act again, it is reborn."""

    def __init__(self, name: str, act: Callable[[], bool]) -> None:
        self._itself = self
        self._name, self._act = name, act

    def __del__(self) -> None:
        if not (threading.current_thread().name.startswith(self._name) and self._act()):
            Garbage(self._name, self._act)


def function(inputs: torch.Tensor) -> torch.Tensor:
    value = inputs * 2
    for _ in range(6):
        value = value.sin()
    return value.sum()


def outcome_of(call: Callable[[], object]) -> str:
    try:
        call()
    except StoreBusyError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - to be shown
        return repr(error)
    return "done"


@pytest.mark.usefixtures("garbage_at_once", "no_caching_allocator", "no_native_threads")
@pytest.mark.timeout(LIMIT_SECONDS)
@pytest.mark.parametrize("name", ["tierstore-io", "tierstore-loop", "tierstore-trace", "tierstore-memory"])
def test_finalizer_on_a_thread_of_the_store_is_refused_what_waits(make_store: Any, tmp_path: Path, name: str) -> None:
    store = make_store(host_bytes=0, staging_bytes="1MiB", return_memory="always")
    other = make_store(host_bytes=0, staging_bytes="1MiB")
    values = torch.arange(float(NUM_ELEMENTS))
    on_disk, elsewhere = store.put(values.clone()), other.put(values.clone())
    inputs = torch.ones(NUM_ELEMENTS, requires_grad=True)
    kept: list[object] = []
    outcomes: dict[str, str] = {}
    acted = threading.Event()

    def forward() -> torch.Tensor:
        with tiered_offload(store, min_bytes=0):
            return function(inputs)

    def fill() -> None:
        kept.extend(store.put(values.clone()) for _ in range(1000))

    def act() -> bool:
        found = {"fill": outcome_of(fill)}
        if "in the middle of another call" in found["fill"]:
            return False
        outcomes.update(
            found,
            flush=outcome_of(store.flush),
            get=outcome_of(lambda: store.get(on_disk)),
            forward=outcome_of(forward),
            backward=outcome_of(loss.backward),
            trace=outcome_of(lambda: other.trace(tmp_path / "other").__enter__()),
            other_store=outcome_of(lambda: other.get(elsewhere)),
            stats=outcome_of(store.stats),
        )
        kept.clear()
        acted.set()
        return True

    with store.trace(tmp_path / "trace"):
        loss = forward()
        store.flush()
        other.flush()
        Garbage(name, act)
        while not acted.is_set():
            store.put(values.clone())
            gc.enable()
            acted.wait(0.1)  # meanwhile only the store's threads make objects
            gc.disable()
        done = {what for what, outcome in outcomes.items() if outcome == "done"}
        assert done == {"stats"}
        assert all(REFUSED in outcome for what, outcome in outcomes.items() if what not in done), outcomes
        assert torch.equal(store.get(on_disk), values)
        assert torch.equal(other.get(elsewhere), values)
        loss.backward()
    gradient = inputs.grad
    inputs.grad = None
    function(inputs).backward()
    assert gradient is not None
    assert torch.equal(gradient, inputs.grad)


@pytest.mark.timeout(LIMIT_SECONDS)
def test_finalizer_that_interrupts_one_store_and_calls_another_never_waits_for_its_lock(make_store: Any) -> None:
    """Two threads, each in the middle of a call of one store, call the other: both would wait for ever."""
    stores = [make_store(host_bytes=0), make_store(host_bytes=0)]
    both_are_inside = threading.Barrier(2)
    refused: list[str] = []

    def interrupt(one: int) -> None:
        with inspect(stores[one]).lock:
            both_are_inside.wait(LIMIT_SECONDS)
            refused.append(outcome_of(stores[1 - one].stats))
            refused.append(outcome_of(lambda: stores[1 - one].prefetch([])))
            both_are_inside.wait(LIMIT_SECONDS)

    threads = [threading.Thread(target=interrupt, args=(one,), daemon=True) for one in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert len(refused) == 4
    assert all("in the middle of another call" in outcome for outcome in refused)
    for store in stores:
        handle = store.put(torch.ones(1000))
        assert torch.equal(store.get(handle), torch.ones(1000))
