"""Measures how fast host memory is, and whether it comes in huge pages.

Blocks. Takes at most an eighth of the available memory, and 32 MiB for each buffer.
"""

from __future__ import annotations

import mmap
import os
import time
from functools import partial
from pathlib import Path

from ..base.config import available_host_bytes
from ..base.threads import start_thread
from ..disk.linux import address_of, copy_memory, make_pages_huge
from ..returning.allocator import allocator_of_process
from . import system
from .measurements import HugePages, Memory

__all__ = ["buffer_bytes", "mapped", "measure_huge_pages", "measure_memory"]

MIB = 2**20
_BUFFER_BYTES = 32 * MIB
_LEAST_BUFFER_BYTES = 2 * MIB
_MOST_THREADS = 8
_HUGE_ORDER = 9  # a huge page has 2**9 pages on x86-64, and on arm64 with 4 KiB pages


def measure_memory(seconds: float, num_cores: int) -> Memory:
    """Measure the three copy speeds, a third of the time each."""
    swap_total_bytes, swap_used_bytes = system.swap_bytes()
    available_bytes = available_host_bytes()
    num_threads = max(1, min(num_cores, _MOST_THREADS))
    num_bytes = buffer_bytes(available_bytes, 2 * num_threads)
    pairs = [(mapped(num_bytes), mapped(num_bytes)) for _ in range(num_threads)]
    for source, _ in pairs:
        source.write(b"\x5a" * num_bytes)
    shm_total_bytes, shm_free_bytes = system.file_system_bytes(Path("/dev/shm")) or (None, None)
    allocator = allocator_of_process()
    return Memory(
        total_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        available_bytes=available_bytes,
        limit_bytes=system.memory_limit_bytes(),
        swap_total_bytes=swap_total_bytes,
        swap_used_bytes=swap_used_bytes,
        shm_total_bytes=shm_total_bytes,
        shm_free_bytes=shm_free_bytes,
        copy_bytes_per_second=_copy_speed(pairs[:1], seconds / 3),
        copy_all_bytes_per_second=_copy_speed(pairs, seconds / 3),
        fresh_bytes_per_second=_fresh_speed(memoryview(pairs[0][0]), seconds / 3),
        allocator=allocator.name,
        allocator_left_alone=allocator.left_alone or None,
    )


def buffer_bytes(available_bytes: int, num_buffers: int) -> int:
    """The length of a buffer, in whole huge pages, so that all buffers leave most of the available memory."""
    share = available_bytes // 8 // num_buffers // _LEAST_BUFFER_BYTES * _LEAST_BUFFER_BYTES
    return max(_LEAST_BUFFER_BYTES, min(_BUFFER_BYTES, share))


def mapped(num_bytes: int) -> mmap.mmap:
    """A private buffer, in huge pages if there are any."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without huge pages
    return memory


def _copy_speed(pairs: list[tuple[mmap.mmap, mmap.mmap]], seconds: float) -> float:
    """The speed of copies by one thread for each pair, all together, in bytes per second."""
    moved_bytes = [0] * len(pairs)
    for source, target in pairs:
        copy_memory(memoryview(target), memoryview(source))  # the first copy makes the kernel find the pages
    began_at = time.monotonic()

    def run(number: int) -> None:
        source, target = memoryview(pairs[number][0]), memoryview(pairs[number][1])
        while time.monotonic() < began_at + seconds or not moved_bytes[number]:
            copy_memory(target, source)
            moved_bytes[number] += len(source)

    for thread in [start_thread(partial(run, number), "tierstore-doctor") for number in range(len(pairs))]:
        thread.join()
    return sum(moved_bytes) / (time.monotonic() - began_at)


def _fresh_speed(source: memoryview, seconds: float) -> float:
    """The speed of writing to pages that the kernel has to find and clear first, in bytes per second."""
    moved_bytes, used_seconds = 0, 0.0
    while used_seconds < seconds:
        fresh = mapped(len(source))
        began_at = time.monotonic()
        copy_memory(memoryview(fresh), source)
        used_seconds += time.monotonic() - began_at
        moved_bytes += len(source)
    return moved_bytes / used_seconds


def measure_huge_pages() -> HugePages:
    """Ask for huge pages, for private memory and for a client's window, and read the kernel's settings."""
    num_bytes = buffer_bytes(available_host_bytes(), 2)
    free_bytes, free_share = system.free_in_pieces(_HUGE_ORDER)
    return HugePages(
        enabled=system.huge_page_setting("enabled"),
        shared=system.huge_page_setting("shmem_enabled"),
        granted_share=_granted_share(num_bytes),
        collapses=_collapses(num_bytes),
        free_bytes=free_bytes,
        free_share=free_share,
    )


def _granted_share(num_bytes: int) -> float | None:
    """The share that became huge pages of a buffer that had asked for them before first use; None: not known."""
    memory = mapped(num_bytes)
    address = address_of(memoryview(memory))
    before_bytes = system.huge_bytes_at(address)  # of neighbours in the same mapping
    memory.write(bytes(num_bytes))
    after_bytes = system.huge_bytes_at(address)
    if before_bytes is None or after_bytes is None:
        return None
    return max(0.0, min(1.0, (after_bytes - before_bytes) / num_bytes))


def _collapses(num_bytes: int) -> bool:
    descriptor = os.memfd_create("tierstore-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
        with mmap.mmap(descriptor, num_bytes) as window:
            window.write(bytes(num_bytes))
            make_pages_huge(descriptor, num_bytes)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
