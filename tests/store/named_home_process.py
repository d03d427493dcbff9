"""The other process of `test_named_home.py`: `python -m tests.store.named_home_process COMMAND DIRECTORY ...`.

write DIRECTORY CODEC SEED FIRST_KEY: write and discard until killed; says each step before and after, a line each.
check DIRECTORY CODEC: open, read every record, write more, and keep all; prints a `Report` as JSON.
hold DIRECTORY: open, say so, and wait for the end of standard input.
die DIRECTORY: die where the index is read.
commit DIRECTORY: commit batches to an index until killed; says the number of each after it.
"""

import asyncio
import itertools
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from tierstore.disk.home import NamedHome
from tierstore.disk.index import Index, Put
from tierstore.disk.local import LocalDisk
from tierstore.disk.tier import Kind
from tierstore.errors import CorruptDataError, StorageIOError

DISK_BYTES = 64 * 2**20
_NUM_WORKERS = 6
_LIVE_EACH = 12  # records of a worker: some 30 MiB together


class Report(msgspec.Struct):
    """What `check` found.

    Attributes:
        found: as `Home.found`.
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
        home = NamedHome(directory)
        settings |= {"codec": codec, "executor": executor, "home": home} | options
        try:
            disk = LocalDisk(directory, **settings)  # type: ignore[arg-type]
        except BaseException:
            home.close(keep=True)
            raise
        try:
            yield home.found, disk
        finally:
            await disk.close(keep=True)


async def read(disk: LocalDisk, key: int) -> bytes:
    destination = memoryview(bytearray(disk.found_locations()[key].logical_bytes))
    await disk.read(key, destination)
    return bytes(destination)


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def _write_until_killed(directory: Path, codec: str, seed: int, first_key: int) -> None:
    keys = itertools.count(first_key)

    async def work(disk: LocalDisk, steps: random.Random) -> None:
        live: list[int] = []
        while True:
            if len(live) >= _LIVE_EACH:
                key = live.pop(steps.randrange(len(live)))
                say("discarding", key)
                await disk.discard([key])
                say("discarded", key)
            key = next(keys)
            say("writing", key)
            await disk.write(key, memoryview(content_of(key)), Kind())
            say("written", key)
            live.append(key)

    async with open_named(directory, codec) as (found, disk):
        say("open", found)
        for key in sorted(disk.found_locations())[: -_NUM_WORKERS * _LIVE_EACH // 3]:
            say("discarding", key)
            await disk.discard([key])
            say("discarded", key)
        await asyncio.gather(*(work(disk, random.Random(seed * 100 + number)) for number in range(_NUM_WORKERS)))


async def _check(directory: Path, codec: str) -> Report:
    async with open_named(directory, codec) as (found, disk):
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
    return report


async def _hold(directory: Path) -> None:
    async with open_named(directory):
        say("open")
        sys.stdin.read()


async def _die(directory: Path) -> None:
    Index.entries = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment, return-value]
    async with open_named(directory):
        pass


def _commit_until_killed(directory: Path) -> None:
    from tests.store.test_index import location

    with open(directory / "index", "r+b" if (directory / "index").exists() else "w+b", buffering=0) as file:
        index = Index(file, 2**30)  # type: ignore[arg-type]
        for number in itertools.count(len(index.entries().locations) // 1000):
            index.apply([Put(number * 1000 + each, location(500), bytes(500)) for each in range(1000)])
            say(number)


def main() -> None:
    """Run the command of the command line."""
    command, directory, *rest = sys.argv[1:]
    if command == "write":
        asyncio.run(_write_until_killed(Path(directory), rest[0], int(rest[1]), int(rest[2])))
    elif command == "check":
        print(msgspec.json.encode(asyncio.run(_check(Path(directory), *rest))).decode())
    elif command == "commit":
        _commit_until_killed(Path(directory))
    else:
        asyncio.run({"hold": _hold, "die": _die}[command](Path(directory)))


if __name__ == "__main__":
    main()
