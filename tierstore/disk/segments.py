"""Segment files: made, allocated and closed. Blocking jobs."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import NamedTuple

from .allocator import round_up
from .io_mode import IoMode, set_direct
from .linux import open_unnamed, reserve

__all__ = ["Segment", "is_out_of_space", "open_segment"]

_SMALLEST_HALF_BYTES = 64 * 2**20


class Segment(NamedTuple):
    """An open file without a name, and how much of it is allocated."""

    file: io.FileIO
    num_bytes: int


def is_out_of_space(error: Exception) -> bool:
    """Whether the file system is full, or the user's quota on it used up."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def open_segment(directory: Path, num_bytes: int, least_bytes: int, mode: IoMode) -> Segment:
    """Make a segment of `num_bytes`; where there is less space, of half as much, `least_bytes` at least.

    Raises:
        OSError: no space even for that (ENOSPC, EDQUOT), or the device failed; nothing is left open.
    """
    while True:
        try:
            return _open_segment(directory, num_bytes, mode)
        except OSError as error:
            if not is_out_of_space(error) or num_bytes <= least_bytes:
                raise
        half = round_up(num_bytes // 2)
        num_bytes = least_bytes if half < _SMALLEST_HALF_BYTES else max(half, least_bytes)


def _open_segment(directory: Path, num_bytes: int, mode: IoMode) -> Segment:
    file = io.FileIO(open_unnamed(directory), "r+")
    try:
        reserve(file.fileno(), num_bytes)
        if mode.direct:
            set_direct(file.fileno())
    except BaseException:
        file.close()
        raise
    return Segment(file, num_bytes)
