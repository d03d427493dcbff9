"""What the store's jobs spend their CPU time on: the functions that `tierstore/disk/records.py` calls, timed.

The times are those of the thread that runs the job. What is left of a store's CPU time is that of its loop, of whoever
calls it, and of the jobs' way between threads.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from types import TracebackType
from typing import Any

from tierstore.disk import records

__all__ = ["PARTS", "JobParts"]

PARTS = {
    "checksums": ("record_checksum",),
    "fresh_pages": ("populate",),
    "transfers": ("write_raw", "read_raw"),
}
"""The functions of each part."""


class JobParts:
    """Times them, for as long as it is entered."""

    def __init__(self) -> None:
        self._cpu_seconds: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._originals: dict[str, Any] = {}

    def __enter__(self) -> JobParts:
        for part, names in PARTS.items():
            for name in names:
                self._originals[name] = getattr(records, name)
                setattr(records, name, self._timed(part, self._originals[name]))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for name, original in self._originals.items():
            setattr(records, name, original)

    def take(self) -> dict[str, float]:
        """CPU seconds of each part since it was asked last."""
        with self._lock:
            taken = {part: self._cpu_seconds[part] for part in PARTS}
            self._cpu_seconds.clear()
        return taken

    def _timed(self, part: str, original: Any) -> Any:
        def run(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return original(*arguments)
            finally:
                seconds = time.thread_time() - began
                with self._lock:
                    self._cpu_seconds[part] += seconds

        return run
