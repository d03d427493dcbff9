"""The daemon's side of a client's slab, mapped only if all its pages are allocated and it cannot be cut short."""

from __future__ import annotations

import fcntl
import mmap
import os

from tierstore.errors import ProtocolError

__all__ = ["MappedSlab"]

_F_GET_SEALS = 1034  # linux/fcntl.h
_BLOCK_BYTES = 512  # of st_blocks (stat(2))


class MappedSlab:
    """A mapping of a client's shared memory.

    Args:
        descriptor: the memfd, as it came; closed by the constructor, whatever happens.
        num_bytes: the slab's length, as the client says.
        peer: who the client is, for messages.

    Attributes:
        num_bytes: as given.

    Raises:
        ProtocolError: it is no memfd that is sealed against shrinking, or is shorter than the client says, or has
            pages that are not allocated.
    """

    def __init__(self, descriptor: int, num_bytes: int, peer: str) -> None:
        self.num_bytes = num_bytes
        try:
            _check(descriptor, num_bytes, peer)
            self._mapping = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED)
        except OSError as error:
            raise ProtocolError(peer, f"a slab of {num_bytes} bytes cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        self._memory = memoryview(self._mapping)

    def range(self, offset: int, num_bytes: int, peer: str) -> memoryview:
        """The bytes from `offset` on, writable; the mapping lives while they are used.

        Raises:
            ProtocolError: the slab does not have them.
        """
        if offset + num_bytes > self.num_bytes:
            raise ProtocolError(peer, f"bytes {offset} to {offset + num_bytes} of a slab of {self.num_bytes}")
        return self._memory[offset : offset + num_bytes]


def _check(descriptor: int, num_bytes: int, peer: str) -> None:
    if num_bytes == 0:
        raise ProtocolError(peer, "a slab without bytes")
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError:  # EINVAL: not a memfd
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError(peer, "a slab that is not sealed against shrinking")
    status = os.fstat(descriptor)
    if status.st_size < num_bytes or status.st_blocks * _BLOCK_BYTES < num_bytes:
        raise ProtocolError(peer, f"a slab of {status.st_size} bytes, not all allocated, instead of {num_bytes}")
