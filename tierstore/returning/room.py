"""How much memory this process has, and how much it may still take. Linux alone: /proc and the memory cgroup."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from ..base.config import meminfo, memory_cgroup_limits, memory_of_process

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Room(NamedTuple):
    """The memory of the machine or a control group: in all, and what can be taken before the kernel swaps or kills."""

    limit_bytes: int
    left_bytes: int


def resident_bytes() -> int:
    """Resident memory of this process, of all kinds (proc(5), statm). Takes some microseconds."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read(128).split()[1]) * _PAGE_BYTES


def anonymous_bytes() -> int:
    """Resident anonymous memory of this process: heaps, stacks, the slab; no file pages (proc(5), RssAnon)."""
    return memory_of_process().get("RssAnon") or resident_bytes()


def find_room() -> Room:
    """What is left on the machine (MemAvailable) and in each memory cgroup above this process; the least counts."""
    machine = meminfo()
    total = machine["MemTotal"]
    rooms = [Room(total, machine.get("MemAvailable", total))]
    rooms += [Room(limit, max(limit - used, 0)) for limit, used in memory_cgroup_limits() if limit < total]
    return tightest(rooms)


def tightest(rooms: Iterable[Room]) -> Room:
    """The room of which the least is left beside its reserve."""
    return min(rooms, key=lambda room: room.left_bytes - reserve_of(room.limit_bytes))


def reserve_of(limit_bytes: int) -> int:
    """The part of a limit that is kept free, for what training may take while a return is on its way: a sixteenth, 32
    MiB at least, 1 GiB at most. A thread takes 1 to 2 GB/s of fresh pages."""
    return min(max(limit_bytes // 16, 32 * 2**20), 2**30)
