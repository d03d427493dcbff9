"""Aligned working memory for I/O jobs. It is kept and used again, because fresh pages cost three times a memcpy."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from queue import SimpleQueue

from .codec.family import BLOCK_BYTES, Workspace

SCRATCH_BYTES = 2 * 2**20
"""Working memory of one job."""

_SIDE_BYTES = 16 * 2**10


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

    def __init__(self, num_turns: int, timed: Callable[[int], AbstractContextManager[object]] = nullcontext) -> None:
        self.timed = timed
        self._idle: SimpleQueue[Scratch | None] = SimpleQueue()
        for _ in range(num_turns):
            self._idle.put(None)  # made when it is needed first

    @contextmanager
    def lend(self) -> Iterator[Scratch]:
        scratch = self._idle.get()
        try:
            if scratch is None:
                scratch = Scratch()
            yield scratch
        finally:
            self._idle.put(scratch)
