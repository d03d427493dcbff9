"""What the threads of this process have run and waited for, by the account of the scheduler (schedstat in /proc)."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import NamedTuple

__all__ = ["ThreadTimes", "thread_times"]


class ThreadTimes(NamedTuple):
    """Since each thread began; a kernel without these accounts says 0.

    Attributes:
        background_cpu_seconds: of the threads that Python knows of, but for the main one: a store's, or a mover's.
        core_wait_seconds: the main thread was ready to run, and others had the cores.
    """

    background_cpu_seconds: float
    core_wait_seconds: float

    def since(self, before: ThreadTimes) -> dict[str, float]:
        """What came in between, by name."""
        return {name: now - then for name, now, then in zip(self._fields, self, before, strict=True)}


def thread_times() -> ThreadTimes:
    """Those of now."""
    main = threading.main_thread().native_id
    others = [thread.native_id for thread in threading.enumerate() if thread.native_id != main]
    return ThreadTimes(sum(_ran_and_waited(each)[0] for each in others), _ran_and_waited(main)[1])


def _ran_and_waited(thread: int | None) -> tuple[float, float]:
    try:
        ran, waited, _ = Path(f"/proc/{os.getpid()}/task/{thread}/schedstat").read_text().split()
    except OSError:  # it has just ended, or there is no such account
        return 0.0, 0.0
    return int(ran) / 1e9, int(waited) / 1e9
