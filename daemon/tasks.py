"""The daemon's background tasks. A bug in one of them is counted and logged, and stops no other. For one loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

__all__ = ["Tasks"]

_log = logging.getLogger("tierstore.daemon")


class Tasks:
    """Starts coroutines as tasks that do not affect each other.

    A connection catches the bugs of the requests that it starts, because its client has to be told. This class catches
    the others, such as a bug at the end of a session whose client is gone.

    Args:
        after_each: called when a task has ended.

    Attributes:
        num_internal_errors: bugs since the start; each is in the log.
    """

    def __init__(self, after_each: Callable[[], None]) -> None:
        self.num_internal_errors = 0
        self._after_each = after_each
        self._group: asyncio.TaskGroup

    def run_in(self, group: asyncio.TaskGroup) -> None:
        """Start tasks in this group. Called once, before the first `start`."""
        self._group = group

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end, even if others fail."""
        self._group.create_task(self._contain(work))

    def note_bug(self, about: Mapping[str, object] | None = None) -> None:
        """Count and log the exception that is being handled.

        Args:
            about: fields for the log line.
        """
        self.num_internal_errors += 1
        _log.exception("a bug, please report it", extra=about)

    async def _contain(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:  # noqa: BLE001 - logged; a client that waits for an answer is told by its connection
            self.note_bug()
        self._after_each()
