"""Measures how fast a directory's drive is, with the store's own system calls, in bounded time.

A file without a name is reserved, filled once, and then read and rewritten in place, as a store does with a segment, in
the largest blocks that drive and memory afford. Without O_DIRECT each written block is synced, and blocks
are dropped from the page cache before they are read."""

from __future__ import annotations

import mmap
import os
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from msgspec.structs import replace

from ..base.system_words import words_of
from ..base.threads import start_thread
from ..disk.codec.load import Direction
from ..disk.file_layout import UnnamedFileLayout
from ..disk.segments import IoMode, Segment, close_segments, detect_io_mode, open_segment
from ..disk.transfer import read_all, write_all
from .measurements import Drive, Transfer
from .system import describe_drive

KIB, MIB = 2**10, 2**20

BLOCKS = (16 * MIB, MIB, 128 * KIB)
"""Sizes of records that a store writes to extents: from a large saved tensor to a little over `inline_bytes`."""
DEPTHS = (1, 4)
"""One transfer at a time, and four: the number that a store has at the drive in each direction by default."""

SLACK_SECONDS = 10.0
"""How much longer than planned all steps may take before the drive counts as not answering."""

_SPAN_BYTES = 512 * MIB
_LEAST_SPAN_BYTES = 16 * MIB
_FREE_SHARE = 2  # half of the free space
_LATENCY_BYTES = 4 * KIB
_FILL_SHARE, _LATENCY_SHARE, _STEP_SHARE = 0.15, 0.03, 0.18  # of the time: 1, 2 and 4 steps
_SCATTER = 7919  # a prime: small blocks are spread over the file, so that no drive reads ahead


@dataclass
class _Run:
    """A measurement under way. The lanes only add to it; after an error no more transfers are begun."""

    began_at: float = field(default_factory=time.monotonic)
    ended_at: float = 0.0
    call_seconds: list[float] = field(default_factory=list)
    error: Exception | None = None
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def blocks_per_second(self) -> float:
        return len(self.call_seconds) / (self.ended_at - self.began_at)


class _Bench:
    def __init__(self, segment: Segment, mode: IoMode, memory_bytes: int) -> None:
        self._blocks = [block for block in BLOCKS if block * max(DEPTHS) <= memory_bytes] or BLOCKS[-1:]
        self._descriptor = segment.file.fileno()
        self._mode = mode
        self._span_bytes = segment.num_bytes
        noise = os.urandom(self._blocks[0])  # no drive can compress it
        buffers = [mapped(len(noise)) for _ in range(max(DEPTHS))]
        for each in buffers:
            each.write(noise)
        self._buffers = [memoryview(each) for each in buffers]

    def fill(self, seconds: float, step_seconds: float) -> int:
        """Write the file from its beginning, once at most. Returns bytes, within which all later transfers stay.

        Their size is such that a step of so many seconds can move some."""
        block_bytes = min(MIB, self._blocks[0])
        run = self._move("write", block_bytes, max(DEPTHS), seconds, once=True)
        self._span_bytes = len(run.call_seconds) * block_bytes
        affordable_bytes = min(self._span_bytes, run.blocks_per_second * block_bytes * step_seconds) / max(DEPTHS)
        self._blocks = [block for block in self._blocks if block <= affordable_bytes] or BLOCKS[-1:]
        return self._span_bytes

    def latency_seconds(self, direction: Direction, seconds: float) -> float:
        return statistics.median(self._move(direction, _LATENCY_BYTES, 1, seconds, stride=_SCATTER).call_seconds)

    def transfer(self, direction: Direction, depth: int, seconds: float) -> Transfer:
        block_bytes = self._blocks[0]
        speed = self._move(direction, block_bytes, depth, seconds).blocks_per_second * block_bytes
        return Transfer(block_bytes=block_bytes, depth=depth, bytes_per_second=speed)

    def _move(
        self, direction: Direction, block_bytes: int, depth: int, seconds: float, *, once: bool = False, stride: int = 1
    ) -> _Run:
        """Move blocks, `depth` at once, for so long, one of each lane at least. Raises OSError if the drive fails.
        `once`: stop at the end of the file. `stride`: from one transfer to the next, in blocks."""
        if direction == "read" and not self._mode.direct:
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        num_places = self._span_bytes // block_bytes
        move = read_all if direction == "read" else write_all
        run = _Run()

        def move_blocks(buffer: memoryview) -> None:
            """Every transfer begun is completed, so a filled file has no gaps."""
            try:
                while run.error is None:
                    number = next(run.numbers)
                    if once and number >= num_places:
                        return
                    began_at = time.monotonic()
                    move(self._descriptor, [buffer], number * stride % num_places * block_bytes)
                    if direction == "write" and not self._mode.direct:
                        os.fdatasync(self._descriptor)
                    run.ended_at = time.monotonic()
                    run.call_seconds.append(run.ended_at - began_at)
                    if run.ended_at >= run.began_at + seconds:
                        return
            except Exception as error:  # noqa: BLE001 - raised on the thread that waits for the lanes
                run.error = error

        lanes: list[threading.Thread] = []
        try:
            for buffer in self._buffers[:depth]:
                lanes += [start_thread(partial(move_blocks, buffer[:block_bytes]), "tierstore-doctor")]
        except OSError as error:  # no more threads; those that were started use the file
            run.error = error
        for lane in lanes:
            lane.join()
        if run.error is not None:
            raise run.error
        return run


def measure_drive(directory: Path, *, seconds: float, memory_bytes: int) -> Drive:
    """Measure the drive of a writable directory. Blocks for about `seconds`, at most `SLACK_SECONDS` longer.

    `memory_bytes`: the most that buffers may take. Faults of the drive raise nothing: they are in `error`, beside what
    was measured before. A transfer that never comes back keeps a daemon thread, its buffer and the file until the
    process ends."""
    known, bugs = describe_drive(directory), list[Exception]()

    def run() -> None:
        nonlocal known
        try:
            for each in _measured(known, directory, seconds, memory_bytes):
                known = each
        except OSError as error:  # of the drive
            known = replace(known, error=words_of(error).removeprefix(f"[Errno {error.errno}] "))
        except Exception as error:  # noqa: BLE001 - raised on the waiting thread
            bugs.append(error)

    thread = start_thread(run, "tierstore-doctor")
    thread.join(seconds + SLACK_SECONDS)
    for bug in bugs:
        raise bug
    if thread.is_alive():
        return replace(known, error=f"it did not answer within {SLACK_SECONDS:g} s")
    return known


def _measured(drive: Drive, directory: Path, seconds: float, memory_bytes: int) -> Iterator[Drive]:
    mode = detect_io_mode(directory)
    drive = replace(drive, io_mode=mode.description)
    yield drive
    blocks = drive.free_bytes // _FREE_SHARE // _LEAST_SPAN_BYTES  # blocks of every size fit into one of these
    span_bytes = min(_SPAN_BYTES, blocks * _LEAST_SPAN_BYTES)
    if span_bytes >= _LEAST_SPAN_BYTES:
        segment = open_segment(UnnamedFileLayout(directory), 0, span_bytes, _LEAST_SPAN_BYTES, mode, set())
        try:
            yield from _steps(drive, _Bench(segment, mode, memory_bytes), seconds)
        finally:
            close_segments([segment], set())


def _steps(drive: Drive, bench: _Bench, seconds: float) -> Iterator[Drive]:
    step_seconds = _STEP_SHARE * seconds
    drive = replace(drive, span_bytes=bench.fill(_FILL_SHARE * seconds, step_seconds))
    yield drive
    drive = replace(drive, write_latency_seconds=bench.latency_seconds("write", _LATENCY_SHARE * seconds))
    yield drive
    drive = replace(drive, read_latency_seconds=bench.latency_seconds("read", _LATENCY_SHARE * seconds))
    yield drive
    for depth in DEPTHS:
        written, read = (bench.transfer(direction, depth, step_seconds) for direction in ("write", "read"))
        drive = replace(drive, writes=(*drive.writes, written), reads=(*drive.reads, read))
        yield drive


def mapped(num_bytes: int) -> mmap.mmap:
    """A private buffer, in huge pages if there are any."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without huge pages
    return memory
