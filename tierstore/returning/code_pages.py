"""Lets go of the resident pages of a library's code, which count as resident memory of the process: importing torch
leaves some 70 MiB. They are mapped again where code runs. Linux alone."""

from __future__ import annotations

import mmap
import os
import re
from io import FileIO
from pathlib import Path

import numpy as np

from .allocator import libc

_CODE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r-xp [0-9a-f]+ \S+ [1-9]\d* +(/.*)$", re.MULTILINE)
"""Private mappings of files that can be run, in /proc/self/maps (proc(5))."""
_PRESENT_OR_SWAPPED, _OF_FILE = 3 << 62, 1 << 61
"""Of an entry of /proc/PID/pagemap (Documentation/admin-guide/mm/pagemap.rst of the kernel)."""


def release_code(directory: Path) -> None:
    """Let go of all resident code of the libraries under a directory, which must never be unloaded, as Python's modules
    are not. Takes some milliseconds; any thread. Code that somebody has changed in memory, such as a debugger, stays.
    Where the system offers none of this, nothing happens."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            for found in _CODE.finditer(maps):
                start, end = int(found[1], 16), int(found[2], 16)
                if found[3].startswith(f"{directory}{os.sep}") and _is_as_in_file(pagemap, start, end):
                    libc.madvise(start, end - start, mmap.MADV_DONTNEED)
    except OSError:
        return


def _is_as_in_file(pagemap: FileIO, start: int, end: int) -> bool:
    """Whether no page of this memory was changed, and so copied, since the file was mapped."""
    num_pages = (end - start) // mmap.PAGESIZE
    pagemap.seek(start // mmap.PAGESIZE * 8)
    entries = np.frombuffer(pagemap.read(num_pages * 8), np.uint64)
    is_own = (entries & _PRESENT_OR_SWAPPED != 0) & (entries & _OF_FILE == 0)
    return len(entries) == num_pages and not np.any(is_own)
