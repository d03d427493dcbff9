"""Finds out how extents are read and written in a directory: with O_DIRECT or buffered."""

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


class IoMode(NamedTuple):
    """How to read and write a file.

    Attributes:
        direct: O_DIRECT is set on the descriptor.
        description: "O_DIRECT", or "buffered (reason)".
    """

    direct: bool
    description: str


def detect_io_mode(directory: Path) -> IoMode:
    """Try a small unnamed file under `directory`. Blocks for a small write.

    tmpfs accepts O_DIRECT without any effect; on NFS, ZFS and FUSE it is slower than the page cache or
    refused at the first odd request. They are known by their type and not tried.

    Raises:
        OSError: nothing can be created there.
    """
    if name := file_system_of(directory):
        return IoMode(False, f"buffered ({name})")
    descriptor = open_unnamed(directory)
    try:
        set_direct(descriptor)
        if _accepts_a_block(descriptor):
            return IoMode(True, "O_DIRECT")
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
    return IoMode(False, "buffered (the file system refuses O_DIRECT)")


def set_direct(descriptor: int) -> None:
    """Switch O_DIRECT on for an open file.

    Raises:
        OSError: EINVAL where the file system refuses.
    """
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)


def _accepts_a_block(descriptor: int) -> bool:
    with mmap.mmap(-1, ALIGNMENT_BYTES) as block:
        try:
            os.pwritev(descriptor, [block], 0)
        except OSError as error:
            # A full disk must not prevent opening; that O_DIRECT works is assumed then.
            if error.errno not in (errno.EINVAL, errno.ENOSPC, errno.EDQUOT):
                raise
            return error.errno != errno.EINVAL
    return True
