"""Aligned working memory for I/O jobs, kept and used again: fresh pages cost three times a memcpy."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from queue import SimpleQueue

from .codec.codec import BLOCK_BYTES, Workspace
from .codec.load import TransferClock
from .linux import address_of

__all__ = ["SCRATCH_BYTES", "Scratch", "ScratchPool", "Turns"]

SCRATCH_BYTES = 2 * 2**20
"""Working memory of one job."""

_SIDE_BYTES = 16 * 2**10

Timed = Callable[[int], AbstractContextManager[object]]


class Scratch:
    """One job's working memory.

    Attributes:
        side: where a record's unaligned head and tail pass through; 16 KiB.
        chunk: what is collected before a write, or read at once; the rest, a multiple of 4096 bytes.
        workspace: the codec's share (one block of byte planes, and the compressors).
    """

    def __init__(self) -> None:
        memory = mmap.mmap(-1, SCRATCH_BYTES)
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages: only slower
        whole = memoryview(memory)
        self.workspace = Workspace(whole[:BLOCK_BYTES])
        self.side = whole[BLOCK_BYTES : BLOCK_BYTES + _SIDE_BYTES]
        self.chunk = whole[BLOCK_BYTES + _SIDE_BYTES :]
        self.chunk_address = address_of(self.chunk)


class ScratchPool:
    """Lends scratch to jobs, and with it a turn: so many of them work at once, whoever comes next waits.

    A job that has read its record gives the turn back before it verifies it, so that the next one is at the device
    without a gap; four reads that begin together would otherwise end together, and leave the device idle. Any thread;
    `lend` blocks.

    Args:
        num_turns: how many jobs work at once.

    Attributes:
        timed: goes around a transfer of so many unencoded bytes, which then shows the device's speed.
    """

    def __init__(self, num_turns: int, timed: Timed = nullcontext) -> None:
        self.timed = timed
        self._num_turns = num_turns
        self._idle: SimpleQueue[Scratch | None] = SimpleQueue()
        for _ in range(num_turns):
            self._idle.put(None)  # made when it is needed first

    @property
    def num_lent(self) -> int:
        """Turns that are taken now."""
        return self._num_turns - self._idle.qsize()

    @contextmanager
    def lend(self) -> Iterator[Scratch]:
        """A scratch of the caller's own until the block ends."""
        scratch = self._idle.get()
        try:
            if scratch is None:
                scratch = Scratch()
            yield scratch
        finally:
            self._idle.put(scratch)


class Turns:
    """The turns of each direction: a read never waits behind writes.

    Args:
        num_each: how many jobs of each direction work at once.
        clock: sees the transfers; None: nobody does.
    """

    def __init__(self, num_each: int, clock: TransferClock | None = None) -> None:
        self.writes = ScratchPool(num_each, nullcontext if clock is None else partial(clock.timed, "write"))
        self.reads = ScratchPool(num_each, nullcontext if clock is None else partial(clock.timed, "read"))

    @property
    def num_taken(self) -> int:
        """How many jobs share the disk now."""
        return self.writes.num_lent + self.reads.num_lent
