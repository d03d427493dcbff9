"""One sentence why the memory of a training did not fall."""

from __future__ import annotations

from ..base.config import Mode, format_bytes

_WORTH_A_WORD_BYTES = 256 * 2**20
_LEAST_BESIDE_BUFFERS_BYTES = 64 * 2**20
"""What the store itself takes is told of from here on: its buffers are of a known size, where heaps differ."""


def may_be_told(away_bytes: int) -> bool:
    """Whether enough bytes of saved tensors are on disk for any message."""
    return away_bytes >= _LEAST_BESIDE_BUFFERS_BYTES


def keeps_too_much(away_bytes: int, free_bytes: int | None) -> bool:
    """Whether the allocator keeps half as much of freed memory (None: unknown) as saved tensors take on disk."""
    return free_bytes is not None and away_bytes >= _WORTH_A_WORD_BYTES and free_bytes >= away_bytes // 2


def why_memory_stays(
    away_bytes: int, free_bytes: int | None, mode: Mode, left_alone: str, mapped_bytes: int = 0
) -> str | None:
    """The sentence; None: memory fell, or there is too little of it to speak of, or the user wants it so. `away_bytes`:
    of saved tensors on disk. `free_bytes`: what the allocator keeps of freed memory; None: unknown. `left_alone`: why
    it is left alone. `mapped_bytes`: what the store takes to move them."""
    if may_be_told(away_bytes) and mapped_bytes >= away_bytes // 2:
        return (
            f"{format_bytes(away_bytes)} of saved tensors left memory, but the store takes "
            f"{format_bytes(mapped_bytes)} to move them: little is gained. "
            "Give TierStore a smaller staging_bytes. See docs/how_to/memory_on_cpu.md."
        )
    if mode == "never" or free_bytes is None or not keeps_too_much(away_bytes, free_bytes):
        return None
    found = (
        f"{format_bytes(away_bytes)} of saved tensors left memory, but the process did not shrink by that: "
        f"its allocator keeps {format_bytes(free_bytes)} of freed memory"
    )
    if left_alone:
        return (
            f"{found}. The store does not make it return that memory, because {left_alone}. "
            "See docs/how_to/memory_on_cpu.md."
        )
    return (
        f"{found}. Memory is not short here, so the allocator keeps it, which is faster. "
        'TierStore(..., return_memory="always") returns it in every step. See docs/how_to/memory_on_cpu.md.'
    )
