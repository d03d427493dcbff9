"""What does the store add to a record's way where the drive takes no time: throughput, and CPU time of each record?

Records lie on a memory-backed file system (tmpfs in /dev/shm) that is opened with O_DIRECT, so that a transfer is one
copy. The floor is bare threads, as many as the store has transfers at the device: the same system calls in the same
file, from the same tensors, into as many buffers as the store reads ahead, and one checksum pass over each record and
way. Records are put and flushed, then each is got once, prefetched some before it is needed and dropped at once, as in
backward.

Passes of store and floor alternate, whoever went second goes first the next time, and the ratio of each pair counts.
The first pair is left out; in it every record is compared with what was put.

A variant that is called native uses the package `tierstore-native`; the others do not, as where it is not installed.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tierstore import TierStore
from tierstore.disk.linux import address_of
from tierstore.disk.native import SWITCH, is_native

from .disk_throughput import LOOKAHEAD, private_buffers, raw_device
from .goals import Goal
from .harness import Benchmark, main_of_one_variant
from .record_cost import Passes

MEMORY_BACKED = Path("/dev/shm")
PASS_BYTES = 2**29
PAGE_BYTES = 4096
NATIVE = ", native"
RECORD_BYTES = {f"{size} MiB{way}": size * 2**20 for way in ("", NATIVE) for size in (1, 4, 16)}
PAIRS = 7
Ways = dict[str, Callable[[], None]]
"""What moves all records, by the name of the way."""

BENCHMARK = Benchmark(
    name="data_plane",
    question="Records on a memory-backed file system, beside threads that make the same system calls and checksums",
    variants=tuple(RECORD_BYTES),
    compare="none",
    rounds=1,  # each figure is a median of pairs
    settings={"pass_bytes": PASS_BYTES, "record_bytes": RECORD_BYTES, "pairs": PAIRS},
    goals=tuple(
        goal
        for variant in RECORD_BYTES
        for way in ("put", "get")
        for goal in (
            Goal(f"{way}, of the bare threads' throughput", f"{way}_to_floor", variant, at_least=0.85),
            Goal(f"CPU of a {way} beyond theirs", f"{way}_beyond_floor_cpu_microseconds", variant, at_most=150),
        )
    ),
    plotted=("put_to_floor", "get_to_floor", "put_beyond_floor_cpu_microseconds", "get_beyond_floor_cpu_microseconds"),
)


class Took(NamedTuple):
    """Seconds of the clock, and of all threads of this process."""

    wall: float
    cpu: float


class Pair(NamedTuple):
    """A pass of the store, and one of the bare threads."""

    store: Took
    floor: Took


def measure(variant: str, scratch: Path) -> dict[str, float]:
    """Medians over the pairs, and the least and the most of their ratios. `scratch` is left alone: it is on a drive."""
    os.environ[SWITCH] = str(int(variant.endswith(NATIVE)))
    if variant.endswith(NATIVE) and not is_native():
        raise ModuleNotFoundError("tierstore-native is not installed: python -m pip install ./native")
    record_bytes = RECORD_BYTES[variant]
    num_records = PASS_BYTES // record_bytes
    with (
        tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=MEMORY_BACKED) as place,
        TierStore(place, host_bytes=0, codec="none", checksum=True) as store,
    ):
        passes = Passes(store, num_records, record_bytes)
        passes.put()
        passes.get(passes.compare)
        segment = store._core.engine.disk.descriptors()[0]  # long enough for all of them, and empty between passes
        sources = [_whole_pages(memoryview(tensor.numpy()).cast("B")) for tensor in passes.tensors]
        buffers = private_buffers(record_bytes, LOOKAHEAD)
        options = {"file": segment, "sources": sources, "has_checksums": True}
        with raw_device(Path(place), num_records, record_bytes, buffers, **options) as floor:
            store_ways = {"put": passes.put, "get": passes.get}
            floor_ways = {"put": floor.spill, "get": floor.restore}
            pairs = [_pairs(store_ways, floor_ways, is_first=number % 2 == 1) for number in range(PAIRS + 1)][1:]
    figures: dict[str, float] = {}
    for way in store_ways:
        figures |= _figures_of(way, [pair[way] for pair in pairs], num_records)
    return figures


def _whole_pages(memory: memoryview) -> memoryview:
    """The pages that lie in this memory as a whole: the kernel copies what is aligned faster."""
    begin = -address_of(memory) % PAGE_BYTES
    return memory[begin : begin + (len(memory) - begin) // PAGE_BYTES * PAGE_BYTES]


def _pairs(store_ways: Ways, floor_ways: Ways, *, is_first: bool) -> dict[str, Pair]:
    """Both ways of one, then both of the other, since they share a file; the store is first, or the floor."""
    if is_first:
        of_store = {way: _took(move) for way, move in store_ways.items()}
        of_floor = {way: _took(move) for way, move in floor_ways.items()}
    else:
        of_floor = {way: _took(move) for way, move in floor_ways.items()}
        of_store = {way: _took(move) for way, move in store_ways.items()}
    return {way: Pair(of_store[way], of_floor[way]) for way in store_ways}


def _took(move: Callable[[], None]) -> Took:
    wall, cpu = time.perf_counter(), time.process_time()
    move()
    return Took(time.perf_counter() - wall, time.process_time() - cpu)


def _figures_of(way: str, pairs: list[Pair], num_records: int) -> dict[str, float]:
    ratios = [floor.wall / store.wall for store, floor in pairs]
    beyond = [1e6 * (store.cpu - floor.cpu) / num_records for store, floor in pairs]
    return {
        f"{way}_gb_per_second": PASS_BYTES / 1e9 / statistics.median(pair.store.wall for pair in pairs),
        f"{way}_to_floor": statistics.median(ratios),
        f"{way}_to_floor_least": min(ratios),
        f"{way}_to_floor_most": max(ratios),
        f"{way}_beyond_floor_cpu_microseconds": statistics.median(beyond),
    }


if __name__ == "__main__":
    main_of_one_variant(measure)
