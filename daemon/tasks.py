"""The stage of the daemon, and its background tasks. For one loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any


class Stage:
    """The daemon's stage, and the ways to ask it to end. `is_open`: clients are served; set by the daemon alone."""

    def __init__(self) -> None:
        self.is_open = False
        self.ending = asyncio.Event()
        self.ending_at_once = asyncio.Event()
        self._is_signalled = False

    @property
    def is_ending(self) -> bool:
        return self.ending.is_set()

    def signalled(self) -> None:
        """The first signal lets the daemon finish its work, the second does not."""
        if self._is_signalled:
            self.ending_at_once.set()
        self._is_signalled = True
        self.ending.set()


_log = logging.getLogger("tierstore.daemon")


class Tasks:
    """Starts coroutines as tasks of `group` that do not affect each other. `after_each` is called after each. Bugs of
    requests are caught by their connection, because its client has to be told; those of others here."""

    def __init__(self, after_each: Callable[[], None]) -> None:
        self.num_internal_errors = 0
        self._after_each = after_each
        self.group: asyncio.TaskGroup

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self.group.create_task(self._contain(work))

    def note_bug(self, about: Mapping[str, object] | None = None) -> None:
        """Count and log the exception that is being handled. `about`: fields for the log line."""
        self.num_internal_errors += 1
        _log.exception("a bug, please report it", extra=about)

    async def _contain(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:  # noqa: BLE001 - logged; a client that waits for an answer is told by its connection
            self.note_bug()
        self._after_each()
