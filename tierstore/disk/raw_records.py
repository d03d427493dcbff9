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
    tail = source[len(source) - layout.tail_bytes :]
    side = _side_block(layout, alignment_bytes, scratch)
    side[: layout.head_bytes] = source[: layout.head_bytes]
    side[layout.head_bytes : layout.head_bytes + layout.tail_bytes] = tail
    write_all(descriptor, [_interior(source, layout), side], offset)
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
    interior = _interior(destination, layout)
    side = _side_block(layout, alignment_bytes, scratch)
    if not interior or address_of(interior) % alignment_bytes == 0:
        read_all(descriptor, [interior, side], offset)
    else:
        _read_through(descriptor, offset, interior, scratch)
        read_all(descriptor, [side], offset + layout.interior_bytes)
    destination[: layout.head_bytes] = side[: layout.head_bytes]
    tail = side[layout.head_bytes : layout.head_bytes + layout.tail_bytes]
    destination[len(destination) - layout.tail_bytes :] = tail


def _interior(memory: memoryview, layout: RawLayout) -> memoryview:
    return memory[layout.head_bytes : layout.head_bytes + layout.interior_bytes]


def _side_block(layout: RawLayout, alignment_bytes: int, scratch: Scratch) -> memoryview:
    """Room for head and tail, padded so that a write ends on a block: ext4 is slow otherwise."""
    num_bytes = sum(layout)
    if alignment_bytes == 1:
        return scratch.side[:0]
    return scratch.side[: round_up(num_bytes) - layout.interior_bytes]


def _read_through(descriptor: int, offset: int, interior: memoryview, scratch: Scratch) -> None:
    done = 0
    while done < len(interior):
        piece = scratch.chunk[: len(interior) - done]
        read_all(descriptor, [piece], offset + done)
        copy_memory(interior[done : done + len(piece)], piece)
        done += len(piece)
