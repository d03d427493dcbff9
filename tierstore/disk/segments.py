"""Segment files: made, allocated, found again and closed, with O_DIRECT where that serves. Blocking jobs."""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from .allocator import ALIGNMENT_BYTES, round_up
from .forking import Inode, inode_of, not_while_forking
from .linux import file_system_of, is_overlay_in_memory, open_unnamed
from .transfer import SYSTEM_CALLS


class IoMode(NamedTuple):
    """How to read and write a file; in words: "O_DIRECT", or "buffered (reason)"."""

    direct: bool
    description: str


def detect_io_mode(directory: Path) -> IoMode:
    """Try a small unnamed file under `directory`. OSError: nothing can be created there. Where O_DIRECT has no effect
    (tmpfs), or is slower than the page cache or refused at odd requests (NFS, ZFS, FUSE), it is not tried."""
    if name := file_system_of(directory):
        return IoMode(False, f"buffered ({name})")
    descriptor = open_unnamed(directory)
    try:
        if is_overlay_in_memory(descriptor):
            return IoMode(False, "buffered (tmpfs under overlayfs)")
        with mmap.mmap(-1, ALIGNMENT_BYTES) as block:
            set_direct(descriptor)
            os.pwritev(descriptor, [block], 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return IoMode(False, "buffered (the file system refuses O_DIRECT)")
        if not is_out_of_space(error):  # a full disk must not prevent opening: O_DIRECT is assumed then
            raise
    finally:
        os.close(descriptor)
    return IoMode(True, "O_DIRECT")


def set_direct(descriptor: int) -> None:
    """Switch O_DIRECT on for an open file. Raises OSError: EINVAL where the file system refuses."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)


_SMALLEST_HALF_BYTES = 64 * 2**20


class Segment(NamedTuple):
    """An open segment file; its number is part of its name, if it has one."""

    number: int
    file: io.FileIO
    num_bytes: int


class SegmentFiles(Protocol):
    """Makes (an open descriptor, close-on-exec) and removes segment files, with names or without."""

    def make_segment(self, number: int) -> int: ...
    def remove_segment(self, number: int) -> None: ...


def is_out_of_space(error: Exception) -> bool:
    """Whether the file system is full, or the user's quota on it used up."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def open_segment(
    files: SegmentFiles, number: int, num_bytes: int, least_bytes: int, mode: IoMode, inodes: set[Inode]
) -> Segment:
    """Make a segment of `num_bytes`; if there is less space, or files may not be that long (`ulimit -f`), of half that,
    and so on down to `least_bytes`. Its inode is added to `inodes`. OSError: not even that is possible, or the device
    failed; nothing is left open."""
    while True:
        segment = Segment(number, _open_noted(lambda: files.make_segment(number), inodes), num_bytes)
        try:
            SYSTEM_CALLS.get().fallocate(segment.file.fileno(), num_bytes)
            if mode.direct:
                set_direct(segment.file.fileno())
        except BaseException as error:
            remove_segments(files, [segment], inodes)
            is_too_much = isinstance(error, OSError) and (is_out_of_space(error) or error.errno == errno.EFBIG)
            if not is_too_much or num_bytes <= least_bytes:
                raise
        else:
            return segment
        half = round_up(num_bytes // 2)
        num_bytes = least_bytes if half < _SMALLEST_HALF_BYTES else max(half, least_bytes)


def reopen_segment(number: int, opener: Callable[[], int], mode: IoMode) -> Segment:
    """Open a segment that an earlier process has made, by calling `opener`. On OSError nothing is left open."""
    file = _open_noted(opener, set())
    try:
        if mode.direct:
            set_direct(file.fileno())
        file_bytes = os.fstat(file.fileno()).st_size
    except BaseException:
        file.close()
        raise
    return Segment(number, file, file_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES)


def close_segments(segments: Iterable[Segment], inodes: set[Inode]) -> None:
    """Close the files and remove their inodes from `inodes`. Named files stay."""
    for segment in segments:
        inode = inode_of(segment.file.fileno())
        segment.file.close()
        inodes.discard(inode)


def remove_segments(files: SegmentFiles, segments: Iterable[Segment], inodes: set[Inode]) -> None:
    """Close the files and free their space."""
    for segment in segments:
        files.remove_segment(segment.number)
        close_segments([segment], inodes)


def _open_noted(opener: Callable[[], int], inodes: set[Inode]) -> io.FileIO:
    with not_while_forking:
        file = io.FileIO(opener(), "r+")
        inodes.add(inode_of(file.fileno()))
    return file
