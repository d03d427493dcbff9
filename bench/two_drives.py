"""Are two drives under one store as fast as both together, each way, and when one is three times as fast?

The speed of a drive is limited in its system calls: `pwritev` and `preadv` on files under its directory return no
sooner than at so many bytes per second (`tierstore.testing`, a `Bandwidth` rule for that directory). So each directory
is a drive of known speed. The device below them has to be faster than all of them together.

Each variant writes and reads the same tensors, half of them large enough to be divided. The first pass is left out: it
takes space for the first time, and measures the drives. The sum of both drives is what each can move by its limit.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from tierstore.testing import Bandwidth, FaultPlan, FaultyStore, Rule

from .goals import Goal
from .harness import Benchmark, main_of_one_variant

MB = 1_000_000
MIB = 2**20
SIZES = (4 * MIB, 24 * MIB) * 8
PASSES = 3
LOOKAHEAD = 4
VARIANTS = {
    "one drive": (60 * MB,),
    "two equal drives": (60 * MB, 60 * MB),
    "two drives, 1:3": (40 * MB, 120 * MB),
}

BENCHMARK = Benchmark(
    name="two_drives",
    question="Two drives of limited speed under one store, beside one of them and beside their sum",
    variants=tuple(VARIANTS),
    rounds=2,
    settings={"bytes_per_second": {name: list(speeds) for name, speeds in VARIANTS.items()}, "passes": PASSES},
    goals=(
        Goal("written, of one drive", "write_gb_per_second", "two equal drives", at_least=1.9, of=("one drive",)),
        Goal("read, of one drive", "read_gb_per_second", "two equal drives", at_least=1.9, of=("one drive",)),
        Goal("written, of the sum of both", "write_to_sum", "two drives, 1:3", at_least=0.9),
        Goal("read, of the sum of both", "read_to_sum", "two drives, 1:3", at_least=0.9),
    ),
    plotted=("write_gb_per_second", "read_gb_per_second"),
)


def measure(variant: str, scratch: Path) -> dict[str, float]:
    """Medians over the passes after the first."""
    speeds = VARIANTS[variant]
    directories = [scratch / str(number) for number in range(len(speeds))]
    for directory in directories:
        directory.mkdir()
    rules = [
        Rule(("pwritev", "preadv"), Bandwidth(speed), under=str(directory))
        for directory, speed in zip(directories, speeds, strict=True)
    ]
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in SIZES]
    with FaultyStore(directories, FaultPlan.of(*rules), host_bytes=0, disk_bytes="4GiB", codec="none") as store:
        passes = [_seconds(store, tensors) for _ in range(PASSES + 1)][1:]
    figures = {}
    for name, seconds in zip(("write", "read"), zip(*passes, strict=True), strict=True):
        bytes_per_second = sum(SIZES) / statistics.median(seconds)
        figures[f"{name}_gb_per_second"] = bytes_per_second / 1e9
        figures[f"{name}_to_sum"] = bytes_per_second / sum(speeds)
    return figures


def _seconds(store: FaultyStore, tensors: list[torch.Tensor]) -> tuple[float, float]:
    """Of writing all tensors, and of reading them."""
    started = time.perf_counter()
    handles = [store.put(tensor) for tensor in tensors]
    store.flush()
    written = time.perf_counter()
    for number, tensor in enumerate(tensors):
        store.prefetch(handles[number : number + LOOKAHEAD])
        if not torch.equal(store.get(handles[number]), tensor):
            raise RuntimeError(f"tensor {number} did not come back as it was")
    return written - started, time.perf_counter() - written


if __name__ == "__main__":
    main_of_one_variant(measure)
