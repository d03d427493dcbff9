"""How fast do 16 MiB tensors go to disk and come back, beside what the device itself can do, and at what cost in CPU?

Incompressible bytes. The store spills everything (no host memory, no codec); handles are dropped as backward drops
them. By hand they are kept until the pass ends, and `prefetch` is given all of them once, or the next six before each
`get`. The raw device writes and reads blocks of the same size in a preallocated file of the same file system, as many
at once as the store has at the device. A file per tensor is shown as people use it (what the page cache holds is
fast), and with every write synced and every read from the device.

A shared disk is twice as fast in one minute as in the next. So every process measures its variant beside the raw
device: passes of both alternate, each moves all tensors down and up once, whoever went second goes first the next time,
and the ratio of each pair counts. What they do before is left out: training uses the same space step after step, and
the first use of disk space and of page cache is slower.

A virtual disk may be faster in one file than in another, pass after pass. So the raw device writes where the store
does, in the store's own file while that is empty. The raw device beside itself shows what such a ratio is worth, in the
same file and in another one.

What the CPU time beyond raw is made of is told beside: checksums, fresh pages, transfers.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch
from torch import Tensor

from tierstore.base.defaults import NUM_AT_ONCE
from tierstore.disk.location import record_checksum

from .goals import Goal
from .harness import Benchmark, main_of_one_variant
from .job_parts import PARTS, JobParts

if TYPE_CHECKING:
    from tierstore import TierStore
    from tierstore.residency.handle import Handle

TENSOR_BYTES = 16 * 2**20
NUM_TENSORS = 64
LOOKAHEAD = 8
MOST_PAIRS = 6
PAIRS = {
    "raw device": 3,
    "raw device, another file": 3,
    "tierstore, whole list by hand": 4,
    "tierstore, six ahead by hand": 4,
    "file per tensor": 1,
    "file per tensor, synced and cold": 1,
}
GIGABYTES = NUM_TENSORS * TENSOR_BYTES / 1e9

BENCHMARK = Benchmark(
    name="disk_throughput",
    question="Spill and restore of 16 MiB tensors, beside the raw device",
    variants=(
        "raw device",
        "raw device, another file",
        "tierstore",
        "tierstore, whole list by hand",
        "tierstore, six ahead by hand",
        "file per tensor",
        "file per tensor, synced and cold",
    ),
    compare="none",
    settings={
        "tensor_bytes": TENSOR_BYTES,
        "num_tensors": NUM_TENSORS,
        "pairs": MOST_PAIRS,
        "raw_in_flight": NUM_AT_ONCE,
    },
    rounds=1,
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


Buffer = mmap.mmap | memoryview


class Mover(NamedTuple):
    """One way to keep all tensors on disk.

    Attributes:
        spill: writes them all.
        restore: has each in memory once, and keeps none.
        file: the descriptor of the one where it has kept them all, which is empty between; None: there is none.
    """

    spill: Callable[[], None]
    restore: Callable[[], None]
    file: int | None = None


class Lap(NamedTuple):
    """One pass in one direction.

    Attributes:
        gb_per_second: moved.
        cpu_seconds_per_gb: of all threads of this process.
        parts: of them, those of the parts of the store's jobs.
    """

    gb_per_second: float
    cpu_seconds_per_gb: float
    parts: dict[str, float]


Laps = tuple[Lap, Lap]
"""Down and up."""


def timed(move: Callable[[], None], jobs: JobParts | None = None) -> Lap:
    """Move everything once; `jobs` tells what the store's are made of."""
    wall, cpu = time.perf_counter(), time.process_time()
    move()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    parts = {} if jobs is None else jobs.take()
    return Lap(GIGABYTES / wall, cpu / GIGABYTES, {part: seconds / GIGABYTES for part, seconds in parts.items()})


def random_tensors(num_tensors: int = NUM_TENSORS) -> list[Tensor]:
    """Incompressible uint8 tensors of shape [TENSOR_BYTES]; the first and the last byte name the tensor."""
    source = numpy.random.default_rng(0)
    tensors = []
    for number in range(num_tensors):
        tensor = torch.from_numpy(source.integers(0, 2**63, TENSOR_BYTES // 8)).view(torch.uint8)
        tensor[0] = tensor[-1] = number
        tensors.append(tensor)
    return tensors


def check(tensor: Tensor, number: int) -> None:
    """Raises RuntimeError if this is not tensor `number`."""
    if (tensor.nbytes, int(tensor[0]), int(tensor[-1])) != (TENSOR_BYTES, number, number):
        raise RuntimeError(f"tensor {number} did not come back as it was")


@contextmanager
def raw_device(
    scratch: Path,
    num_blocks: int = NUM_TENSORS,
    block_bytes: int = TENSOR_BYTES,
    buffers: Sequence[Buffer] | None = None,
    file: int | None = None,
    *,
    sources: Sequence[Buffer] | None = None,
    has_checksums: bool = False,
) -> Iterator[Mover]:
    """O_DIRECT into a preallocated file, as many transfers at once as the store has, each on a thread of its own.

    Args:
        scratch: a directory on the device.
        num_blocks: in a pass.
        block_bytes: of each.
        buffers: used again and again, as long as a block, aligned to pages; a multiple of the number of threads, or
            fewer. None: private ones, in huge pages.
        file: open, preallocated and long enough; None: one of its own.
        sources: what is written, by block, aligned to pages; None: the buffers.
        has_checksums: each thread takes the store's checksum of a block before it writes it and after it has read it.
    """
    buffers = private_buffers(block_bytes) if buffers is None else buffers
    num_threads = min(NUM_AT_ONCE, len(buffers))
    descriptor = _allocated(scratch, num_blocks * block_bytes) if file is None else os.dup(file)

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


def _allocated(scratch: Path, num_bytes: int) -> int:
    descriptor = os.open(scratch, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
    os.posix_fallocate(descriptor, 0, num_bytes)
    return descriptor


@contextmanager
def raw_device_elsewhere(scratch: Path) -> Iterator[Mover]:
    """A raw device that is to be measured beside one in another file."""
    with raw_device(scratch) as mover:
        yield mover._replace(file=None)


def private_buffers(num_bytes: int, how_many: int = NUM_AT_ONCE, *, pages: int = mmap.MADV_HUGEPAGE) -> list[Buffer]:
    """As many as the store has transfers at the device, or more, full of random bytes.

    `pages`: advice to the kernel. Huge ones are what numpy and the store have: transfers are up to a third faster.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory gets no huge pages
    buffers = [mmap.mmap(-1, num_bytes, flags=private) for _ in range(how_many)]
    for buffer in buffers:
        buffer.madvise(pages)
        buffer.write(os.urandom(num_bytes))
    return buffers


@contextmanager
def tierstore(scratch: Path, num_named: int | None = None) -> Iterator[Mover]:
    """An embedded store that keeps nothing in host memory and encodes nothing. `num_named`: as `kept_mover_of`'s."""
    from tierstore import TierStore

    with TierStore(scratch, host_bytes=0, codec="none") as store:
        mover = mover_of(store) if num_named is None else kept_mover_of(store, num_named)
        mover.spill()
        mover.restore()
        first_segment = store._core.engine.disk.descriptors()[0]  # long enough for all of them
        yield mover._replace(file=first_segment)


def mover_of(store: TierStore, num_tensors: int = NUM_TENSORS) -> Mover:
    """Everything is put, then got in the same order, each prefetched some tensors before and dropped at once."""
    tensors = random_tensors(num_tensors)
    handles: dict[int, Handle] = {}

    def spill() -> None:
        for number, tensor in enumerate(tensors):
            handles[number] = store.put(tensor)
        store.flush()

    def restore() -> None:
        for number in range(num_tensors):
            ahead = range(number, min(number + LOOKAHEAD, num_tensors))
            store.prefetch(handles[each] for each in ahead)  # a hint: what finds no room is dropped
            check(store.get(handles.pop(number)), number)
        store.flush()  # freeing what was kept is part of it

    return Mover(spill, restore)


def kept_mover_of(store: TierStore, num_named: int) -> Mover:
    """Everything is put, then got in the same order, and kept until all were got.

    `num_named`: so many are named to `prefetch` before each `get`; as many as there are: once, before the first.
    """
    tensors = random_tensors()
    handles: list[Handle] = []

    def spill() -> None:
        handles.extend(store.put(tensor) for tensor in tensors)
        store.flush()

    def restore() -> None:
        for number, handle in enumerate(handles):
            if number == 0 or num_named < NUM_TENSORS:
                store.prefetch(handles[number : number + num_named])
            check(store.get(handle), number)
        handles.clear()
        store.flush()

    return Mover(spill, restore)


@contextmanager
def file_per_tensor(scratch: Path, cold: bool = False) -> Iterator[Mover]:
    """`torch.save` and `torch.load`, a file each, gone after it was read."""
    tensors = random_tensors()
    files = [scratch / f"{number}.pt" for number in range(NUM_TENSORS)]

    def spill() -> None:
        for tensor, file in zip(tensors, files, strict=True):
            torch.save(tensor, file)
            if cold:
                sync_and_forget(file)

    def restore() -> None:
        for number, file in enumerate(files):
            check(torch.load(file), number)
            file.unlink()

    yield Mover(spill, restore)


def sync_and_forget(file: Path) -> None:
    """Wait until the device has the file, then drop it from the page cache (posix_fadvise(2))."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


VARIANTS: dict[str, Callable[[Path], AbstractContextManager[Mover]]] = {
    "raw device": raw_device,
    "raw device, another file": raw_device_elsewhere,
    "tierstore": tierstore,
    "tierstore, whole list by hand": lambda scratch: tierstore(scratch, NUM_TENSORS),
    "tierstore, six ahead by hand": lambda scratch: tierstore(scratch, 6),
    "file per tensor": file_per_tensor,
    "file per tensor, synced and cold": lambda scratch: file_per_tensor(scratch, cold=True),
}


def measure(variant: str, scratch: Path) -> dict[str, float]:
    """Medians over the pairs, and the least and the most of their ratios."""
    down: list[tuple[Lap, Lap]] = []
    up: list[tuple[Lap, Lap]] = []
    with (
        VARIANTS[variant](scratch) as mover,
        raw_device(scratch, file=mover.file) as raw,
        JobParts() as jobs,
    ):
        for number in range(PAIRS.get(variant, MOST_PAIRS) + 1):
            ours, beside = pair(mover, raw, jobs, is_first=number % 2 == 1)
            down.append((ours[0], beside[0]))
            up.append((ours[1], beside[1]))
    figures = figures_of("spill", down[1:]) | figures_of("restore", up[1:])
    if variant == "tierstore":
        figures |= parts_of("spill", down[1:]) | parts_of("restore", up[1:])
    both_ways = list(zip(down[1:], up[1:], strict=True))
    above_raw = [sum(ours.cpu_seconds_per_gb - raw.cpu_seconds_per_gb for ours, raw in both) for both in both_ways]
    figures["cpu_above_raw_cpu_seconds_per_gb"] = statistics.median(above_raw)
    if variant == "tierstore":
        checksums = [sum(ours.parts["checksums"] for ours, _ in both) for both in both_ways]
        ratios = [above / passes for above, passes in zip(above_raw, checksums, strict=True)]
        figures["cpu_above_raw_to_checksums"] = statistics.median(ratios)
    return figures


def pair(ours: Mover, raw: Mover, jobs: JobParts, *, is_first: bool) -> tuple[Laps, Laps]:
    """Down and up of each, one right after the other: they may share a file."""
    if is_first:
        mine = timed(ours.spill, jobs), timed(ours.restore, jobs)
        return mine, (timed(raw.spill), timed(raw.restore))
    beside = timed(raw.spill), timed(raw.restore)
    return (timed(ours.spill, jobs), timed(ours.restore, jobs)), beside


def figures_of(name: str, pairs: list[tuple[Lap, Lap]]) -> dict[str, float]:
    """Of one direction."""
    ratios = [ours.gb_per_second / raw.gb_per_second for ours, raw in pairs]
    return {
        f"{name}_gb_per_second": statistics.median(ours.gb_per_second for ours, _ in pairs),
        f"{name}_raw_gb_per_second": statistics.median(raw.gb_per_second for _, raw in pairs),
        f"{name}_to_raw": statistics.median(ratios),
        f"{name}_to_raw_least": min(ratios),
        f"{name}_to_raw_most": max(ratios),
        f"{name}_cpu_seconds_per_gb": statistics.median(ours.cpu_seconds_per_gb for ours, _ in pairs),
    }


def parts_of(name: str, pairs: list[tuple[Lap, Lap]]) -> dict[str, float]:
    """Of one direction, the medians; and the least and the most, where they differ as fresh pages do."""
    found = {}
    for part in PARTS:
        seen = [ours.parts[part] for ours, _ in pairs]
        found[f"{name}_{part}_cpu_seconds_per_gb"] = statistics.median(seen)
        if part == "fresh_pages":
            found[f"{name}_{part}_least_cpu_seconds_per_gb"] = min(seen)
            found[f"{name}_{part}_most_cpu_seconds_per_gb"] = max(seen)
    return found


if __name__ == "__main__":
    main_of_one_variant(measure)
