"""Where should a value of which size live: in LMDB, or in an extent?

Incompressible values of one size are put, flushed, and got back in the same order, some ahead of their use, by stores
that differ only in `inline_bytes`: everything in LMDB (None), everything in extents (0), and the default. Before they
are got, what the page cache holds of LMDB's file is written out and dropped: in training others need that memory, and
extents are never in it. The stores are open at once in one process and take turns, a pass each, in an order that is
drawn: small values take as long as Python does, which is fast in one second and slow in the next. The best pass after
the first counts; each moves the same bytes in both directions.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from tierstore import TierStore
from tierstore.disk.linux import mapping_around
from tierstore.disk.local import LocalDisk

from .goals import Goal
from .harness import Benchmark, main_of_one_variant

KIB = 2**10
SIZES = tuple(KIB * size for size in (4, 16, 32, 64, 128, 256, 1024, 16384))
PASS_BYTES = 64 * 2**20
MOST_VALUES = 512
LOOKAHEAD = 16
PASSES = 4
LAYOUTS: dict[str, dict[str, int | None]] = {
    "default": {},
    "LMDB only": {"inline_bytes": None},
    "extents only": {"inline_bytes": 0},
}

BENCHMARK = Benchmark(
    name="disk_layouts",
    question="Values of one size in LMDB, in extents, or as by default: put + flush, and get",
    variants=tuple(LAYOUTS),
    processes={"by turns": tuple(LAYOUTS)},
    compare="none",
    rounds=1,  # each figure is the best of several passes
    settings={"sizes_bytes": SIZES, "pass_bytes": PASS_BYTES, "most_values": MOST_VALUES, "passes": PASSES},
    plotted=tuple(f"round_trip_{size // KIB}_KiB_gb_per_second" for size in SIZES[1::2]),
    goals=tuple(
        Goal(
            f"put and get of {size // KIB} KiB",
            f"round_trip_{size // KIB}_KiB_gb_per_second",
            "default",
            at_least=0.8,
            of=("LMDB only", "extents only"),
        )
        for size in SIZES
    ),
)


class Pass(NamedTuple):
    """Seconds, and CPU seconds of all threads."""

    put_seconds: float
    put_cpu_seconds: float
    get_seconds: float
    get_cpu_seconds: float


def random_tensors(size_bytes: int) -> list[Tensor]:
    """Incompressible uint8 tensors of shape [size_bytes]."""
    source = numpy.random.default_rng(size_bytes)
    num_values = max(1, min(MOST_VALUES, PASS_BYTES // size_bytes))
    return [torch.from_numpy(source.integers(0, 2**63, size_bytes // 8)).view(torch.uint8) for _ in range(num_values)]


def run_pass(store: TierStore, tensors: list[Tensor]) -> Pass:
    """Put all, forget what is cached, get all."""
    times = [_now()]
    handles = [store.put(tensor) for tensor in tensors]
    store.flush()
    times.append(_now())
    forget_cached(store)
    times.append(_now())
    store.prefetch(handles[:LOOKAHEAD])
    for number, tensor in enumerate(tensors):
        got = store.get(handles[number])
        store.prefetch(handles[number + LOOKAHEAD : number + LOOKAHEAD + 1])
        handles[number] = None  # type: ignore[call-overload]
        if (got[0], got[-1]) != (tensor[0], tensor[-1]):
            raise RuntimeError(f"value {number} did not come back as it was")
        del got
    store.flush()
    times.append(_now())
    (put, put_cpu), (put_end, put_cpu_end), (get, get_cpu), (get_end, get_cpu_end) = times
    return Pass(put_end - put, put_cpu_end - put_cpu, get_end - get, get_cpu_end - get_cpu)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def forget_cached(store: TierStore) -> None:
    """Drop the index's file from the page cache: its pages are mapped, so the map has to let go of them first."""
    disk = store._core.engine.disk
    if not isinstance(disk, LocalDisk):
        raise TypeError("only a local disk has a page cache to forget")
    index = disk._shelf._index
    os.fsync(index.file.fileno())
    found = mapping_around(index._environment.map_start or 0)
    if found is not None:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(found[0]), ctypes.c_size_t(found[1]), mmap.MADV_DONTNEED)
    os.posix_fadvise(index.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(process: str, scratch: Path) -> dict[str, dict[str, float]]:
    """Of each layout, for each size: throughput both ways and of the round trip, and CPU seconds per gigabyte of it."""
    figures: dict[str, dict[str, float]] = {layout: {} for layout in LAYOUTS}
    draw = random.Random(0)
    for size_bytes in SIZES:
        tensors = random_tensors(size_bytes)
        for layout, passes in passes_of(tensors, scratch, draw).items():
            figures[layout] |= figures_of(passes[1:], tensors)
    return figures


def passes_of(tensors: list[Tensor], scratch: Path, draw: random.Random) -> dict[str, list[Pass]]:
    """All passes of each layout."""
    passes: dict[str, list[Pass]] = {layout: [] for layout in LAYOUTS}
    with ExitStack() as opened:
        stores = {
            layout: opened.enter_context(TierStore(scratch, host_bytes=0, codec="none", **options))
            for layout, options in LAYOUTS.items()
        }
        for _ in range(PASSES):
            for layout in draw.sample(list(LAYOUTS), len(LAYOUTS)):
                passes[layout].append(run_pass(stores[layout], tensors))
    return passes


def figures_of(passes: list[Pass], tensors: list[Tensor]) -> dict[str, float]:
    """Of the best of them."""
    best = min(passes, key=lambda each: each.put_seconds + each.get_seconds)
    size_bytes = tensors[0].nbytes
    gigabytes = len(tensors) * size_bytes / 1e9
    size = f"{size_bytes // KIB}_KiB"
    return {
        f"put_{size}_gb_per_second": gigabytes / best.put_seconds,
        f"get_{size}_gb_per_second": gigabytes / best.get_seconds,
        f"round_trip_{size}_gb_per_second": gigabytes / (best.put_seconds + best.get_seconds),
        f"round_trip_{size}_cpu_seconds_per_gb": (best.put_cpu_seconds + best.get_cpu_seconds) / gigabytes,
    }


if __name__ == "__main__":
    main_of_one_variant(measure)
