"""Measures how much memory a part of a program adds, at its peak.

NOTE [What is counted]
Anonymous and shared memory that is resident: RssAnon + RssShmem of /proc/self/status (proc(5)), in which tensors, the
allocator's free lists and the store's slab live. File pages, such as torch's code, may be dropped at any time. The
kernel's exact peak (VmHWM) has them in it, so a thread samples every two milliseconds: tensors live for tens of those,
and on the CPU it differed from VmHWM less the file pages by less than 1 MiB."""

from __future__ import annotations

import threading

from ..base.config import memory_of_process

_SAMPLE_SECONDS = 0.002


def resident_bytes() -> int:
    """Anonymous and shared memory of this process that is resident now, see NOTE [What is counted]."""
    held = memory_of_process()
    return held.get("RssAnon", 0) + held.get("RssShmem", 0)


class PeakHostMemory:
    """Context manager: the highest level of `resident_bytes()` inside, above the level at its start. Leaving it joins
    the sampling thread."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)
        self._level_bytes = 0
        self._highest_bytes = 0

    @property
    def added_bytes(self) -> int:
        return self._highest_bytes - self._level_bytes

    def __enter__(self) -> PeakHostMemory:
        self._level_bytes = self._highest_bytes = resident_bytes()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stopped.wait(_SAMPLE_SECONDS):
            self._highest_bytes = max(self._highest_bytes, resident_bytes())
