"""What a process holds: memory, descriptors, threads. And what is different from before."""

import ctypes
import gc
import os
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tierstore.base.defaults import NUM_AT_ONCE, NUM_BESIDE_DEVICE

__all__ = ["ALLOWANCE_BYTES", "Census", "census_of", "differences", "trim_memory"]

ALLOWANCE_BYTES = 48 * 2**20
"""By which a process may grow after its first rounds: fragments of the allocator, caches of torch and of Python."""

_KEPT, _MOST_KEPT = "segment", 3
"""Descriptors that a store keeps for some minutes on purpose: segments that are empty."""

_POOL, _MOST_POOLED = "ts-native", 2 * (NUM_AT_ONCE + NUM_BESIDE_DEVICE)
"""Threads of `disk/native.py`, which its pool starts as more transfers are under way than ever before."""


class Census(NamedTuple):
    """What a process holds now.

    Attributes:
        memory_bytes: of its own and shared with others, without pages of files.
        descriptors: how many, by what they lead to.
        threads: how many, by name; without those that the kernel adds for io_uring and takes away again.
    """

    memory_bytes: int
    descriptors: dict[str, int]
    threads: dict[str, int]


def trim_memory() -> None:
    """Free what nothing refers to, and give the allocator's free pages back, as far as it can."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def census_of(pid: int | str = "self") -> Census:
    """Of a living process, from /proc (proc(5)). What has ended by the time that it is looked at does not count."""
    status = dict(re.findall(r"^(\w+):\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    descriptors: Counter[str] = Counter()
    threads: Counter[str] = Counter()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:
            continue
        descriptors[_KEPT if "segment-" in target else re.sub(r"\d+", "N", target)] += 1
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            name = Path(f"/proc/{pid}/task/{task}/comm").read_text().strip()
        except OSError:
            continue
        threads[_POOL if name.startswith(_POOL) else name] += not name.startswith("iou-")
    memory_bytes = (int(status["RssAnon"]) + int(status["RssShmem"])) * 1024
    return Census(memory_bytes, dict(sorted(descriptors.items())), dict(sorted((+threads).items())))


def differences(before: Census, after: Census) -> list[str]:
    """What must be the same and is not, in words; memory may have grown by the allowance."""
    found = []
    for kind in sorted(before.descriptors.keys() | after.descriptors.keys()):
        one, other = before.descriptors.get(kind, 0), after.descriptors.get(kind, 0)
        if (other > _MOST_KEPT) if kind == _KEPT else (one != other):
            found.append(f"descriptors of {kind}: {one} before, {other} after")
    known, now = ({name: num for name, num in each.threads.items() if name != _POOL} for each in (before, after))
    if known != now or after.threads.get(_POOL, 0) > _MOST_POOLED:
        found.append(f"threads: {before.threads} before, {after.threads} after")
    if after.memory_bytes > before.memory_bytes + ALLOWANCE_BYTES:
        found.append(f"memory: {before.memory_bytes >> 10:,} KiB before, {after.memory_bytes >> 10:,} KiB after")
    return found
