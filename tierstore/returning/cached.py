"""What a store has of the caching allocator (`caching.py`): the same calls as a `Returner`, but no thread."""

from __future__ import annotations

from ..base.config import Mode
from .advice import FreedMemory
from .allocator import allocator_of_process
from .caching import CachingAllocator


class CachedMemory(FreedMemory):
    """Asks the caching allocator for one store, as `return_memory` says: "auto": freed memory is kept within the room
    that there is; "always": no more than a budget of it; "never": all of it. Nothing blocks, nor raises."""

    def __init__(self, mode: Mode, allocator: CachingAllocator) -> None:
        super().__init__(mode)
        self._allocator = allocator
        self._returned_before = int(allocator.figures().returned_bytes)
        self._measure = allocator_of_process().measure
        self._is_over = False

    def start(self) -> None:
        self._allocator.respect_cgroups()
        self.limit(None)

    def limit(self, nbytes: int | None) -> None:
        """Treat `nbytes` of resident memory as a limit of this process, beside those of the system; None: no more."""
        self._limit_bytes = nbytes
        if not self._is_over:
            self._allocator.ask(self, (self._mode, nbytes))

    def request_stop(self) -> None:
        self._is_over = True
        self._allocator.ask(self, None)

    def stop(self, deadline_seconds: float) -> None:
        self.request_stop()

    @property
    def description(self) -> str:
        return f"{self._mode}, by the caching allocator of {self._allocator.scope}"

    @property
    def returned_bytes(self) -> int:
        return int(self._allocator.figures().returned_bytes) - self._returned_before

    def _free_bytes(self, resident_bytes: int, mapped_bytes: int) -> int:
        figures = self._allocator.figures()
        free_bytes = int(figures.idle_bytes)
        if self._measure is not None:
            heap = self._measure()
            others = resident_bytes - figures.used_bytes - figures.idle_bytes - mapped_bytes
            free_bytes += max(0, min(heap.free_bytes, others - heap.used_bytes))
        return min(free_bytes, resident_bytes)
