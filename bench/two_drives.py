"""Are two drives under one store as fast as both together, each way, and when one is three times as fast?

The speed of a drive is limited in its system calls, by a `Bandwidth` rule of `tierstore.testing` for its directory. The
device below has to be faster than all of them together. Each variant writes and reads the same tensors, half of them
large enough to be divided. The first pass is left out. The sum of both drives is what each can move by its limit.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from tierstore.testing import Bandwidth, FaultPlan, FaultyStore, Rule

from .disk_throughput import mover_of, random_tensors
from .goals import Goal
from .harness import Benchmark
from .parties import Figures, lap_of

MB, MIB = 10**6, 2**20
PASSES = 3
VARIANTS = {"one drive": (60 * MB,), "two equal drives": (60 * MB, 60 * MB), "two drives, 1:3": (40 * MB, 120 * MB)}

BENCHMARK = Benchmark(
    name="two_drives",
    question="Two drives of limited speed under one store, beside one of them and beside their sum",
    variants=tuple(VARIANTS),
    rounds=2,
    goals=(
        Goal("written, of one drive", "write_gb_per_second", "two equal drives", at_least=1.9, of=("one drive",)),
        Goal("read, of one drive", "read_gb_per_second", "two equal drives", at_least=1.9, of=("one drive",)),
        Goal("written, of the sum of both", "write_to_sum", "two drives, 1:3", at_least=0.9),
        Goal("read, of the sum of both", "read_to_sum", "two drives, 1:3", at_least=0.9),
    ),
    plotted=("write_gb_per_second", "read_gb_per_second"),
)


def measure(variant: str, scratch: Path) -> Figures:
    drives = {scratch / str(number): speed for number, speed in enumerate(VARIANTS[variant])}
    for directory in drives:
        directory.mkdir()
    rules = [Rule(("pwritev", "preadv"), Bandwidth(speed), under=str(each)) for each, speed in drives.items()]
    tensors = [tensor for _ in range(8) for size in (4, 24) for tensor in random_tensors(1, size * MIB)]
    for number, tensor in enumerate(tensors):
        tensor[0] = tensor[-1] = number
    with FaultyStore(list(drives), FaultPlan.of(*rules), host_bytes=0, disk_bytes="4GiB", codec="none") as store:
        mover = mover_of(store, tensors)
        moves = {"write": mover.spill, "read": mover.restore}
        passes = [{way: lap_of(move)["seconds"] for way, move in moves.items()} for _ in range(PASSES + 1)][1:]
    figures = {}
    for way in moves:
        bytes_per_second = sum(each.nbytes for each in tensors) / statistics.median(each[way] for each in passes)
        figures[f"{way}_gb_per_second"] = bytes_per_second / 1e9
        figures[f"{way}_to_sum"] = bytes_per_second / sum(drives.values())
    return figures
