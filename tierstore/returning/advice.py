"""What a store tells of the memory that the process's allocator keeps after it was freed: figures, and one sentence why
the memory of a training did not fall."""

from __future__ import annotations

from typing import NamedTuple

from ..base.config import Mode, format_bytes
from .room import anonymous_bytes

_WORTH_A_WORD_BYTES = 256 * 2**20
_LEAST_BESIDE_BUFFERS_BYTES = 64 * 2**20
"""What the store itself takes is told of from here on: its buffers are of a known size, where heaps differ."""


class MemoryUse(NamedTuple):
    """What the process holds, in bytes of anonymous memory (None: the system did not tell), and the part of it that the
    allocator keeps though it was freed (None: it does not tell)."""

    resident_bytes: int | None
    allocator_free_bytes: int | None


class FreedMemory:
    """What one store does with freed memory, as `return_memory` (`mode`) says: a `CachedMemory`, or a `Returner`.
    `num_returns`, `return_seconds`: of what it has returned itself."""

    num_returns = 0
    return_seconds = 0.0
    left_alone = ""
    """Why the allocator is told nothing; "": it is."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._limit_bytes: int | None = None  # of the process's resident memory
        self._failure: str | None = None  # what has ended all that
        self._has_told = False

    def use(self, mapped_bytes: int) -> MemoryUse:
        """`mapped_bytes`: resident memory of the store's own, which the allocator knows nothing of."""
        try:
            resident = anonymous_bytes()
        except OSError:
            return MemoryUse(None, None)
        return MemoryUse(resident, self._free_bytes(resident, mapped_bytes))

    def why_memory_stays(self, away_bytes: int, mapped_bytes: int) -> str | None:
        """The sentence, once in the life of a store; or, if so, that it has failed. `away_bytes`: of saved tensors on
        disk. `mapped_bytes`: as for `use`."""
        reason = None
        if self._has_told:
            return None
        if self._failure is not None:
            reason = f"freed memory is no longer returned to the system: {self._failure}"
        elif not self.num_returns and away_bytes >= _LEAST_BESIDE_BUFFERS_BYTES:
            free_bytes = self.use(mapped_bytes).allocator_free_bytes
            reason = why_memory_stays(away_bytes, free_bytes, self._mode, self.left_alone, mapped_bytes)
        self._has_told = reason is not None
        return reason

    def _free_bytes(self, resident_bytes: int, mapped_bytes: int) -> int | None:
        raise NotImplementedError


def keeps_too_much(away_bytes: int, free_bytes: int | None) -> bool:
    """Whether the allocator keeps half as much of freed memory (None: unknown) as saved tensors take on disk."""
    return free_bytes is not None and away_bytes >= _WORTH_A_WORD_BYTES and free_bytes >= away_bytes // 2


def why_memory_stays(
    away_bytes: int, free_bytes: int | None, mode: Mode, left_alone: str, mapped_bytes: int = 0
) -> str | None:
    """The sentence; None: memory fell, or there is too little of it to speak of, or the user wants it so. `free_bytes`:
    what the allocator keeps of freed memory; None: unknown. `left_alone`: why it is left alone. `mapped_bytes`: what
    the store takes to move them."""
    if away_bytes >= _LEAST_BESIDE_BUFFERS_BYTES and mapped_bytes >= away_bytes // 2:
        return (
            f"{format_bytes(away_bytes)} of saved tensors left memory, but the store takes "
            f"{format_bytes(mapped_bytes)} to move them: little is gained. "
            "Give TierStore a smaller staging_bytes. With a daemon, window_bytes counts too. "
            "See docs/how_to/memory_on_cpu.md."
        )
    if mode == "never" or free_bytes is None or not keeps_too_much(away_bytes, free_bytes):
        return None
    found = (
        f"{format_bytes(away_bytes)} of saved tensors left memory, but the process did not shrink by that: "
        f"its allocator keeps {format_bytes(free_bytes)} of freed memory. "
    )
    if left_alone:
        found += f"The store does not make it return that memory, because {left_alone}."
    else:
        found += (
            "Memory is not short here, so the allocator keeps it, which is faster. "
            'TierStore(..., return_memory="always") returns it in every step.'
        )
    return f"{found} See docs/how_to/memory_on_cpu.md."
