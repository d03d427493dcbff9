"""What does the drive gain when the window that clients share with the daemon lies in huge pages?

Shared memory is given small pages in the kernel's default, which lie apart; the store asks for the window to be
gathered into huge ones (`tierstore.disk.linux.make_pages_huge`). O_DIRECT moves 16 MiB blocks between a preallocated
file and such a window, as many at once as a store has at the device.

Each variant's window is measured beside one in small pages, pass by pass, whichever went second first the next time:
the ratio of each pair counts. Small pages beside small pages show what such a ratio is worth.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy

from tierstore.base.defaults import NUM_AT_ONCE
from tierstore.disk.linux import make_pages_huge

from .disk_throughput import raw_device
from .harness import Benchmark, main_of_one_variant

BLOCK_BYTES = 16 * 2**20
NUM_BLOCKS = 48
GIGABYTES = NUM_BLOCKS * BLOCK_BYTES / 1e9
PAIRS = 6
SMALL, HUGE = "small pages", "huge pages"

BENCHMARK = Benchmark(
    name="shared_pages",
    question="O_DIRECT from and to shared memory, beside such memory in small pages",
    variants=(SMALL, HUGE),
    compare="none",
    rounds=1,
    settings={"block_bytes": BLOCK_BYTES, "num_blocks": NUM_BLOCKS, "in_flight": NUM_AT_ONCE, "pairs": PAIRS},
    plotted=("write_to_small_pages", "read_to_small_pages"),
)


@contextmanager
def window(pages: str) -> Iterator[list[memoryview]]:
    """Shared memory as a client makes it, full of random bytes: a buffer for each transfer at the device.

    Raises:
        OSError: the kernel gives it no huge pages.
    """
    num_bytes = NUM_AT_ONCE * BLOCK_BYTES
    descriptor = os.memfd_create("tierstore")
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        if pages == HUGE:
            make_pages_huge(descriptor, num_bytes)
        memory = memoryview(mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    finally:
        os.close(descriptor)
    memory[:] = numpy.random.default_rng(0).bytes(num_bytes)
    yield [memory[start : start + BLOCK_BYTES] for start in range(0, num_bytes, BLOCK_BYTES)]


def seconds_of(move: Callable[[], None]) -> float:
    started = time.perf_counter()
    move()
    return time.perf_counter() - started


def measure(variant: str, scratch: Path) -> dict[str, float]:
    """Medians of the passes and of each pair's ratio, after a first pair: the use of disk space is slower first."""
    with (
        window(SMALL) as beside,
        window(variant) as own,
        raw_device(scratch, NUM_BLOCKS, BLOCK_BYTES, beside) as small,
        raw_device(scratch, NUM_BLOCKS, BLOCK_BYTES, own) as ours,
    ):
        moves = {"write": (ours.spill, small.spill), "read": (ours.restore, small.restore)}
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in moves}
        for number in range(PAIRS + 1):
            for name, (move, other) in moves.items():
                if number % 2:
                    seconds[name].append((seconds_of(move), seconds_of(other)))
                else:
                    seconds[name].append((seconds_of(other), seconds_of(move))[::-1])
    figures: dict[str, float] = {}
    for name, (_, *pairs) in seconds.items():
        figures[f"{name}_gb_per_second"] = GIGABYTES / statistics.median(own for own, _ in pairs)
        figures[f"{name}_to_small_pages"] = statistics.median(other / own for own, other in pairs)
    return figures


if __name__ == "__main__":
    main_of_one_variant(measure)
