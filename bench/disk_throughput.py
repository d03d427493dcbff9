"""How fast do 16 MiB tensors go to disk and come back, beside what the device itself can do, and at what cost in CPU?

Incompressible bytes. The store spills everything (no host memory, no codec); handles are dropped as backward drops
them. By hand they are kept until the pass ends, and `prefetch` is given all of them once, or the next six before each
`get`. A file per tensor is shown as people use it (what the page cache holds is fast), and with every write synced and
every read from the device.

Every process measures its variant beside the raw device: O_DIRECT in blocks of the same size, as many at once as the
store has at the device. Passes alternate, and the ratio of each pair counts, but for the first. A virtual disk may be
faster in one file than in another, so the raw device writes in the store's own file while that is empty. The raw device
beside itself shows what such a ratio is worth.

What the CPU time beyond raw is made of is told beside: checksums, fresh pages, transfers. What is left is that of the
store's loop, of whoever calls it, and of the jobs' way between threads.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy
import torch
from torch import Tensor

from tierstore import TierStore
from tierstore.disk import records
from tierstore.disk.native import is_native
from tierstore.residency.handle import Handle

from .goals import Goal
from .harness import Benchmark
from .parties import Figures, lap_of
from .raw_device import Mover, first_segment, raw_device

TENSOR_BYTES = 16 * 2**20
NUM_TENSORS = 64
LOOKAHEAD = 8
GIGABYTES = NUM_TENSORS * TENSOR_BYTES / 1e9
PAIRS = {
    "raw device": 3,
    "raw device, another file": 3,
    "tierstore": 6,
    "tierstore, whole list by hand": 4,
    "tierstore, six ahead by hand": 4,
    "file per tensor": 1,
    "file per tensor, synced and cold": 1,
}
PARTS = {"checksums": ("record_checksum",), "fresh_pages": ("populate",), "transfers": ("write_raw", "read_raw")}
"""The functions that `tierstore/disk/records.py` calls in the store's jobs."""

BENCHMARK = Benchmark(
    name="disk_throughput",
    question="Spill and restore of 16 MiB tensors, beside the raw device",
    variants=tuple(PAIRS),
    plotted=("spill_to_raw", "restore_to_raw", "cpu_above_raw_cpu_seconds_per_gb"),
    goals=(
        Goal("spill, of the raw device", "spill_to_raw", "tierstore", at_least=0.95),
        Goal("restore, of the raw device", "restore_to_raw", "tierstore", at_least=0.95),
        Goal("got by hand, all named at once", "restore_to_raw", "tierstore, whole list by hand", at_least=0.95),
        Goal("got by hand, six named before each", "restore_to_raw", "tierstore, six ahead by hand", at_least=0.95),
        Goal("CPU, down and up, beyond raw", "cpu_above_raw_cpu_seconds_per_gb", "tierstore", at_most=0.25),
        Goal("the same, of its two checksum passes", "cpu_above_raw_to_checksums", "tierstore", at_most=1.25),
    ),
)


class JobParts:
    """The CPU time of each part of the store's jobs, by the thread that runs it, for as long as `timed` is entered."""

    def __init__(self) -> None:
        self._cpu_seconds: Counter[str] = Counter()
        self._lock = threading.Lock()

    def timed(self) -> AbstractContextManager[object]:
        originals = {name: (part, getattr(records, name)) for part, names in PARTS.items() for name in names}
        return patch.multiple(records, **{name: self._timed(*each) for name, each in originals.items()})

    def take(self) -> Figures:
        """CPU seconds of each part since it was asked last."""
        with self._lock:
            taken = {part: self._cpu_seconds[part] for part in PARTS}
            self._cpu_seconds.clear()
        return taken

    def _timed(self, part: str, original: Any) -> Any:
        def run(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return original(*arguments)
            finally:
                seconds = time.thread_time() - began
                with self._lock:
                    self._cpu_seconds[part] += seconds

        return run


class Lap(NamedTuple):
    gb_per_second: float
    cpu_seconds_per_gb: float
    parts: Figures


def timed(move: Callable[[], None], jobs: JobParts) -> Lap:
    jobs.take()
    lap = lap_of(move)
    parts = {part: seconds / GIGABYTES for part, seconds in jobs.take().items()}
    return Lap(GIGABYTES / lap["seconds"], lap["cpu_seconds"] / GIGABYTES, parts)


def random_tensors(num_tensors: int, tensor_bytes: int = TENSOR_BYTES) -> list[Tensor]:
    """Incompressible uint8 tensors of shape [tensor_bytes]; the first and the last byte name the tensor."""
    source = numpy.random.default_rng(0)
    tensors = []
    for number in range(num_tensors):
        tensor = torch.from_numpy(source.integers(0, 2**63, tensor_bytes // 8)).view(torch.uint8)
        tensor[0] = tensor[-1] = number % 256
        tensors.append(tensor)
    return tensors


def check(tensor: Tensor, number: int) -> None:
    if (int(tensor[0]), int(tensor[-1])) != (number % 256, number % 256):
        raise RuntimeError(f"tensor {number} did not come back as it was")


@contextmanager
def tierstore(scratch: Path, **how: Any) -> Iterator[Mover]:
    with TierStore(scratch, host_bytes=0, codec="none") as store:
        mover = mover_of(store, random_tensors(NUM_TENSORS), **how)
        mover.spill()
        mover.restore()
        yield mover._replace(file=first_segment(store))  # long enough for all of them


def mover_of(
    store: TierStore,
    tensors: list[Tensor],
    check: Callable[[Tensor, int], None] = check,
    *,
    num_named: int = LOOKAHEAD,
    are_kept: bool = False,
) -> Mover:
    """Everything is put, then got in the same order; each is dropped at once, or kept until all were got. `num_named`:
    so many are named to `prefetch` before each `get`; as many as there are: once, before the first."""
    handles: dict[int, Handle] = {}

    def spill() -> None:
        for number, tensor in enumerate(tensors):
            handles[number] = store.put(tensor)
        store.flush()

    def restore() -> None:
        for number in range(len(tensors)):
            if number == 0 or num_named < len(tensors):
                ahead = range(number, min(number + num_named, len(tensors)))
                store.prefetch(handles[each] for each in ahead)  # a hint: what finds no room is dropped
            check(store.get(handles[number] if are_kept else handles.pop(number)), number)
        handles.clear()
        store.flush()  # freeing what was kept is part of it

    return Mover(spill, restore)


@contextmanager
def file_per_tensor(scratch: Path, *, cold: bool) -> Iterator[Mover]:
    """`torch.save` and `torch.load`, a file each, gone after it was read; `cold`: not from the page cache."""
    files = {scratch / f"{number}.pt": tensor for number, tensor in enumerate(random_tensors(NUM_TENSORS))}

    def spill() -> None:
        for file, tensor in files.items():
            torch.save(tensor, file)
            if cold:
                descriptor = os.open(file, os.O_RDONLY)
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)

    def restore() -> None:
        for number, file in enumerate(files):
            check(torch.load(file), number)
            file.unlink()

    yield Mover(spill, restore)


def opened(variant: str, scratch: Path) -> AbstractContextManager[Mover]:
    if variant.startswith("raw"):
        return raw_device(scratch, NUM_TENSORS, TENSOR_BYTES)
    if variant.startswith("file"):
        return file_per_tensor(scratch, cold=variant.endswith("cold"))
    if variant == "tierstore":
        return tierstore(scratch)
    return tierstore(scratch, num_named=6 if "six" in variant else NUM_TENSORS, are_kept=True)


def measure(variant: str, scratch: Path) -> Figures:
    laps: list[dict[str, tuple[Lap, Lap]]] = []
    jobs = JobParts()
    with opened(variant, scratch) as ours, jobs.timed():
        file = None if variant.endswith("another file") else ours.file
        with raw_device(scratch, NUM_TENSORS, TENSOR_BYTES, file=file) as raw:
            for number in range(PAIRS[variant] + 1):
                order = (ours, raw) if number % 2 else (raw, ours)  # down and up of each: they may share a file
                taken = {each: (timed(each.spill, jobs), timed(each.restore, jobs)) for each in order}
                both = zip(taken[ours], taken[raw], strict=True)
                laps.append(dict(zip(("spill", "restore"), both, strict=True)))
    figures: Figures = {}
    has_parts = variant == "tierstore" and not is_native()  # threads in C have none that could be timed here
    for way in ("spill", "restore"):
        figures |= figures_of(way, [pair[way] for pair in laps[1:]], has_parts=has_parts)
    above = [sum(ours.cpu_seconds_per_gb - raw.cpu_seconds_per_gb for ours, raw in pair.values()) for pair in laps[1:]]
    figures["cpu_above_raw_cpu_seconds_per_gb"] = statistics.median(above)
    if has_parts:
        checksums = [sum(ours.parts["checksums"] for ours, _ in pair.values()) for pair in laps[1:]]
        ratios = [beyond / passes for beyond, passes in zip(above, checksums, strict=True)]
        figures["cpu_above_raw_to_checksums"] = statistics.median(ratios)
    return figures


def figures_of(way: str, pairs: list[tuple[Lap, Lap]], *, has_parts: bool) -> Figures:
    """Of one direction: medians, and the least and the most where they differ much."""
    ratios = [ours.gb_per_second / raw.gb_per_second for ours, raw in pairs]
    figures = {
        f"{way}_gb_per_second": statistics.median(ours.gb_per_second for ours, _ in pairs),
        f"{way}_raw_gb_per_second": statistics.median(raw.gb_per_second for _, raw in pairs),
        f"{way}_to_raw": statistics.median(ratios),
        f"{way}_to_raw_least": min(ratios),
        f"{way}_to_raw_most": max(ratios),
        f"{way}_cpu_seconds_per_gb": statistics.median(ours.cpu_seconds_per_gb for ours, _ in pairs),
    }
    for part in PARTS if has_parts else ():
        seen = [ours.parts[part] for ours, _ in pairs]
        figures[f"{way}_{part}_cpu_seconds_per_gb"] = statistics.median(seen)
        if part == "fresh_pages":
            figures[f"{way}_{part}_least_cpu_seconds_per_gb"] = min(seen)
            figures[f"{way}_{part}_most_cpu_seconds_per_gb"] = max(seen)
    return figures
