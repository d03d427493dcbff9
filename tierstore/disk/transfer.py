"""Whole reads and writes: short ones are continued, and no call asks for more than the kernel moves at once."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Sequence

from .system_calls import SYSTEM_CALLS

__all__ = ["read_all", "write_all"]

_CALL_BYTES = 64 * 2**20  # far below the 2 GiB that Linux cuts a call to (write(2)); keeps cuts block-aligned
_SMALL_BYTES = 64 * 2**10  # side blocks are never cut: a cut inside one would leave an unaligned rest

_Call = Callable[[int, list[memoryview], int], int]


def write_all(descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write the buffers one after the other, from `offset` on. Blocks.

    Raises:
        OSError: the device or file system failed; some of it may have been written.
    """
    _move_all(SYSTEM_CALLS.get().pwritev, descriptor, buffers, offset)


def read_all(descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Fill the buffers one after the other, from `offset` on. Blocks.

    Raises:
        OSError: the device failed, or the file ends too early (EIO); the buffers hold garbage.
    """
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
