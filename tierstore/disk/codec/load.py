"""Measures how busy disk and cores are, for the choice of a codec. No call waits."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from ...base.config import allowed_cores
from .choice import Load

Direction = Literal["write", "read"]

_SMALLEST_TIMED_BYTES = 2**20  # shorter transfers time the system call, not the disk
_LEAST_TRANSFERS = 4
_LEAST_BYTES = 4 * 2**20
_MEMORY_SECONDS = 0.5
_MOST_NEW_SPEEDS = 64
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class TransferClock:
    """Finds the speed of all transfers of a direction together, because a disk serves several at once. Any thread.
    Bytes are counted against the time in which any transfer runs; while writes and reads run together, each direction
    gets its share of it. `new_speeds`: (direction, bytes per second) that nobody has taken out yet, the latest."""

    def __init__(self) -> None:
        self.new_speeds: deque[tuple[Direction, float]] = deque(maxlen=_MOST_NEW_SPEEDS)
        self._lock = threading.Lock()
        self._running = {"write": 0, "read": 0}
        self._busy_seconds = {"write": 0.0, "read": 0.0}
        self._moved = {"write": (0, 0), "read": (0, 0)}  # transfers, and their bytes
        self._now = 0.0

    @contextmanager
    def timed(self, direction: Direction, num_bytes: int) -> Iterator[None]:
        """Around a transfer at the device, on the thread that waits for it. One that is too short is not counted."""
        if num_bytes < _SMALLEST_TIMED_BYTES:
            yield
            return
        moved_bytes = 0
        with self._lock:
            self.begin(direction, time.perf_counter())
        try:
            yield
            moved_bytes = num_bytes
        finally:
            with self._lock:
                speed = self.end(direction, time.perf_counter(), moved_bytes)
            if speed is not None:
                self.new_speeds.append((direction, speed))

    def begin(self, direction: Direction, now: float) -> None:
        self._advance(now)
        self._running[direction] += 1

    def end(self, direction: Direction, now: float, num_bytes: int) -> float | None:
        """A transfer ended (0 bytes: it failed); the bytes per second if enough ended since the last result."""
        self._advance(now)
        self._running[direction] -= 1
        num_moved, moved_bytes = self._moved[direction]
        num_moved, moved_bytes = self._moved[direction] = num_moved + 1, moved_bytes + num_bytes
        busy_seconds = self._busy_seconds[direction]
        if num_moved < _LEAST_TRANSFERS or moved_bytes < _LEAST_BYTES or busy_seconds <= 0:
            return None
        self._moved[direction], self._busy_seconds[direction] = (0, 0), 0.0
        return moved_bytes / busy_seconds

    def _advance(self, now: float) -> None:
        num_running = sum(self._running.values())
        for direction, num in self._running.items():
            if num:
                self._busy_seconds[direction] += (now - self._now) * num / num_running
        self._now = now


class Readings(NamedTuple):
    """Clocks of the machine, in seconds: a steady one, the idle time of all cores that the process may run on together
    (None where the kernel does not tell), and the CPU time of the process."""

    wall: float
    idle: float | None
    process: float


class LoadMeter:
    """Averages over about the last second. `num_cores`: how many this process may use; `first`: the clocks now."""

    def __init__(self, num_cores: float, first: Readings) -> None:
        self._num_cores = num_cores
        self._last = first
        self._own_seconds = 0.0
        self._disk_seconds = 0.0
        self._load: Load | None = None

    def count(self, cpu_seconds: float, disk_seconds: float | None) -> None:
        """A job ended. `disk_seconds`: how many the disk would have needed for it, unencoded; None: not known."""
        self._own_seconds += cpu_seconds
        self._disk_seconds += math.inf if disk_seconds is None else disk_seconds

    def update(self, readings: Readings) -> Load:
        """Take in the time since the last update; returns the load of late."""
        wall_seconds = max(readings.wall - self._last.wall, 1e-9)
        others_seconds = max(0.0, readings.process - self._last.process - self._own_seconds)
        free_seconds = self._num_cores * wall_seconds - others_seconds
        if readings.idle is not None and self._last.idle is not None:
            free_seconds = min(free_seconds, readings.idle - self._last.idle + self._own_seconds)
        demand = min(1.0, self._disk_seconds / wall_seconds)
        newest = Load(demand, max(0.0, free_seconds) / wall_seconds)
        weight = 1 - math.exp(-wall_seconds / _MEMORY_SECONDS)
        known = self._load or newest
        self._load = Load(*(old + weight * (new - old) for old, new in zip(known, newest, strict=True)))
        self._last, self._own_seconds, self._disk_seconds = readings, 0.0, 0.0
        return self._load


def read_machine() -> Readings:
    """The clocks now; takes some tens of microseconds. Idle time: fields 4 and 5 of a core's line in /proc/stat
    (proc(5))."""
    allowed = {b"cpu%d" % core for core in allowed_cores()}
    try:
        with open("/proc/stat", "rb") as stat:
            lines = [line.split() for line in stat if line.startswith(b"cpu")]
        ticks = sum(int(line[4]) + int(line[5]) for line in lines if line[0] in allowed)
        idle_seconds = ticks / _TICKS_PER_SECOND
    except (OSError, ValueError, IndexError):
        idle_seconds = None
    return Readings(time.perf_counter(), idle_seconds, time.process_time())
