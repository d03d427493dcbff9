"""A record brought to a state of `tierstore/residency/handle.py`, and held there."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.inspect_store import inspect
from tierstore import TierStore
from tierstore.ledger.state import State
from tierstore.residency.handle import Record
from tierstore.testing import SimulatedCopies

HELD_SECONDS = 60.0
NUM_ELEMENTS = 200_000


def content() -> torch.Tensor:
    return torch.arange(NUM_ELEMENTS, dtype=torch.float32) + 0.5


class Held:
    """What was brought there; `handle` is None where it is gone by then, `go_on` lets the engine's loop run again."""

    def __init__(self, record: Record, handle: Any, go_on: threading.Event) -> None:
        self.record, self.handle, self.go_on = record, handle, go_on


class _Gate:
    """Holds the loop inside of a coroutine of the disk tier: in it, or when it is done."""

    def __init__(self, store: TierStore, method: str, when: str) -> None:
        self._disk = inspect(store).disk
        self._method, self._when = method, when
        self._call: Callable[..., Any] = getattr(self._disk, method)
        self.reached, self.go_on = threading.Event(), threading.Event()
        setattr(self._disk, method, self._held)

    async def _held(self, *arguments: Any) -> Any:
        task = asyncio.get_running_loop().create_task(self._call(*arguments))
        if self._when == "begun":
            for _ in range(3):  # its job is with an I/O thread, or its request on the way
                await asyncio.sleep(0)
        elif self._when == "done":
            await task
        setattr(self._disk, self._method, self._call)
        self.reached.set()
        self.go_on.wait(HELD_SECONDS)
        return await task

    def wait(self) -> None:
        assert self.reached.wait(HELD_SECONDS)


def _offloading(store: TierStore) -> Iterator[Held]:
    copies, go_on = inspect(store).copies, threading.Event()
    assert isinstance(copies, SimulatedCopies)
    copies._queue.put(lambda: go_on.wait(HELD_SECONDS) and None)
    handle = store.put(content())
    yield Held(handle.record, handle, go_on)


def _queued(store: TierStore) -> Iterator[Held]:
    go_on = inspect(store).stall()
    handle = store.put(content())
    yield Held(handle.record, handle, go_on)


def _held_write(store: TierStore, when: str) -> Iterator[Held]:
    gate = _Gate(store, "write", when)
    handle = store.put(content())
    gate.wait()
    yield Held(handle.record, handle, gate.go_on)


def _disk(store: TierStore) -> Iterator[Held]:
    handle = store.put(content())
    store.flush()
    yield Held(handle.record, handle, threading.Event())


def _held_read(store: TierStore, when: str) -> Iterator[Held]:
    handle = store.put(content())
    store.flush()
    gate = _Gate(store, "read", when)
    store.prefetch([handle])
    gate.wait()
    yield Held(handle.record, handle, gate.go_on)


def _doomed(store: TierStore) -> Iterator[Held]:
    gate = _Gate(store, "write", "begun")
    handle = store.put(content())
    gate.wait()
    record = handle.record
    del handle
    store.stats()
    yield Held(record, None, gate.go_on)


def _closed(store: TierStore) -> Iterator[Held]:
    gate = _Gate(store, "write", "begun")
    handle = store.put(content())
    gate.wait()
    closing = threading.Thread(target=store.close, daemon=True)
    closing.start()
    assert inspect(store).wait_until_closed(HELD_SECONDS)
    yield Held(handle.record, handle, gate.go_on)
    gate.go_on.set()
    closing.join(HELD_SECONDS)


_WAYS: dict[str, tuple[State, Callable[[TierStore], Iterator[Held]]]] = {
    "offloading": (State.OFFLOADING, _offloading),
    "queued": (State.QUEUED, _queued),
    "writing": (State.WRITING, lambda store: _held_write(store, "begun")),
    "writing, stored": (State.WRITING, lambda store: _held_write(store, "done")),
    "disk": (State.DISK, _disk),
    "reading": (State.READING, lambda store: _held_read(store, "begun")),
    "reading, loaded": (State.READING, lambda store: _held_read(store, "done")),
    "doomed": (State.DOOMED, _doomed),
    "closed": (State.CLOSED, _closed),
}

STATES = list(_WAYS)
"""Those in which something is on disk, or on its way."""


def copies_for(way: str) -> SimulatedCopies | None:
    """An accelerator for the store that is brought there, simulated."""
    return SimulatedCopies() if way == "offloading" else None


@contextmanager
def held_at(store: TierStore, way: str) -> Iterator[Held]:
    """Bring a record of `content()` there; what holds it is let go of at the end."""
    state, bring = _WAYS[way]
    steps = bring(store)
    held = next(steps)
    try:
        assert held.record.state is state, held.record
        yield held
    finally:
        held.go_on.set()
        for _ in steps:
            pass
