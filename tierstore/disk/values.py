"""How much of the disk budget and of the index's map a *value* takes: a record that lives in the index. Pure."""

from __future__ import annotations

from .allocator import round_up

__all__ = ["MAP_SPARE_BYTES", "map_bytes_for", "value_charge_bytes"]

MAP_SPARE_BYTES = 64 * 2**20
"""Room in a map for tables, free lists, and the copies that one transaction makes of the pages that it changes."""

_ENTRY_BYTES = 256  # two tables' keys and nodes, a location of at most 90 bytes, pages half full
_IN_LEAF_BYTES = 1024  # a longer value may go to overflow pages of its own (LMDB: about half a page)
_PAGE_HEADER_BYTES = 16
_MOST_MAP_BYTES = 2**44  # an eighth of what x86-64 lets a process map; 16 TiB are never filled by small values


def value_charge_bytes(num_bytes: int) -> int:
    """How much a value of this length takes of the disk budget, its index entry included."""
    if num_bytes <= _IN_LEAF_BYTES:
        return 2 * _ENTRY_BYTES + 2 * num_bytes
    return 2 * _ENTRY_BYTES + round_up(num_bytes + _PAGE_HEADER_BYTES)


def map_bytes_for(disk_bytes: int) -> int:
    """The size of a map that records charged against `disk_bytes` cannot fill. (On a full map even deletes fail.)

    It is address space, not memory or disk. There is room for twice the budget, because LMDB looks for contiguous
    pages for values, and for the entries if all of the budget is extents of 4 KiB.
    """
    return min(round_up(2 * disk_bytes + disk_bytes // 4096 * 2 * _ENTRY_BYTES + MAP_SPARE_BYTES), _MOST_MAP_BYTES)
