"""Where records outlive the process: an answer to a write waits for the index, and the space of what was discarded."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.store.disk_conformance import PLAIN, random_bytes
from tests.store.disks import local_disk
from tierstore.disk.file_layout import NamedFileLayout
from tierstore.disk.index import Index
from tierstore.disk.local import LocalDisk

SECONDS = 20.0
pytestmark = pytest.mark.timeout(SECONDS)
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


@pytest.fixture
async def tier(tmp_path: Path, gate: Gate) -> AsyncIterator[LocalDisk]:
    async with local_disk(tmp_path, inline_bytes=4096, layout=NamedFileLayout(tmp_path)) as tier:
        yield tier
        gate.open()


@pytest.mark.parametrize("num_bytes", [100, NUM_BYTES], ids=["value", "extent"])
async def test_write_is_done_when_the_index_has_committed(tier: LocalDisk, gate: Gate, num_bytes: int) -> None:
    gate.shut()
    writing = asyncio.ensure_future(tier.write(1, memoryview(random_bytes(num_bytes)), PLAIN))
    await gate.reached()
    assert not (await asyncio.wait((writing,), timeout=0.05))[0], "a longer wait shows no less"
    gate.open()
    assert (await writing).stored_bytes >= num_bytes


async def test_space_of_a_discarded_record_is_free_when_its_deletion_has_committed(tier: LocalDisk, gate: Gate) -> None:
    await tier.write(1, memoryview(random_bytes(NUM_BYTES)), PLAIN)
    gate.shut()
    discarding = asyncio.ensure_future(tier.discard((1,)))
    await gate.reached()
    assert tier.usage().disk_bytes == NUM_BYTES
    gate.open()
    await discarding
    assert tier.usage().disk_bytes == 0
