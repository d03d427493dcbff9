"""The other process of `test_named_layout.py`: `python -m tests.store.named_layout_process COMMAND DIRECTORY`.

check: open, read every record, write more, and keep all; prints a `Report` as JSON.
hold: open, say so, and wait for the end of standard input.
SIGKILL, SIGSEGV, ...: die of this signal where the index is read.
"""

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from tierstore.disk.file_layout import NamedFileLayout
from tierstore.disk.index import Index
from tierstore.disk.local import LocalDisk
from tierstore.disk.tier import Kind
from tierstore.errors import CorruptDataError, StorageIOError

DISK_BYTES = 64 * 2**20


class Report(msgspec.Struct):
    """What `check` found.

    Attributes:
        found: as `FileLayout.found`.
        right: how many records were read bit for bit.
        corrupt: how many were refused by their checksum.
        failed: how many could not be read, written or discarded, because of what LMDB said.
    """

    found: str
    right: int = 0
    corrupt: int = 0
    failed: int = 0


def content_of(key: int) -> bytes:
    """Half of the records fit into the index, the others take an extent; some can be encoded."""
    steps = random.Random(key)
    size = steps.randrange(1, 60_000) if key % 2 else steps.randrange(70_000, 900_000)
    return steps.randbytes(size) if key % 3 else steps.randbytes(64) * (size // 64 + 1)


@asynccontextmanager
async def open_named(directory: Path, codec: str = "none", **options: object) -> AsyncIterator[tuple[str, LocalDisk]]:
    """`found`, and the tier; its files are kept."""
    settings: dict[str, object] = {"disk_bytes": DISK_BYTES, "inline_bytes": 64 * 2**10, "checksum": True}
    with ThreadPoolExecutor(4) as executor:
        layout = NamedFileLayout(directory)
        settings |= {"codec": codec, "executor": executor, "layout": layout} | options
        try:
            disk = LocalDisk(directory, **settings)  # type: ignore[arg-type]
        except BaseException:
            layout.close(keep=True)
            raise
        try:
            yield layout.found, disk
        finally:
            await disk.close(keep=True)


async def read(disk: LocalDisk, key: int) -> bytes:
    destination = memoryview(bytearray(disk.found_locations()[key].logical_bytes))
    await disk.read(key, destination)
    return bytes(destination)


async def _check(directory: Path) -> None:
    async with open_named(directory) as (found, disk):
        report = Report(found)
        for key in disk.found_locations():
            try:
                content = await read(disk, key)
            except CorruptDataError:
                report.corrupt += 1
                continue
            except StorageIOError:
                report.failed += 1
                continue
            if content != content_of(key):
                raise SystemExit(f"record {key} has wrong bytes")
            report.right += 1
        first = max(disk.found_locations(), default=0) + 1
        for key in range(first, first + 10):
            try:
                await disk.write(key, memoryview(content_of(key)), Kind())
            except StorageIOError:
                report.failed += 1
                continue
            if await read(disk, key) != content_of(key):
                raise SystemExit(f"record {key}, just written, has wrong bytes")
            await disk.discard([key])
    print(msgspec.json.encode(report).decode())


async def _hold(directory: Path) -> None:
    async with open_named(directory):
        print("open", flush=True)
        sys.stdin.read()


async def _die(directory: Path, number: signal.Signals) -> None:
    Index.entries = lambda _: os.kill(os.getpid(), number)  # type: ignore[method-assign, assignment, return-value]
    async with open_named(directory):
        pass


if __name__ == "__main__":
    command, directory = sys.argv[1:]
    if command.startswith("SIG"):
        asyncio.run(_die(Path(directory), signal.Signals[command]))
    else:
        asyncio.run({"check": _check, "hold": _hold}[command](Path(directory)))
