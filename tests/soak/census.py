"""What a process holds: memory, descriptors, threads. And what is different from before."""

import ctypes
import gc
import os
import re
from collections import Counter
from pathlib import Path

import msgspec

__all__ = ["ALLOWANCE_BYTES", "Census", "census_of", "differences", "trim_memory"]

ALLOWANCE_BYTES = 48 * 2**20
"""By which a process may grow after its first rounds: fragments of the allocator, caches of torch and of Python."""

_KEPT = "segment"
"""Descriptors that a store keeps for some minutes on purpose: segments that are empty."""
_MOST_KEPT = 3


class Census(msgspec.Struct, frozen=True):
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
    """Of a living process, from /proc (proc(5))."""
    status = dict(re.findall(r"^(\w+):\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    targets: Counter[str] = Counter()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            targets[_kind_of(os.readlink(f"/proc/{pid}/fd/{name}"))] += 1
        except FileNotFoundError:
            pass  # the one that lists them
    memory_bytes = (int(status["RssAnon"]) + int(status["RssShmem"])) * 1024
    return Census(memory_bytes, dict(sorted(targets.items())), _threads(pid))


def _threads(pid: int | str) -> dict[str, int]:
    names: Counter[str] = Counter()
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            names[Path(f"/proc/{pid}/task/{task}/comm").read_text().strip()] += 1
        except OSError:
            pass  # it has just ended
    return {name: count for name, count in sorted(names.items()) if not name.startswith("iou-")}


def _kind_of(target: str) -> str:
    if "segment-" in target:
        return _KEPT
    return re.sub(r"\d+", "N", target)


def differences(before: Census, after: Census) -> list[str]:
    """What must be the same and is not, in words; memory may have grown by the allowance."""
    found = []
    kinds = sorted(before.descriptors.keys() | after.descriptors.keys())
    for kind in kinds:
        one, other = before.descriptors.get(kind, 0), after.descriptors.get(kind, 0)
        if (other > _MOST_KEPT) if kind == _KEPT else (one != other):
            found.append(f"descriptors of {kind}: {one} before, {other} after")
    if before.threads != after.threads:
        found.append(f"threads: {before.threads} before, {after.threads} after")
    if after.memory_bytes > before.memory_bytes + ALLOWANCE_BYTES:
        found.append(f"memory: {before.memory_bytes >> 10:,} KiB before, {after.memory_bytes >> 10:,} KiB after")
    return found
