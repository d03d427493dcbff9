"""The stage of a daemon: it starts, is open, ends. For one loop."""

from __future__ import annotations

import asyncio

__all__ = ["Stage"]


class Stage:
    """The daemon's stage, which others ask about, and the ways to ask it to end. Only the two `wait_…` wait.

    Attributes:
        is_open: the disk tier is there, and clients are served. Set by the daemon alone.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._ending = asyncio.Event()
        self._ending_at_once = asyncio.Event()
        self._num_signals = 0

    @property
    def is_ending(self) -> bool:
        """Whether the daemon takes no more work."""
        return self._ending.is_set()

    @property
    def is_ending_at_once(self) -> bool:
        """Whether the daemon does not even finish the work that it has taken."""
        return self._ending_at_once.is_set()

    def end(self) -> None:
        """Ask the daemon to finish its work and end; idempotent."""
        self._ending.set()

    def signalled(self) -> None:
        """Take in a signal that asks for the end. The first lets the daemon finish its work, the second does not."""
        self._num_signals += 1
        self._ending.set()
        if self._num_signals > 1:
            self._ending_at_once.set()

    async def wait_for_end(self) -> None:
        """Return when the daemon is asked to end."""
        await self._ending.wait()

    async def wait_for_end_at_once(self) -> None:
        """Return when the daemon is asked not to finish its work."""
        await self._ending_at_once.wait()
