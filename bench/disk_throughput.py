"""How fast do 16 MiB tensors go to disk and come back, beside what the device itself can do?

Incompressible bytes. The store spills everything (no host memory, no codec); the raw device writes and reads
blocks of the same size, as many at once as the store's staging window holds. A file per tensor is shown as
people use it (what the page cache holds is fast), and with every write synced and every read from the device.

All tensors go down and up twice, and the second time counts: training uses the same space step after step, and
the first use of disk space and of page cache is slower.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import torch
from torch import Tensor

from .harness import Benchmark, main_of_one_variant

TENSOR_BYTES = 16 * 2**20
NUM_TENSORS = 48
IN_FLIGHT = 8
PASSES = 2

BENCHMARK = Benchmark(
    name="disk_throughput",
    question="Spill and restore of 16 MiB tensors (and beside the raw device)",
    variants=("raw device", "tierstore", "file per tensor", "file per tensor, synced and cold"),
    settings={"tensor_bytes": TENSOR_BYTES, "num_tensors": NUM_TENSORS, "passes": PASSES, "raw_in_flight": IN_FLIGHT},
)


class Stopwatch:
    """Throughput, and CPU seconds of this process per gigabyte; of each lap, the last one of a name counts."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def lap(self, name: str) -> None:
        """Note the time since the last lap, which moved all tensors once."""
        wall, cpu = time.perf_counter(), time.process_time()
        gigabytes = NUM_TENSORS * TENSOR_BYTES / 1e9
        self.figures[f"{name}_gb_per_second"] = gigabytes / (wall - self._wall)
        self.figures[f"{name}_cpu_seconds_per_gb"] = (cpu - self._cpu) / gigabytes
        self.restart()

    def restart(self) -> None:
        """Forget what was done since the last lap."""
        self._wall, self._cpu = time.perf_counter(), time.process_time()


def random_tensors() -> list[Tensor]:
    """Incompressible uint8 tensors of shape [TENSOR_BYTES]; the first and the last byte name the tensor."""
    source = numpy.random.default_rng(0)
    tensors = []
    for number in range(NUM_TENSORS):
        tensor = torch.from_numpy(source.integers(0, 2**63, TENSOR_BYTES // 8)).view(torch.uint8)
        tensor[0] = tensor[-1] = number
        tensors.append(tensor)
    return tensors


def check(tensor: Tensor, number: int) -> None:
    """Raises RuntimeError if this is not tensor `number`."""
    if (tensor.nbytes, int(tensor[0]), int(tensor[-1])) != (TENSOR_BYTES, number, number):
        raise RuntimeError(f"tensor {number} did not come back as it was")


def raw_device(scratch: Path) -> dict[str, float]:
    """O_DIRECT into a preallocated file, from and to buffers that are used again, one thread per transfer."""
    descriptor = os.open(scratch, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
    os.posix_fallocate(descriptor, 0, NUM_TENSORS * TENSOR_BYTES)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory gets no huge pages
    buffers = [mmap.mmap(-1, TENSOR_BYTES, flags=private) for _ in range(IN_FLIGHT)]
    for buffer in buffers:
        buffer.madvise(mmap.MADV_HUGEPAGE)  # as numpy and the store do: transfers are up to a third faster
        buffer.write(os.urandom(TENSOR_BYTES))

    def each(transfer: Callable[[mmap.mmap, int], int]) -> None:
        """Every thread has a buffer of its own and every IN_FLIGHT-th block."""

        def run(first: int) -> None:
            for number in range(first, NUM_TENSORS, IN_FLIGHT):
                if transfer(buffers[first], number * TENSOR_BYTES) != TENSOR_BYTES:
                    raise RuntimeError("a transfer was cut short")

        list(pool.map(run, range(IN_FLIGHT)))

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        watch = Stopwatch()
        for _ in range(PASSES):
            watch.restart()
            each(lambda buffer, offset: os.pwrite(descriptor, buffer, offset))
            watch.lap("spill")
            each(lambda buffer, offset: os.preadv(descriptor, [buffer], offset))
            watch.lap("restore")
    os.close(descriptor)
    return watch.figures


def tierstore(scratch: Path) -> dict[str, float]:
    from tierstore import TierStore

    tensors = random_tensors()
    with TierStore(scratch, host_bytes=0, codec="none") as store:
        watch = Stopwatch()
        for _ in range(PASSES):
            watch.restart()
            handles = [store.put(tensor) for tensor in tensors]
            store.flush()
            watch.lap("spill")
            for number, handle in enumerate(handles):
                store.prefetch(handles[number : number + IN_FLIGHT])  # a hint: what finds no room is dropped
                check(store.get(handle), number)
            watch.lap("restore")
            handles.clear()
    return watch.figures


def file_per_tensor(scratch: Path, cold: bool = False) -> dict[str, float]:
    """`torch.save` and `torch.load`, a file each."""
    tensors = random_tensors()
    files = [scratch / f"{number}.pt" for number in range(NUM_TENSORS)]
    watch = Stopwatch()
    for _ in range(PASSES):
        watch.restart()
        for tensor, file in zip(tensors, files, strict=True):
            torch.save(tensor, file)
            if cold:
                sync_and_forget(file)
        watch.lap("spill")
        for number, file in enumerate(files):
            check(torch.load(file), number)
        watch.lap("restore")
        for file in files:
            file.unlink()
    return watch.figures


def sync_and_forget(file: Path) -> None:
    """Wait until the device has the file, then drop it from the page cache (posix_fadvise(2))."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


VARIANTS: dict[str, Callable[[Path], dict[str, float]]] = {
    "raw device": raw_device,
    "tierstore": tierstore,
    "file per tensor": file_per_tensor,
    "file per tensor, synced and cold": lambda scratch: file_per_tensor(scratch, cold=True),
}


def measure(variant: str, scratch: Path) -> dict[str, float]:
    """Gigabytes and CPU seconds per gigabyte, either way."""
    return VARIANTS[variant](scratch)


if __name__ == "__main__":
    main_of_one_variant(measure)
