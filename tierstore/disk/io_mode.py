"""How extents are read and written under a directory: O_DIRECT where it is one, and on which memory."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import NamedTuple

from .allocator import ALIGNMENT_BYTES
from .linux import file_system_of, open_unnamed

__all__ = ["IoMode", "detect_io_mode", "set_direct"]

_SECTOR_BYTES = 512


class IoMode(NamedTuple):
    """How to reach a file.

    Attributes:
        direct: O_DIRECT is set on the descriptor.
        memory_alignment_bytes: what each buffer's address and length must be multiples of; 1 if buffered.
        description: "O_DIRECT", or "buffered (reason)".
    """

    direct: bool
    memory_alignment_bytes: int
    description: str


def detect_io_mode(directory: Path) -> IoMode:
    """Try a small unnamed file under `directory`. Blocks for two small writes.

    tmpfs accepts O_DIRECT and means nothing by it; on NFS, ZFS and FUSE it is slower than the page cache or
    refused at the first odd request. They are known by their type and not tried.

    Raises:
        OSError: nothing can be created there.
    """
    if name := file_system_of(directory):
        return IoMode(False, 1, f"buffered ({name})")
    descriptor = open_unnamed(directory)
    try:
        set_direct(descriptor)
        if alignment := _accepted_alignment(descriptor):
            return IoMode(True, alignment, "O_DIRECT")
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
    return IoMode(False, 1, "buffered (the file system refuses O_DIRECT)")


def set_direct(descriptor: int) -> None:
    """Switch O_DIRECT on for an open file.

    Raises:
        OSError: EINVAL where the file system refuses.
    """
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)


def _accepted_alignment(descriptor: int) -> int | None:
    """The memory alignment that a write of one whole block gets away with; None where none does."""
    memory = mmap.mmap(-1, 4 * ALIGNMENT_BYTES)
    with memory, memoryview(memory) as view:
        for alignment in (_SECTOR_BYTES, ALIGNMENT_BYTES):
            interior = view[alignment : 2 * alignment]
            side = view[2 * ALIGNMENT_BYTES : 3 * ALIGNMENT_BYTES - alignment % ALIGNMENT_BYTES]
            with interior, side:
                if _is_writable(descriptor, [interior, side]):
                    return alignment
    return None


def _is_writable(descriptor: int, buffers: list[memoryview]) -> bool:
    try:
        os.pwritev(descriptor, buffers, 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            # A full disk is no reason not to open; what holds everywhere is assumed.
            return len(buffers[0]) == ALIGNMENT_BYTES
        raise
    return True
