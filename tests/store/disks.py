"""Disk tiers on a directory, for tests that look at one without a store above it."""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from tierstore.disk.local import LocalDisk

__all__ = ["local_disk"]


@asynccontextmanager
async def local_disk(directory: Path, **options: object) -> AsyncIterator[LocalDisk]:
    """A tier of 64 MiB without a codec, unless told otherwise; closed at the end."""
    settings: dict[str, object] = {
        "disk_bytes": 64 * 2**20,
        "inline_bytes": 64 * 2**10,
        "codec": "none",
        "checksum": True,
    }
    with ThreadPoolExecutor(4) as threads:
        disk = LocalDisk(directory, **({"executor": threads} | settings | options))  # type: ignore[arg-type]
        try:
            yield disk
        finally:
            await disk.close()
