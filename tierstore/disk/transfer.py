"""Whole reads and writes: short calls are continued, and none asks for more than the kernel moves at once. In the place
of the system calls `tierstore.testing` puts failing ones."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar

from .linux import reserve


class SystemCalls:
    """The calls as the kernel offers them. They block, and raise OSError."""

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """May write less than it was given."""
        return os.pwritev(descriptor, buffers, offset)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """May read less than it was asked for, and 0 bytes at the end of the file."""
        return os.preadv(descriptor, buffers, offset)

    def fallocate(self, descriptor: int, num_bytes: int) -> None:
        reserve(descriptor, num_bytes)


SYSTEM_CALLS: ContextVar[SystemCalls] = ContextVar("SYSTEM_CALLS", default=SystemCalls())  # noqa: B039 - it has no state
"""The calls of the job that runs in this context."""


_CALL_BYTES = 64 * 2**20  # far below the 2 GiB that Linux cuts a call to (write(2)); keeps cuts block-aligned
_SMALL_BYTES = 64 * 2**10  # side blocks are never cut: a cut inside one would leave an unaligned rest

_Call = Callable[[int, list[memoryview], int], int]


def write_all(descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write the buffers one after the other, from `offset` on. OSError: some of it may have been written."""
    _move_all(SYSTEM_CALLS.get().pwritev, descriptor, buffers, offset)


def read_all(descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Fill the buffers one after the other, from `offset` on. OSError: the device failed, or the file ends too early
    (EIO); the buffers hold garbage."""
    _move_all(SYSTEM_CALLS.get().preadv, descriptor, buffers, offset)


def _move_all(call: _Call, descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
    pending = deque(buffer for buffer in buffers if len(buffer))
    while pending:
        moved = call(descriptor, _next_piece(pending), offset)
        if moved == 0:
            left = sum(map(len, pending))
            raise OSError(errno.EIO, f"the file ended {left} bytes too early, at offset {offset}")
        offset += moved
        _advance(pending, moved)


def _next_piece(pending: deque[memoryview]) -> list[memoryview]:
    piece, room = [], _CALL_BYTES
    for buffer in pending:
        if len(buffer) > max(room, _SMALL_BYTES):
            piece.append(buffer[:room])
            break
        piece.append(buffer)
        room -= len(buffer)
        if room <= 0:
            break
    return piece


def _advance(pending: deque[memoryview], moved: int) -> None:
    while moved:
        first = pending.popleft()
        if moved < len(first):
            pending.appendleft(first[moved:])
            return
        moved -= len(first)
