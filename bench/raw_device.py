"""What the device itself can do: bare threads with O_DIRECT, as many as the store has transfers at the device."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tierstore.base.defaults import NUM_AT_ONCE
from tierstore.disk.location import record_checksum

Buffer = mmap.mmap | memoryview


class Mover(NamedTuple):
    """One way to keep a set of blocks on disk: all are written, then each is in memory once, and none is kept. `file`:
    the descriptor of the one where they all were, which is empty between; None: there is none."""

    spill: Callable[[], None]
    restore: Callable[[], None]
    file: int | None = None


def first_segment(store: Any) -> int:
    """The descriptor of the file that all records lie in of a `TierStore` with one drive, as long as they fit there."""
    return int(store._core.engine.disk._space.segments[0].file.fileno())


@contextmanager
def raw_device(
    scratch: Path,
    num_blocks: int,
    block_bytes: int,
    buffers: Sequence[Buffer] | None = None,
    file: int | None = None,
    *,
    sources: Sequence[Buffer] | None = None,
    has_checksums: bool = False,
) -> Iterator[Mover]:
    """O_DIRECT into a preallocated file, each transfer of those at once on a thread of its own.

    Args:
        buffers: used again and again, as long as a block, aligned to pages; a multiple of the number of threads, or
            fewer. None: private ones, in huge pages.
        file: open, preallocated and long enough; None: one of its own.
        sources: what is written, by block, aligned to pages; None: the buffers.
        has_checksums: each thread takes the store's checksum of a block before it writes it and after it has read it.
    """
    buffers = private_buffers(block_bytes) if buffers is None else buffers
    num_threads = min(NUM_AT_ONCE, len(buffers))
    if file is None:
        descriptor = os.open(scratch, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
        os.posix_fallocate(descriptor, 0, num_blocks * block_bytes)
    else:
        descriptor = os.dup(file)

    def each(transfer: Callable[[Buffer, int], int], memory: Sequence[Buffer]) -> None:
        """Every thread has every so-many-th block, and buffers of its own."""

        def run(first: int) -> None:
            for number in range(first, num_blocks, num_threads):
                buffer = memory[number % len(memory)]
                if transfer(buffer, number * block_bytes) != len(buffer):
                    raise RuntimeError("a transfer was cut short")

        list(pool.map(run, range(num_threads)))

    def write(buffer: Buffer, offset: int) -> int:
        if has_checksums:
            record_checksum(memoryview(buffer), 0)
        return os.pwrite(descriptor, buffer, offset)

    def read(buffer: Buffer, offset: int) -> int:
        num_bytes = os.preadv(descriptor, [buffer], offset)
        if has_checksums:
            record_checksum(memoryview(buffer), 0)
        return num_bytes

    with ThreadPoolExecutor(num_threads) as pool:
        yield Mover(lambda: each(write, sources or buffers), lambda: each(read, buffers), descriptor)
    os.close(descriptor)


def private_buffers(num_bytes: int, how_many: int = NUM_AT_ONCE, *, pages: int = mmap.MADV_HUGEPAGE) -> list[Buffer]:
    """As many as the store has transfers at the device, or more, full of random bytes. `pages`: advice to the kernel.
    Huge ones are what numpy and the store have: transfers are up to a third faster."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory gets no huge pages
    buffers = [mmap.mmap(-1, num_bytes, flags=private) for _ in range(how_many)]
    for buffer in buffers:
        buffer.madvise(pages)
        buffer.write(os.urandom(num_bytes))
    return buffers
