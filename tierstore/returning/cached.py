"""What a store has of the caching allocator (`caching.py`): the same calls as a `Returner`, but no thread."""

from __future__ import annotations

from ..base.config import Mode
from .advice import may_be_told, why_memory_stays
from .allocator import allocator_of_process
from .caching import CachingAllocator
from .returner import MemoryUse
from .room import anonymous_bytes


class CachedMemory:
    """Asks the caching allocator for one store, as `return_memory` says: "auto": freed memory is kept within the room
    that there is; "always": no more than a budget of it; "never": all of it. Nothing blocks, nor raises."""

    num_returns = 0
    return_seconds = 0.0

    def __init__(self, mode: Mode, allocator: CachingAllocator) -> None:
        self._mode = mode
        self._allocator = allocator
        self._limit_bytes: int | None = None
        self._returned_before = int(allocator.figures().returned_bytes)
        self._measure = allocator_of_process().measure
        self._is_over = self._has_told = False

    def start(self) -> None:
        self._allocator.respect_cgroups()
        self._ask()

    def limit(self, nbytes: int | None) -> None:
        """Treat `nbytes` of resident memory as a limit of this process, beside those of the system; None: no more."""
        self._limit_bytes = nbytes
        self._ask()

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

    def use(self, mapped_bytes: int) -> MemoryUse:
        """See `Returner.use`."""
        try:
            resident = anonymous_bytes()
        except OSError:
            return MemoryUse(None, None)
        figures = self._allocator.figures()
        free_bytes = figures.idle_bytes
        if self._measure is not None:
            heap = self._measure()
            others = resident - figures.used_bytes - figures.idle_bytes - mapped_bytes
            free_bytes += max(0, min(heap.free_bytes, others - heap.used_bytes))
        return MemoryUse(resident, min(free_bytes, resident))

    def why_memory_stays(self, away_bytes: int, mapped_bytes: int) -> str | None:
        """See `Returner.why_memory_stays`."""
        if self._has_told or not may_be_told(away_bytes):
            return None
        free_bytes = self.use(mapped_bytes).allocator_free_bytes
        reason = why_memory_stays(away_bytes, free_bytes, self._mode, "", mapped_bytes)
        self._has_told = reason is not None
        return reason

    def _ask(self) -> None:
        if not self._is_over:
            self._allocator.ask(self, (self._mode, self._limit_bytes))
