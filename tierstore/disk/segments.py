"""Segment files: made, allocated and closed. Blocking jobs."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import NamedTuple

from .allocator import round_up
from .forking import Inode, inode_of, not_while_forking
from .io_mode import IoMode, set_direct
from .linux import open_unnamed, reserve

__all__ = ["Segment", "close_segments", "is_out_of_space", "open_segment"]

_SMALLEST_HALF_BYTES = 64 * 2**20


class Segment(NamedTuple):
    """An open file without a name, and how much of it is allocated."""

    file: io.FileIO
    num_bytes: int


def is_out_of_space(error: Exception) -> bool:
    """Whether the file system is full, or the user's quota on it used up."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def open_segment(directory: Path, num_bytes: int, least_bytes: int, mode: IoMode, inodes: set[Inode]) -> Segment:
    """Make a segment of `num_bytes`; where there is less space, of half as much, `least_bytes` at least.

    Its inode is added to `inodes`.

    Raises:
        OSError: no space even for that (ENOSPC, EDQUOT), or the device failed; nothing is left open.
    """
    while True:
        try:
            return _open_segment(directory, num_bytes, mode, inodes)
        except OSError as error:
            if not is_out_of_space(error) or num_bytes <= least_bytes:
                raise
        half = round_up(num_bytes // 2)
        num_bytes = least_bytes if half < _SMALLEST_HALF_BYTES else max(half, least_bytes)


def close_segments(files: list[io.FileIO], inodes: set[Inode]) -> None:
    """Close the files; their inodes are then taken from `inodes`."""
    for file in files:
        inode = inode_of(file.fileno())
        file.close()
        inodes.discard(inode)


def _open_segment(directory: Path, num_bytes: int, mode: IoMode, inodes: set[Inode]) -> Segment:
    with not_while_forking:
        file = io.FileIO(open_unnamed(directory), "r+")
        inodes.add(inode_of(file.fileno()))
    try:
        reserve(file.fileno(), num_bytes)
        if mode.direct:
            set_direct(file.fileno())
    except BaseException:
        close_segments([file], inodes)
        raise
    return Segment(file, num_bytes)
