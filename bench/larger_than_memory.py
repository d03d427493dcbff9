"""Twice as many saved tensors as the machine has memory: what does a step cost beside compute and bare movement?

200 steps of `y = sin(y * a)` on 128 MiB save 50 GiB. The floor computes the same without a graph, while bare threads
move the bytes that the store has to move: O_DIRECT, as many at once as the store has transfers at the device, no
checksums. The floor's threads always write the same few buffers, in huge pages. A second floor writes other pages each
time, as saved tensors lie, and takes checksums: what is between the two is beyond any store that checks its bytes.

Nothing is set but `host_bytes`. The drive needs 50 GiB of room.
"""

from __future__ import annotations

import mmap
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from tierstore import TierStore, tiered_offload

from .disk_throughput import TENSOR_BYTES
from .goals import Goal
from .harness import Benchmark
from .parties import Figures, lap_of
from .raw_device import private_buffers, raw_device

VALUES_BYTES = 128 * 2**20
NUM_STEPS = 200
HOST_BYTES = 2**30
SAVED_BYTES = 2 * NUM_STEPS * VALUES_BYTES
FLOOR, LIKE_SAVED, STORE = "compute beside bare threads", "the same, small pages and checksums", "tierstore"
NUM_SMALL = 64
"""Buffers in small pages: more than a processor's cache holds."""
WAYS = ("forward", "backward")

BENCHMARK = Benchmark(
    name="larger_than_memory",
    question="50 GiB of saved tensors: a step beside compute and bare movement of the same bytes",
    variants=(FLOOR, LIKE_SAVED, STORE),
    rounds=2,
    goals=tuple(Goal(f"{way}, of the floor's", f"{way}_seconds", STORE, at_most=1.1, of=(FLOOR,)) for way in WAYS),
    plotted=tuple(f"{way}_seconds" for way in WAYS),
    timeout_seconds=900,
)


def measure(variant: str, scratch: Path) -> Figures:
    """Seconds of each way, CPU time in it, what threads waited for, and the most memory that the process had."""
    if shutil.disk_usage(scratch).free < SAVED_BYTES * 1.05:
        raise RuntimeError(f"the drive has no room for {SAVED_BYTES / 2**30:.0f} GiB")
    is_like_saved = variant == LIKE_SAVED
    figures = with_store(scratch) if variant == STORE else with_bare_threads(scratch, is_like_saved=is_like_saved)
    return figures | {"most_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def with_store(scratch: Path) -> Figures:
    start = torch.rand(VALUES_BYTES // 4, requires_grad=True)
    factor = torch.tensor(1.01, requires_grad=True)
    with TierStore(scratch, host_bytes=HOST_BYTES) as store:

        def forward() -> None:
            nonlocal total
            values = start
            with tiered_offload(store):
                for _ in range(NUM_STEPS):
                    values = torch.sin(values * factor)
                total = values.sum()

        total = factor
        laps = {"forward": lap_of(forward), "backward": lap_of(lambda: total.backward())}
        waited = store.stats().stall_seconds.items()
    waits = {f"{cause.replace(' ', '_')}_seconds": seconds for cause, seconds in waited}
    return waits | {f"{way}_{name}": value for way, lap in laps.items() for name, value in lap.items()}


@torch.no_grad()
def with_bare_threads(scratch: Path, *, is_like_saved: bool) -> Figures:
    """The same kernels, of which each way keeps nothing."""
    values, factor = torch.rand(VALUES_BYTES // 4), torch.tensor(1.01)

    def forward() -> None:
        current = values
        for _ in range(NUM_STEPS):
            current = torch.sin(current * factor)
        current.sum()

    def backward() -> None:
        gradient = torch.ones_like(values)
        for _ in range(NUM_STEPS):  # of sin, of the factor, of the values
            gradient = gradient * values.cos()
            (gradient * values).sum()
            gradient = gradient * factor

    num_blocks = (SAVED_BYTES - HOST_BYTES) // TENSOR_BYTES
    sources = private_buffers(TENSOR_BYTES, NUM_SMALL, pages=mmap.MADV_NOHUGEPAGE) if is_like_saved else None
    with raw_device(scratch, num_blocks, TENSOR_BYTES, sources=sources, has_checksums=is_like_saved) as mover:
        return _both("forward", forward, mover.spill) | _both("backward", backward, mover.restore)


def _both(way: str, compute: Callable[[], None], move: Callable[[], None]) -> Figures:
    figures: Figures = {}

    def run() -> None:
        mover = threading.Thread(target=move)
        mover.start()
        figures[f"{way}_compute_seconds"] = lap_of(compute)["seconds"]
        mover.join()

    lap = lap_of(run)
    return figures | {f"{way}_{name}": value for name, value in lap.items()}
