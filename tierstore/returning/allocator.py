"""Which allocator serves this process, and how it is told to return what it keeps.

Torch allocates CPU tensors with `posix_memalign` (c10/core/impl/alloc_cpu.cpp), so the C library's allocator, or
whatever was loaded in its place, decides what happens to their memory when they die. glibc keeps blocks of up to 32 MiB
(mallopt(3), M_MMAP_THRESHOLD) until `malloc_trim` gives their pages back."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Callable, Mapping
from ctypes import CDLL, POINTER, Structure, c_char_p, c_int, c_size_t, c_void_p
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

_RELEASES: Mapping[str, tuple[str, tuple[Any, ...], tuple[Any, ...]]] = {
    "glibc": ("malloc_trim", (c_size_t,), (0,)),
    # 4096 is MALLCTL_ARENAS_ALL (jemalloc(3), "arena.<i>.purge")
    "jemalloc": ("mallctl", (c_char_p, c_void_p, c_void_p, c_void_p, c_size_t), (b"arena.4096.purge", *[None] * 3, 0)),
    "tcmalloc": ("MallocExtension_ReleaseFreeMemory", (), ()),
    "mimalloc": ("mi_collect", (ctypes.c_bool,), (True,)),
}
"""How each allocator is told to return what is free: the function, the types of its arguments, and these."""

_DECIDES: Mapping[str, re.Pattern[str]] = {
    "glibc": re.compile(
        r"MALLOC_(TRIM_THRESHOLD|MMAP_THRESHOLD|MMAP_MAX|TOP_PAD)_=."
        r"|GLIBC_TUNABLES=.*\bglibc\.malloc\.(trim_threshold|mmap_threshold|mmap_max|top_pad)="
    ),
    "jemalloc": re.compile(r"(_RJEM_|JE_)?MALLOC_CONF=.*\b(dirty_decay_ms|muzzy_decay_ms|retain):"),
    "tcmalloc": re.compile(r"TCMALLOC_(RELEASE_RATE|AGGRESSIVE_DECOMMIT|HEAP_LIMIT_MB)=."),
    "mimalloc": re.compile(r"MIMALLOC_(PURGE|RESET)\w*=."),
}
"""The settings, `NAME=value`, that decide when each allocator returns memory: mallopt(3) and glibc's manual, "Memory
Allocation Tunables"; jemalloc(3), TUNING; gperftools' and mimalloc's pages. Others, like the number of glibc's arenas,
which launchers set, do not."""

_HUGE_PAGE_BYTES = 2 * 2**20
_LARGE_BYTES = 2**20
_ARENA_BYTES = 64 * 2**20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST_MMAP_THRESHOLD = 32 * 2**20  # malloc.h and malloc/malloc.c, DEFAULT_MMAP_THRESHOLD_MAX, on 64 bits
_WRITABLE_MEMORY = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0 *(\[heap\])?$", re.MULTILINE)
"""Private anonymous memory in /proc/self/maps (proc(5))."""
libc = CDLL(None, use_errno=True)
libc.madvise.argtypes = (c_void_p, c_size_t, c_int)


class HeapUse(NamedTuple):
    """What an allocator says of itself: bytes of blocks that live, and of free ones, whether resident or not."""

    used_bytes: int
    free_bytes: int


class Allocator(NamedTuple):
    """The allocator of this process.

    Attributes:
        release: makes it return what it keeps; blocks, without Python's lock. None: it offers no way.
        left_alone: why it is told nothing unless the user asks for it, for people; "": nothing speaks against it.
        measure: asks what it holds; None: it does not tell.
        prefer_huge_pages: asks the kernel to fill its heaps by huge pages, or by small ones (False).
        keep_freed: has it return nothing unless it is told to, or also what is free at the end of a heap (False).
    """

    name: str
    release: Callable[[], object] | None
    left_alone: str = ""
    measure: Callable[[], HeapUse] | None = None
    prefer_huge_pages: Callable[[bool], None] | None = None
    keep_freed: Callable[[bool], None] | None = None

    def for_tensors(self, make_tensor: Callable[[int], object]) -> Allocator:
        """The same, unless tensors come from elsewhere: torch's wheels for aarch64 have mimalloc inside, which nothing
        here reaches. `make_tensor` makes one of so many bytes."""
        measure = self.measure
        if self.release is None or measure is None or is_counted(lambda: measure().used_bytes, make_tensor):
            return self
        return Allocator(f"not {self.name}", None, "PyTorch's tensors come from an allocator of its own")


def is_counted(used_bytes: Callable[[], int], make_tensor: Callable[[int], object]) -> bool:
    """Whether a large tensor's memory is counted there, and so comes from there."""
    before, tensor = used_bytes(), make_tensor(_LARGE_BYTES)
    return used_bytes() >= before + _LARGE_BYTES and tensor is not None


class _DlInfo(Structure):
    _fields_ = (("file", c_char_p), ("base", c_void_p), ("symbol", c_char_p), ("address", c_void_p))


class _MallInfo(Structure):
    """struct mallinfo2 (mallinfo(3)); glibc 2.33 and later."""

    _fields_ = tuple(
        (name, c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def allocator_of_process(environment: Mapping[str, str] = os.environ) -> Allocator:
    """Which library serves `malloc` here. A variable that decides when it returns memory (`_DECIDES`) may be the user's
    own decision: it is left alone then."""
    process = CDLL(None)
    name, library = _library_of_malloc(process)
    release = _release_of(name, library)
    measure = _glibc_measure(library) if name == "glibc" else None
    if release is None:
        return Allocator(name, None, f"{name} offers no way to return freed memory", measure)
    decides = _DECIDES.get(name)
    settings = (each for each in sorted(environment) if decides and decides.match(f"{each}={environment[each]}"))
    found = next((f"{variable} is set, which decides when {name} returns memory" for variable in settings), "")
    heaps = (_advise_glibc_heaps, partial(_have_glibc_keep_freed, library)) if name == "glibc" else ()
    return Allocator(name, release, found, measure, *heaps)


def _library_of_malloc(process: CDLL) -> tuple[str, CDLL]:
    """(name, library) of what serves `malloc`, by dladdr(3) on `posix_memalign`, which every allocator replaces with
    it: Debian's Python has an entry of its own for `malloc`, which dlsym(3) would find."""
    found = _DlInfo()
    process.dladdr.argtypes = (c_void_p, POINTER(_DlInfo))
    process.dladdr(ctypes.cast(process.posix_memalign, c_void_p), ctypes.byref(found))
    path = os.fsdecode(found.file or b"the C library")
    file = os.path.basename(path)
    for name in _RELEASES:
        if name in file:
            return name, CDLL(path)
    if "musl" in file:
        return "musl", process
    is_glibc = hasattr(process, "gnu_get_libc_version") and file.startswith(("libc.so", "libc-"))
    return "glibc" if is_glibc else file, process


def _release_of(name: str, library: CDLL) -> Callable[[], object] | None:
    symbol, types, arguments = _RELEASES.get(name, ("", (), ()))
    call: Any = getattr(library, symbol, None) if symbol else None
    if call is None:
        return None
    call.argtypes = types
    return partial(call, *arguments)


def _glibc_measure(library: CDLL) -> Callable[[], HeapUse] | None:
    if not hasattr(library, "mallinfo2"):
        return None
    library.mallinfo2.restype = _MallInfo

    def measure() -> HeapUse:
        found = library.mallinfo2()
        return HeapUse(found.uordblks + found.hblkhd, found.fordblks)

    return measure


def _advise_glibc_heaps(huge: bool) -> None:
    """Advise huge or small pages for glibc's heaps: the one that grows by brk(2), and those of other arenas, in areas
    aligned to 64 MiB (malloc/arena.c, HEAP_MAX_SIZE). A hint: where the kernel does not tell, nothing happens."""
    advice = mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for found in _WRITABLE_MEMORY.finditer(maps):
        start, end = int(found[1], 16), int(found[2], 16)
        if end - start > _HUGE_PAGE_BYTES and (found[3] or not start % _ARENA_BYTES):
            libc.madvise(start, end - start, advice)


def _have_glibc_keep_freed(library: CDLL, keeps: bool) -> None:
    """Have `free` leave the end of a heap as it is, or return it if 64 MiB are free there. glibc raises both thresholds
    to these by itself, as blocks of up to 32 MiB are freed; set once, they stay as they are (mallopt(3))."""
    library.mallopt(_M_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD)
    library.mallopt(_M_TRIM_THRESHOLD, -1 if keeps else 2 * _MOST_MMAP_THRESHOLD)
