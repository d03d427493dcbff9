"""The space of LMDB's free pages, given back to the drive: the file keeps its length, and gets holes. Blocking calls.

LMDB itself never shortens its file. Which pages are free stands in a tree of the file (mdb.c, FREE_DBI): from the
number of a transaction to the pages that it has freed. Between two write transactions LMDB uses none of them, and
without `writemap` it writes a page as a whole when it uses it again. So a hole serves as well as an old page, and all
other pages stay where they are."""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterator
from typing import NamedTuple

from .codec.family import DamagedBytesError
from .linux import punch_hole

_PAGE = struct.Struct("=QHHHH")  # MDB_page: number, padding, flags, end of the nodes' offsets, begin of the nodes
_NODE = struct.Struct("=HHHH")  # MDB_node: low and high half of a length or page number, flags, length of the key
_TREE = "IHHQQQQQ"  # MDB_db; the free pages' one begins with the length of a page; the last is the root's number
_META = struct.Struct(f"=IIQQ{_TREE}{_TREE}QQ")  # MDB_meta
_NUMBER_BYTES = 8
_NUM_HEAD_PAGES = 2
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW, _BIG_DATA = 1, 2, 4, 1
_NO_ROOT = 2**64 - 1


class _Head(NamedTuple):
    """What the newer one of the two head pages says."""

    transaction: int
    page_bytes: int
    root: int
    last_page: int


def give_back_free_pages(descriptor: int) -> None:
    """Between two transactions of LMDB on that file. DamagedBytesError: its free pages cannot be told; nothing was
    given back. OSError: the file system makes no holes, or the device failed; what is in use is as it was."""
    first_head = _head_at(descriptor, 0)
    head = max(first_head, _head_at(descriptor, first_head.page_bytes))
    runs = [run for pages in _free_lists(descriptor, head) for run in _runs_of(pages, head.last_page)]
    for first, end in runs:
        punch_hole(descriptor, first * head.page_bytes, (end - first) * head.page_bytes)


def _head_at(descriptor: int, offset: int) -> _Head:
    packed = _read(descriptor, offset + _PAGE.size, _META.size)
    magic, version, _, _, page_bytes, *_ = found = _META.unpack(packed)
    if (magic, version) != (_MAGIC, _VERSION):
        raise DamagedBytesError(f"a file of LMDB's format {_VERSION}", f"{magic:x}, format {version}")
    return _Head(found[-1], page_bytes, found[11], found[-2])


def _free_lists(descriptor: int, head: _Head) -> Iterator[array[int]]:
    """The lists of the tree; each is in descending order."""
    pending = [] if head.root == _NO_ROOT else [head.root]
    num_read = 0
    while pending:
        page = _read(descriptor, pending.pop() * head.page_bytes, head.page_bytes)
        num_read += 1
        if num_read > head.last_page:
            raise DamagedBytesError("a tree of free pages", "one that leads in circles")
        _, _, flags, nodes_end, _ = _PAGE.unpack_from(page)
        for place in struct.unpack_from(f"={(nodes_end - _PAGE.size) // 2}H", page, _PAGE.size):
            low, high, node_flags, key_bytes = _NODE.unpack_from(page, place)
            if flags & _BRANCH:
                pending.append(low | high << 16 | node_flags << 32)
            elif flags & _LEAF:
                data = place + _NODE.size + key_bytes
                num_bytes = low | high << 16
                if node_flags & _BIG_DATA:
                    (first,) = struct.unpack_from("=Q", page, data)
                    yield _list_in(_overflowing(descriptor, first, num_bytes, head))
                else:
                    yield _list_in(page[data : data + num_bytes])
            else:
                raise DamagedBytesError("a page of the tree of free pages", f"flags {flags:x}")


def _overflowing(descriptor: int, first: int, num_bytes: int, head: _Head) -> bytes:
    content = _read(descriptor, first * head.page_bytes, _PAGE.size + num_bytes)
    if not _PAGE.unpack_from(content)[2] & _OVERFLOW:
        raise DamagedBytesError("a long list of free pages", f"another kind of page at {first}")
    return content[_PAGE.size :]


def _list_in(packed: bytes) -> array[int]:
    """MDB_IDL: how many, then the numbers; there may be spare room behind them."""
    numbers = array("Q", packed[: len(packed) // _NUMBER_BYTES * _NUMBER_BYTES])
    if not numbers or numbers[0] >= len(numbers):
        raise DamagedBytesError("a list of free pages", f"{len(packed)} bytes")
    return numbers[1 : 1 + numbers[0]]


def _runs_of(pages: array[int], last_page: int) -> list[tuple[int, int]]:
    """(first, end) of each run of pages."""
    runs: list[tuple[int, int]] = []
    above = last_page + 1
    for page in pages:
        if not _NUM_HEAD_PAGES <= page < above:
            raise DamagedBytesError(f"free pages from {_NUM_HEAD_PAGES} on, in descending order", f"{page}")
        if runs and page == above - 1:
            runs[-1] = page, runs[-1][1]
        else:
            runs.append((page, page + 1))
        above = page
    return runs


def _read(descriptor: int, offset: int, num_bytes: int) -> bytes:
    content = os.pread(descriptor, num_bytes, offset)
    if len(content) != num_bytes:
        raise DamagedBytesError(f"{num_bytes} bytes at {offset}", f"{len(content)}")
    return content
