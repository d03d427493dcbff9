"""Aligned working memory for I/O jobs, kept and used again: fresh pages cost three times a memcpy."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from ..codec import BLOCK_BYTES, Workspace
from .linux import address_of

__all__ = ["SCRATCH_BYTES", "Scratch", "ScratchPool"]

SCRATCH_BYTES = 2 * 2**20
"""Working memory of one job. A store with n I/O threads holds at most n of these."""

_SIDE_BYTES = 16 * 2**10


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
    """Lends scratch to jobs; as many exist as jobs ever ran at once. Any thread; never blocks."""

    def __init__(self) -> None:
        self._idle: deque[Scratch] = deque()

    @contextmanager
    def lend(self) -> Iterator[Scratch]:
        """A scratch of the caller's own until the block ends; the one used last, for its warm cache."""
        try:
            scratch = self._idle.pop()
        except IndexError:
            scratch = Scratch()
        try:
            yield scratch
        finally:
            self._idle.append(scratch)
