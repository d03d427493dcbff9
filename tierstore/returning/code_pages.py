"""Lets go of the resident pages of loaded code, which count as resident memory of the process.

Importing torch and what belongs to it leaves some 100 MiB of code resident, most of which is never run again. The
kernel keeps such pages in its cache; they are mapped again, sixteen at a time, where code runs. Linux, 64 bits.
"""

from __future__ import annotations

import ctypes
import mmap
from ctypes import POINTER, Structure, c_char_p, c_int, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p

import numpy as np

__all__ = ["let_go_of_code"]

_PT_LOAD, _PF_X, _PF_W = 1, 1, 2
_PRESENT_OR_SWAPPED, _OF_FILE = 3 << 62, 1 << 61
"""Of an entry of /proc/PID/pagemap (Documentation/admin-guide/mm/pagemap.rst of the kernel)."""


class _Segment(Structure):
    """Elf64_Phdr (elf(5))."""

    _fields_ = (
        ("type", c_uint32), ("flags", c_uint32), ("offset", c_uint64), ("vaddr", c_uint64), ("paddr", c_uint64),
        ("filesz", c_uint64), ("memsz", c_uint64), ("align", c_uint64),
    )  # fmt: skip


class _Library(Structure):
    """The beginning of struct dl_phdr_info (dl_iterate_phdr(3))."""

    _fields_ = (("addr", c_uint64), ("name", c_char_p), ("segments", POINTER(_Segment)), ("num_segments", c_uint16))


_CALLBACK = ctypes.PYFUNCTYPE(c_int, POINTER(_Library), c_size_t, c_void_p)


def let_go_of_code() -> None:
    """Let go of all pages of code that are as they are in their files. Takes some milliseconds; any thread.

    No library is unloaded meanwhile, so that its addresses cannot become somebody's memory: `dl_iterate_phdr` holds the
    loader's lock. It is called with Python's lock held (`PyDLL`), as nobody holds the loader's while waiting for that.
    Where the system offers none of this, nothing happens.
    """
    process = ctypes.PyDLL(None)
    if ctypes.sizeof(c_void_p) != 8 or not hasattr(process, "dl_iterate_phdr") or not hasattr(mmap, "MADV_DONTNEED"):
        return
    process.madvise.argtypes = (c_void_p, c_size_t, c_int)

    def of_library(library: ctypes._Pointer[_Library], size: int, data: object) -> int:
        for number in range(library.contents.num_segments):
            segment = library.contents.segments[number]
            if segment.type == _PT_LOAD and segment.flags & (_PF_X | _PF_W) == _PF_X:
                start = (library.contents.addr + segment.vaddr) // mmap.PAGESIZE
                end = -(-(library.contents.addr + segment.vaddr + segment.memsz) // mmap.PAGESIZE)
                pagemap.seek(8 * start)
                entries = np.frombuffer(pagemap.read(8 * (end - start)), np.uint64)
                if not np.any((entries & _PRESENT_OR_SWAPPED != 0) & (entries & _OF_FILE == 0)):  # nobody patched it
                    process.madvise(start * mmap.PAGESIZE, (end - start) * mmap.PAGESIZE, mmap.MADV_DONTNEED)
        return 0

    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            process.dl_iterate_phdr(_CALLBACK(of_library), None)
    except OSError:
        return
