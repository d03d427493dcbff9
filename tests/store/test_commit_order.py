"""Where records outlive the process: an answer to a write waits for the index, and the space of what was discarded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.store.disk_conformance import PLAIN, random_bytes
from tierstore.disk.home import NamedHome
from tierstore.disk.index import Index
from tierstore.disk.local import LocalDisk

SECONDS = 20.0
NUM_BYTES = 2**20
Apply = Callable[..., list[Any]]


class Gate:
    """Before each batch of the index, while it is shut."""

    def __init__(self) -> None:
        self._is_open, self._is_reached = threading.Event(), threading.Event()
        self._is_open.set()

    def shut(self) -> None:
        self._is_open.clear()
        self._is_reached.clear()

    def open(self) -> None:
        self._is_open.set()

    async def reached(self) -> None:
        """A batch stands before it."""
        assert await asyncio.to_thread(self._is_reached.wait, SECONDS)

    def before(self, apply: Apply) -> Apply:
        def gated(*arguments: Any) -> list[Any]:
            self._is_reached.set()
            assert self._is_open.wait(SECONDS)
            return apply(*arguments)

        return gated


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr(Index, "apply", gate.before(Index.apply))
    return gate


def with_tier(directory: Path, gate: Gate, test: Callable[[LocalDisk], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        with ThreadPoolExecutor(4) as executor:
            tier = LocalDisk(
                directory,
                disk_bytes=64 * NUM_BYTES,
                inline_bytes=4096,
                codec="none",
                checksum=True,
                executor=executor,
                home=NamedHome(directory),
            )
            try:
                async with asyncio.timeout(SECONDS):
                    await test(tier)
            finally:
                gate.open()
                await tier.close()

    uvloop.run(run())


@pytest.mark.parametrize("num_bytes", [100, NUM_BYTES], ids=["value", "extent"])
def test_write_is_done_when_the_index_has_committed(tmp_path: Path, gate: Gate, num_bytes: int) -> None:
    async def test(tier: LocalDisk) -> None:
        gate.shut()
        writing = asyncio.ensure_future(tier.write(1, memoryview(random_bytes(num_bytes)), PLAIN))
        await gate.reached()
        assert not (await asyncio.wait((writing,), timeout=0.05))[0], "a longer wait shows no less"
        gate.open()
        assert (await writing).stored_bytes >= num_bytes

    with_tier(tmp_path, gate, test)


def test_space_of_a_discarded_record_is_free_when_its_deletion_has_committed(tmp_path: Path, gate: Gate) -> None:
    async def test(tier: LocalDisk) -> None:
        await tier.write(1, memoryview(random_bytes(NUM_BYTES)), PLAIN)
        gate.shut()
        discarding = asyncio.ensure_future(tier.discard((1,)))
        await gate.reached()
        assert tier.usage().disk_bytes == NUM_BYTES
        gate.open()
        await discarding
        assert tier.usage().disk_bytes == 0

    with_tier(tmp_path, gate, test)
