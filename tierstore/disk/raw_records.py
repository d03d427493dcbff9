"""Moves unencoded records straight between the caller's memory and the disk, at any address. Blocking jobs.

O_DIRECT wants memory aligned to a block; torch's is aligned to 64 bytes. So the aligned interior of the caller's memory
is written as it lies, and the unaligned head and tail follow it in a side block::

    memory   ──┤head├───────────── interior ─────────────┤tail├──
    extent     ├───────────── interior ─────────────┤head tail 0…├     rounded up to 4096

A destination whose address gives the same head is read into in the same way; any other through a bounce buffer.
"""

from __future__ import annotations

from typing import NamedTuple

from .allocator import round_up
from .linux import address_of, copy_memory
from .scratch import Scratch
from .transfer import read_all, write_all


class RawLayout(NamedTuple):
    """The lengths of a record's parts."""

    head_bytes: int
    interior_bytes: int
    tail_bytes: int


def lay_out(address: int, num_bytes: int, alignment_bytes: int) -> RawLayout:
    """Cut memory at `address` so that its interior is aligned."""
    return split_at(-address % alignment_bytes, num_bytes, alignment_bytes)


def split_at(head_bytes: int, num_bytes: int, alignment_bytes: int) -> RawLayout:
    """Cut a record whose head is given. Without an aligned interior everything is tail, and the head is 0."""
    interior = (num_bytes - head_bytes) // alignment_bytes * alignment_bytes
    if interior <= 0:
        return RawLayout(0, 0, num_bytes)
    return RawLayout(head_bytes, interior, num_bytes - head_bytes - interior)


def write_raw(descriptor: int, offset: int, source: memoryview, alignment_bytes: int, scratch: Scratch) -> int:
    """Write a record (uint8, shape [n], any address) into its extent of n rounded up to 4096; returns its head's
    length. `alignment_bytes`: what the descriptor asks of memory: 4096 (O_DIRECT), or 1 (buffered). On OSError the
    caller still owns the bytes."""
    layout = lay_out(address_of(source), len(source), alignment_bytes)
    head, interior, tail, side = _cut(source, layout, alignment_bytes, scratch)
    side[: len(head)] = head
    side[len(head) : len(head) + len(tail)] = tail
    write_all(descriptor, [interior, side], offset)
    return layout.head_bytes


def read_raw(
    descriptor: int,
    offset: int,
    destination: memoryview,
    head_bytes: int,
    alignment_bytes: int,
    scratch: Scratch,
) -> None:
    """Read a record that `write_raw` wrote with this head and alignment. OSError: it is still there; `destination`
    holds garbage."""
    layout = split_at(head_bytes, len(destination), alignment_bytes)
    head, interior, tail, side = _cut(destination, layout, alignment_bytes, scratch)
    if not interior or address_of(interior) % alignment_bytes == 0:
        read_all(descriptor, [interior, side], offset)
    else:
        _read_through(descriptor, offset, interior, scratch)
        read_all(descriptor, [side], offset + len(interior))
    head[:] = side[: len(head)]
    tail[:] = side[len(head) : len(head) + len(tail)]


def _cut(memory: memoryview, layout: RawLayout, alignment_bytes: int, scratch: Scratch) -> tuple[memoryview, ...]:
    """Head, interior, tail, and room for head and tail, padded so that a write ends on a block: ext4 is slow else."""
    begin, end = layout.head_bytes, layout.head_bytes + layout.interior_bytes
    side_bytes = 0 if alignment_bytes == 1 else round_up(len(memory)) - layout.interior_bytes
    return memory[:begin], memory[begin:end], memory[end:], scratch.side[:side_bytes]


def _read_through(descriptor: int, offset: int, interior: memoryview, scratch: Scratch) -> None:
    done = 0
    while done < len(interior):
        piece = scratch.chunk[: len(interior) - done]
        read_all(descriptor, [piece], offset + done)
        copy_memory(interior[done : done + len(piece)], piece)
        done += len(piece)
