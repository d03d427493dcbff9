"""What does the store add to a record's way where the drive takes no time: throughput, and CPU time of each record?

Records lie on a memory-backed file system (tmpfs in /dev/shm) that is opened with O_DIRECT, so that a transfer is one
copy. The floor is bare threads, as many as the store has transfers at the device: the same system calls in the same
file, from and into the same memory, and one checksum pass over each record and way. Passes of store and floor
alternate, and the ratio of each pair counts, but for the first. Waits are voluntary switches of all threads, for each
record.

A variant that is called native uses the package `tierstore-native`; the others do not, as where it is not installed.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from tierstore import TierStore
from tierstore.disk.linux import address_of
from tierstore.disk.native import SWITCH, is_native

from .disk_throughput import LOOKAHEAD, check, mover_of, random_tensors
from .goals import Goal
from .harness import Benchmark
from .parties import Figures, lap_of
from .raw_device import first_segment, private_buffers, raw_device

MEMORY_BACKED = Path("/dev/shm")
PASS_BYTES = 2**29
PAGE_BYTES = 4096
NATIVE = ", native"
LEAST_OF_FLOOR = {1: {"put": 0.7, "get": 0.5}, 4: {"put": 0.85, "get": 0.7}, 16: {"put": 0.9, "get": 0.8}}
MOST_WAITS = {1: {"get": 6}}
"""Both by the size of a record in MiB."""
RECORD_BYTES = {f"{size} MiB{way}": size * 2**20 for way in ("", NATIVE) for size in LEAST_OF_FLOOR}
PAIRS = 7

BENCHMARK = Benchmark(
    name="data_plane",
    question="Records on a memory-backed file system, beside threads that make the same system calls and checksums",
    variants=tuple(RECORD_BYTES),
    goals=(
        *(
            goal
            for variant, nbytes in RECORD_BYTES.items()
            for way, least in LEAST_OF_FLOOR[nbytes >> 20].items()
            for goal in (
                Goal(f"{way}, of the bare threads' throughput", f"{way}_to_floor", variant, at_least=least),
                Goal(f"CPU of a {way} beyond theirs", f"{way}_beyond_floor_cpu_microseconds", variant, at_most=150),
            )
        ),
        *(
            Goal(f"waits of a {way}", f"{way}_waits", variant, at_most=most)
            for variant, nbytes in RECORD_BYTES.items()
            for way, most in MOST_WAITS.get(nbytes >> 20, {}).items()
        ),
    ),
    plotted=("put_to_floor", "get_to_floor", "put_beyond_floor_cpu_microseconds", "get_beyond_floor_cpu_microseconds"),
)


def measure(variant: str, scratch: Path) -> Figures:
    """Medians over the pairs, and the least and the most of their ratios. `scratch` is left alone: it is on a drive."""
    os.environ[SWITCH] = str(int(variant.endswith(NATIVE)))
    if variant.endswith(NATIVE) and not is_native():
        raise ModuleNotFoundError("tierstore-native is not installed: python -m pip install ./native")
    record_bytes = RECORD_BYTES[variant]
    tensors = random_tensors(PASS_BYTES // record_bytes, record_bytes)

    def compare(got: Tensor, number: int) -> None:
        if not torch.equal(got, tensors[number]):
            raise RuntimeError(f"record {number} did not come back as it was")

    with (
        tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=MEMORY_BACKED) as place,
        TierStore(place, host_bytes=0, codec="none", checksum=True) as store,
    ):
        checked, ours = mover_of(store, tensors, compare), mover_of(store, tensors, check)
        checked.spill()
        checked.restore()
        segment = first_segment(store)  # long enough for all of them, and empty between passes
        sources = [_whole_pages(memoryview(tensor.numpy())) for tensor in tensors]
        buffers = private_buffers(record_bytes, LOOKAHEAD)
        options = {"file": segment, "sources": sources, "has_checksums": True}
        laps = []
        with raw_device(Path(place), len(tensors), record_bytes, buffers, **options) as floor:
            for number in range(PAIRS + 1):  # both ways of one, then both of the other, since they share a file
                order = (ours, floor) if number % 2 else (floor, ours)
                taken = {each: {"put": lap_of(each.spill), "get": lap_of(each.restore)} for each in order}
                laps.append((taken[ours], taken[floor]))
    figures: Figures = {}
    for way in ("put", "get"):
        figures |= _figures_of(way, [(store[way], floor[way]) for store, floor in laps[1:]], len(tensors))
    return figures


def _whole_pages(memory: memoryview) -> memoryview:
    """The pages that lie in this memory as a whole: the kernel copies what is aligned faster."""
    begin = -address_of(memory) % PAGE_BYTES
    return memory[begin : begin + (len(memory) - begin) // PAGE_BYTES * PAGE_BYTES]


def _figures_of(way: str, pairs: list[tuple[Figures, Figures]], num_records: int) -> Figures:
    ratios = [floor["seconds"] / store["seconds"] for store, floor in pairs]
    beyond = [1e6 * (store["cpu_seconds"] - floor["cpu_seconds"]) / num_records for store, floor in pairs]
    return {
        f"{way}_gb_per_second": PASS_BYTES / 1e9 / statistics.median(store["seconds"] for store, _ in pairs),
        f"{way}_to_floor": statistics.median(ratios),
        f"{way}_to_floor_least": min(ratios),
        f"{way}_to_floor_most": max(ratios),
        f"{way}_beyond_floor_cpu_microseconds": statistics.median(beyond),
        f"{way}_waits": statistics.median(store["waits"] for store, _ in pairs) / num_records,
    }
