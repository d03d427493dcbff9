"""The daemon's side of a client's slab, mapped only if all its pages are allocated and it cannot be cut short: a page
that is missing is allocated by whoever touches it, at their expense. See NOTE [Seals],
`tierstore/sidecar/window.py`."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref

from tierstore.disk.linux import is_tmpfs
from tierstore.errors import ProtocolError
from tierstore.sidecar.window import F_ADD_SEALS, F_GET_SEALS, F_SEAL_FUTURE_WRITE


class MappedSlab:
    """A mapping of a client's shared memory. `descriptor`, the memfd, is owned, whatever happens.

    `is_trusted`: the client may share the memory again over another connection, and could take pages away: jobs look
    for missing ones only when they begin. Else the memory is sealed: no page can be taken away, and it can never be
    mapped again. ProtocolError: it is no memfd that is sealed against shrinking, is not all there, or cannot be sealed.
    """

    def __init__(self, descriptor: int, num_bytes: int, peer: str, *, is_trusted: bool) -> None:
        self.num_bytes = num_bytes
        self._peer = peer
        self._is_trusted = is_trusted
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        try:
            self._check_file()
            self._memory = memoryview(mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED))
            if not is_trusted:
                self._seal()
            self._check_pages(0, num_bytes)
        except OSError as error:
            raise ProtocolError(peer, f"a slab of {num_bytes} bytes cannot be mapped: {error}") from error

    def check_range(self, offset: int, num_bytes: int) -> None:
        """Raise ProtocolError if the slab does not have these bytes."""
        if offset + num_bytes > self.num_bytes:
            raise ProtocolError(self._peer, f"bytes {offset} to {offset + num_bytes} of a slab of {self.num_bytes}")

    def range(self, offset: int, num_bytes: int) -> memoryview:
        """The bytes from `offset` on, writable, for a job that begins now; the mapping lives while they are used.
        ProtocolError: the client has taken some of their pages away."""
        if self._is_trusted:
            self._check_pages(offset, num_bytes)
        return self._memory[offset : offset + num_bytes]

    def _check_file(self) -> None:
        if self.num_bytes == 0:
            raise ProtocolError(self._peer, "a slab without bytes")
        try:
            seals = fcntl.fcntl(self._descriptor, F_GET_SEALS)
        except OSError:  # EINVAL: not a memfd
            seals = 0
        if not seals & fcntl.F_SEAL_SHRINK:
            raise ProtocolError(self._peer, "a slab that is not sealed against shrinking")
        if not is_tmpfs(self._descriptor):  # there a missing page is SIGBUS, where no huge page is free
            raise ProtocolError(self._peer, "a slab of huge pages (MFD_HUGETLB)")
        length = os.fstat(self._descriptor).st_size
        if length < self.num_bytes:
            raise ProtocolError(self._peer, f"a slab of {length} bytes instead of {self.num_bytes}")

    def _seal(self) -> None:
        try:
            fcntl.fcntl(self._descriptor, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        except OSError as error:
            reason = (
                f"a slab that its user could take pages out of, and that cannot be sealed against it ({error}): "
                "update tierstore in the training, or run it as the daemon's user; Linux 5.1 or newer is needed"
            )
            raise ProtocolError(self._peer, reason) from error

    def _check_pages(self, offset: int, num_bytes: int) -> None:
        """Neither touches nor allocates a page; those that are swapped out are there."""
        hole = os.lseek(self._descriptor, offset, os.SEEK_HOLE) if num_bytes else offset
        if hole < offset + num_bytes:
            raise ProtocolError(
                self._peer, f"a slab with pages that are not allocated, the first at byte {hole} of {self.num_bytes}"
            )
