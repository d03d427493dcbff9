"""The system calls that move a record's bytes and give it room, in one place, so that they can be replaced.

Only `tierstore.testing` does so: it puts failing ones there, for the jobs of one store.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextvars import ContextVar

from .linux import reserve

__all__ = ["SYSTEM_CALLS", "SystemCalls"]


class SystemCalls:
    """The calls as the kernel offers them. They block, and raise OSError."""

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See os.pwritev; may write less than it was given."""
        return os.pwritev(descriptor, buffers, offset)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See os.preadv; may read less than it was asked for, and 0 bytes at the end of the file."""
        return os.preadv(descriptor, buffers, offset)

    def fallocate(self, descriptor: int, num_bytes: int) -> None:
        reserve(descriptor, num_bytes)


SYSTEM_CALLS: ContextVar[SystemCalls] = ContextVar("SYSTEM_CALLS", default=SystemCalls())  # noqa: B039 - it has no state
"""The calls of the job that runs in this context."""
