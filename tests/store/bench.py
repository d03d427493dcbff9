"""A store whose jobs on disk are held still, and threads that wait in it."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from tests.conftest import MakeStore
from tests.inspect_store import inspect
from tests.waiting import until
from tierstore import Handle, TierStore
from tierstore.disk.local import LocalDisk
from tierstore.disk.tier import Kind, Stored


class HeldDisk(LocalDisk):
    """The disk tier, whose writes and reads can be held before they begin."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._loop = asyncio.get_running_loop()
        self._doors = {"write": asyncio.Event(), "read": asyncio.Event()}
        for door in self._doors.values():
            door.set()
        self.began: SimpleQueue[tuple[str, int]] = SimpleQueue()
        self.written: set[int] = set()

    async def write(self, key: int, source: memoryview, kind: Kind) -> Stored:
        self.began.put(("write", key))
        await self._doors["write"].wait()
        stored = await super().write(key, source, kind)
        self.written.add(key)
        return stored

    async def read(self, key: int, destination: memoryview) -> int:
        self.began.put(("read", key))
        await self._doors["read"].wait()
        return await super().read(key, destination)

    def hold(self, what: str) -> None:
        """From now on. Returns when it is so."""
        held = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (self._doors[what].clear(), held.set()))
        assert held.wait(20)

    def release(self) -> None:
        """In one call: once the first door is open, all may come to its end, and the loop is closed."""
        self._loop.call_soon_threadsafe(lambda: [door.set() for door in self._doors.values()])

    def await_begin(self, what: str, handle: Handle) -> None:
        """Until the job of the handle has begun."""
        while self.began.get(timeout=20) != (what, handle.record.key):
            pass


class Bench:
    """A store whose disk can be held, and threads to wait in it."""

    def __init__(self, make_store: MakeStore) -> None:
        self._make_store = make_store
        self._threads = ThreadPoolExecutor(8)
        self._stalls: list[threading.Event] = []
        self._disks: list[HeldDisk] = []

    def open(self, **options: object) -> tuple[TierStore, HeldDisk]:
        store = self._make_store(**options)
        disk = inspect(store).disk
        assert isinstance(disk, HeldDisk)
        self._disks.append(disk)
        return store, disk

    def stall_loop(self, store: TierStore) -> threading.Event:
        """The engine's loop stands still until the event is set: whatever is queued is not begun."""
        self._stalls.append(inspect(store).stall())
        return self._stalls[-1]

    def on_thread(self, store: TierStore, call: Callable[..., Any], *arguments: object) -> Future[Any]:
        """Begins a call that is going to wait; returns when it does."""
        num_waiting = inspect(store).num_waiting
        future = self._threads.submit(call, *arguments)
        until(lambda: inspect(store).num_waiting > num_waiting or future.done())
        assert not future.done(), f"it did not wait: {future}"
        return future

    def end(self) -> None:
        for go_on in self._stalls:
            go_on.set()
        for disk in self._disks:
            with suppress(RuntimeError):  # its loop is closed
                disk.release()
        self._threads.shutdown(wait=False)
