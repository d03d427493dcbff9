"""Aligned working memory for I/O jobs. It is kept and used again, because fresh pages cost three times a memcpy."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from queue import SimpleQueue

from .codec.family import BLOCK_BYTES, Workspace
from .codec.load import TransferClock

SCRATCH_BYTES = 2 * 2**20
"""Working memory of one job."""

_SIDE_BYTES = 16 * 2**10

Timed = Callable[[int], AbstractContextManager[object]]


class Scratch:
    """One job's working memory. `side`: a record's unaligned head and tail pass through here; 16 KiB. `chunk`: bytes
    are collected here before a write, or read into it; a multiple of 4096 bytes. `workspace`: the codec's share."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, SCRATCH_BYTES)
        with suppress(OSError):  # a kernel without huge pages: only slower
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = memoryview(memory)
        self.workspace = Workspace(whole[:BLOCK_BYTES])
        self.side = whole[BLOCK_BYTES : BLOCK_BYTES + _SIDE_BYTES]
        self.chunk = whole[BLOCK_BYTES + _SIDE_BYTES :]


class ScratchPool:
    """Lends working memory to jobs (blocks; any thread), and with it a turn: a limited number of jobs works at once. A
    job that has read gives its turn back before it verifies the bytes, so the next job is at the device without a gap.
    `timed`: makes a context that times an unencoded transfer of that length."""

    def __init__(self, num_turns: int, timed: Timed = nullcontext) -> None:
        self.timed = timed
        self._num_turns = num_turns
        self._idle: SimpleQueue[Scratch | None] = SimpleQueue()
        for _ in range(num_turns):
            self._idle.put(None)  # made when it is needed first

    @property
    def num_lent(self) -> int:
        return self._num_turns - self._idle.qsize()

    @contextmanager
    def lend(self) -> Iterator[Scratch]:
        scratch = self._idle.get()
        try:
            if scratch is None:
                scratch = Scratch()
            yield scratch
        finally:
            self._idle.put(scratch)


class ScratchTurns:
    """The turns of each direction, counted apart: a read never waits behind writes. `clock` times the transfers."""

    def __init__(self, num_each: int, clock: TransferClock | None = None) -> None:
        self.writes = ScratchPool(num_each, nullcontext if clock is None else partial(clock.timed, "write"))
        self.reads = ScratchPool(num_each, nullcontext if clock is None else partial(clock.timed, "read"))

    @property
    def num_taken(self) -> int:
        """How many jobs share the disk now."""
        return self.writes.num_lent + self.reads.num_lent
