"""Where should a value of which size live: in LMDB, or in an extent? And what does one cost in CPU time, by its size?

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
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from tierstore import TierStore
from tierstore.disk.linux import mapping_around
from tierstore.disk.local import LocalDisk

from .disk_throughput import mover_of, random_tensors
from .goals import Goal
from .harness import Benchmark
from .parties import Figures, lap_of

KIB = 2**10
SIZES = tuple(KIB * size for size in (4, 16, 32, 64, 128, 256, 1024, 16384))
PASS_BYTES = 64 * 2**20
MOST_VALUES = 512
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


def measure(process: str, scratch: Path) -> dict[str, Figures]:
    """Of each layout, for each size: throughput both ways and of the round trip, and CPU seconds per gigabyte of it."""
    figures: dict[str, Figures] = {layout: {} for layout in LAYOUTS}
    draw = random.Random(0)
    for size_bytes in SIZES:
        tensors = random_tensors(max(1, min(MOST_VALUES, PASS_BYTES // size_bytes)), size_bytes)
        for layout, passes in passes_of(tensors, scratch, draw).items():
            figures[layout] |= figures_of(passes[1:], size_bytes, len(tensors) * size_bytes / 1e9)
    return figures


def passes_of(tensors: list[Tensor], scratch: Path, draw: random.Random) -> dict[str, list[tuple[Figures, Figures]]]:
    passes: dict[str, list[tuple[Figures, Figures]]] = {layout: [] for layout in LAYOUTS}
    with ExitStack() as opened:
        stores = {
            layout: opened.enter_context(TierStore(scratch, host_bytes=0, codec="none", **options))
            for layout, options in LAYOUTS.items()
        }
        movers = {layout: mover_of(store, tensors) for layout, store in stores.items()}
        for _ in range(PASSES):
            for layout in draw.sample(list(LAYOUTS), len(LAYOUTS)):
                put = lap_of(movers[layout].spill)
                forget_cached(stores[layout])
                passes[layout].append((put, lap_of(movers[layout].restore)))
    return passes


def figures_of(passes: list[tuple[Figures, Figures]], size_bytes: int, gigabytes: float) -> Figures:
    put, get = min(passes, key=lambda each: each[0]["seconds"] + each[1]["seconds"])
    size = f"{size_bytes // KIB}_KiB"
    return {
        f"put_{size}_gb_per_second": gigabytes / put["seconds"],
        f"get_{size}_gb_per_second": gigabytes / get["seconds"],
        f"round_trip_{size}_gb_per_second": gigabytes / (put["seconds"] + get["seconds"]),
        f"round_trip_{size}_cpu_seconds_per_gb": (put["cpu_seconds"] + get["cpu_seconds"]) / gigabytes,
    }
