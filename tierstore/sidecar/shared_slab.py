"""Memory that a store and the daemon share: a memfd, of fixed size and with all its pages before it is shared."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

from ..disk.allocator import round_up
from ..disk.forking import Inode, inode_of, not_while_forking
from ..disk.linux import address_of, dont_fork, make_pages_huge

__all__ = ["SEALS", "SharedSlab"]

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Without the seals, cutting a slab short would kill its readers by SIGBUS (memfd_create(2))."""

_F_ADD_SEALS = 1033  # linux/fcntl.h


class SharedSlab:
    """The client's side of one slab. The constructor blocks: every page is allocated here, and counted to this process.

    Args:
        number: its name on both sides.
        num_bytes: its length; rounded up to whole pages.
        inodes: the files that a forked child has to give up. The slab's inode is among them for as long as it is open,
            from before it has a page. None: a child keeps it.

    Attributes:
        memory: all of it, writable.
        descriptor: the memfd's.
        inode: the memfd's.

    Raises:
        OSError: there is not enough memory (ENOMEM, ENOSPC), or no descriptor is left.
    """

    def __init__(self, number: int, num_bytes: int, inodes: set[Inode] | None = None) -> None:
        self.number = number
        self._inodes = set[Inode]() if inodes is None else inodes
        self.num_bytes = max(round_up(num_bytes), mmap.PAGESIZE)
        with not_while_forking:
            self.descriptor = os.memfd_create("tierstore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self.inode: Inode = inode_of(self.descriptor)
            self._inodes.add(self.inode)
        try:
            os.posix_fallocate(self.descriptor, 0, self.num_bytes)
            with contextlib.suppress(OSError):  # only slower
                make_pages_huge(self.descriptor, self.num_bytes)
            fcntl.fcntl(self.descriptor, _F_ADD_SEALS, SEALS)
            self._mapping = mmap.mmap(self.descriptor, self.num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self.memory = memoryview(self._mapping)
            dont_fork(address_of(self.memory), self.num_bytes)
        except BaseException:
            self._close_descriptor()
            raise

    def close(self) -> None:
        """Close it; idempotent. The memory is free when no view of it is left, here and in the daemon."""
        if self.descriptor >= 0:
            self._close_descriptor()
            self.memory = memoryview(b"")
            del self._mapping

    def _close_descriptor(self) -> None:
        with not_while_forking:
            self._inodes.discard(self.inode)
            os.close(self.descriptor)
            self.descriptor = -1
