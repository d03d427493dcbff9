"""A drive of a given speed: the disk tier, slowed down to so many bytes per second, reads and writes together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tierstore.store
from tierstore import TierStore
from tierstore.disk.local import LocalDisk
from tierstore.disk.tier import Kind, Stored

__all__ = ["open_paced_store"]


@contextmanager
def open_paced_store(scratch: Path, bytes_per_second: float, **options: Any) -> Iterator[TierStore]:
    """A store in `scratch` whose drive moves no more than that."""

    class PacedDisk(LocalDisk):
        _free_at = 0.0

        async def _take_turn(self, num_bytes: int) -> None:
            self._free_at = max(self._free_at, time.perf_counter()) + num_bytes / bytes_per_second
            await asyncio.sleep(self._free_at - time.perf_counter())

        async def write(self, key: int, source: memoryview, kind: Kind) -> Stored:
            await self._take_turn(len(source))
            return await super().write(key, source, kind)

        async def read(self, key: int, destination: memoryview) -> int:
            await self._take_turn(len(destination))
            return await super().read(key, destination)

    tierstore.store.LocalDisk = PacedDisk  # type: ignore[misc]
    with TierStore(scratch, **options) as store:
        yield store
