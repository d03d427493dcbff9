"""Calls of Linux that Python's standard library does not wrap. Blocking, like the calls; refused ones raise OSError."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import tempfile
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_PUNCH_HOLE_KEEP_SIZE = 1 | 2  # linux/falloc.h
_MADV_DONTFORK = 10  # asm-generic/mman-common.h
_MADV_POPULATE_WRITE = 23
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.mremap.restype = ctypes.c_void_p
_MREMAP_MAYMOVE_FIXED_DONTUNMAP = 1 | 2 | 4  # linux/mman.h
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.mmap.restype = ctypes.c_void_p
_MAP_FIXED = 0x10  # asm-generic/mman-common.h, as the next three
_MAP_FIXED_NOREPLACE = 0x100000
_MADV_DONTNEED_LOCKED = 24
_MADV_COLLAPSE = 25
_PROT_NONE = 0
_HUGE_PAGE_BYTES = 2 * 2**20  # of x86-64, and of arm64 with 4 KiB pages

_STATFS_BYTES = 256  # struct statfs has 120 on 64-bit Linux; f_type comes first (statfs(2))
_TMPFS = 0x01021994
_OVERLAY = 0x794C7630
_FS_IOC_FIEMAP = 0xC020660B  # linux/fs.h
_FILE_SYSTEMS = {
    _TMPFS: "tmpfs",
    0x858458F6: "ramfs",
    0x6969: "nfs",
    0x65735546: "fuse",
    0x2FC12FC1: "zfs",
}  # linux/magic.h, and zfs's own


_as_read_buffer = ctypes.pythonapi.PyObject_AsReadBuffer  # of the stable ABI
_as_read_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_ssize_t))


def _refused(call: str, *place: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}", *place)


def address_of(view: memoryview) -> int:
    """Where a contiguous buffer lies in memory; a read-only one too, which `ctypes.from_buffer` refuses."""
    address, length = ctypes.c_void_p(), ctypes.c_ssize_t()
    _as_read_buffer(view, ctypes.byref(address), ctypes.byref(length))
    return address.value or 0


def copy_memory(destination: memoryview, source: memoryview) -> None:
    """Copy all of `source` to the front of `destination`; they may overlap. Releases the interpreter's lock.
    ValueError: `destination` is shorter or read-only."""
    if len(destination) < len(source) or destination.readonly:
        raise ValueError(f"{len(source)} bytes do not fit into {len(destination)} writable ones")
    ctypes.memmove(address_of(destination), address_of(source), len(source))


def reserve(descriptor: int, num_bytes: int) -> None:
    """Give an empty file `num_bytes` of blocks and that length; only the length where fallocate is unknown. (There
    `os.posix_fallocate` would write every block instead.)"""
    while _libc.fallocate(descriptor, 0, 0, num_bytes) != 0:
        number = ctypes.get_errno()
        if number in (errno.EOPNOTSUPP, errno.ENOSYS):
            os.ftruncate(descriptor, num_bytes)
            return
        if number != errno.EINTR:
            raise _refused("fallocate")


def punch_hole(descriptor: int, offset: int, num_bytes: int) -> None:
    """Give the space of whole blocks back; they read as zeros. OSError: EOPNOTSUPP where the file system cannot."""
    while _libc.fallocate(descriptor, _PUNCH_HOLE_KEEP_SIZE, offset, num_bytes) != 0:
        if ctypes.get_errno() != errno.EINTR:
            raise _refused("fallocate")


def file_system_of(directory: Path) -> str:
    """The kind of file system, if it is one that O_DIRECT does not serve; "" for all others."""
    return _FILE_SYSTEMS.get(_magic_by("statfs", os.fsencode(directory), str(directory)), "")


def is_tmpfs(descriptor: int) -> bool:
    """Whether a file is in a tmpfs, as a memfd is unless it has huge pages of its own (MFD_HUGETLB)."""
    return _magic_by("fstatfs", descriptor) == _TMPFS


def is_overlay_in_memory(descriptor: int) -> bool:
    """Whether a file is in an overlayfs whose upper directory is in a tmpfs, which need not be visible here. Of the
    usual file systems for that, tmpfs alone does not tell where a file's blocks are (filesystems/fiemap.rst)."""
    if _magic_by("fstatfs", descriptor) != _OVERLAY:
        return False
    try:
        fcntl.ioctl(descriptor, _FS_IOC_FIEMAP, struct.pack("=QQIIII", 0, 4096, 0, 0, 0, 0))
    except OSError as error:
        return error.errno == errno.EOPNOTSUPP
    return False


def _magic_by(call: str, of: bytes | int, *place: str) -> int:
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if getattr(_libc, call)(of, buffer) != 0:
        raise _refused(call, *place)
    return ctypes.c_ulong.from_buffer(buffer).value & 0xFFFFFFFF


def open_unnamed(directory: Path) -> int:
    """Open a new file for reading and writing that has no name: it is gone with its last descriptor."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # open(2): a file system without O_TMPFILE says EOPNOTSUPP; an old kernel sees O_DIRECTORY: EISDIR.
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    descriptor, name = tempfile.mkstemp(prefix="tierstore-", dir=directory)  # 0600, close-on-exec
    os.unlink(name)
    return descriptor


def mapping_around(address: int) -> tuple[int, int] | None:
    """(start, length) of the mapping that holds `address`, by /proc/self/maps; None if there is none."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            start, end = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
            if start <= address < end:
                return start, end - start
    return None


def dont_fork(start: int, num_bytes: int) -> None:
    """Keep a mapping out of forked children, where it would keep the parent's unnamed file alive."""
    if _libc.madvise(start, num_bytes, _MADV_DONTFORK) != 0:
        raise _refused("madvise")


def has_addresses_for(num_bytes: int) -> bool:
    """Whether the process could map `num_bytes` more; maps and unmaps them. See RLIMIT_AS in getrlimit(2)."""
    try:
        mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=_PROT_NONE).close()
    except (OSError, OverflowError):
        return False
    return True


def populate(memory: memoryview) -> None:
    """Give memory that is about to be filled its pages now. Releases the interpreter's lock. A hint: kernels before
    5.14 do not know it (madvise(2), MADV_POPULATE_WRITE)."""
    address = address_of(memory)
    first = address - address % mmap.PAGESIZE
    _libc.madvise(first, address + len(memory) - first, _MADV_POPULATE_WRITE)


def move_pages(source: int, destination: int, num_bytes: int) -> None:
    """Move the pages of private anonymous memory to another address; the source stays mapped, without pages. Each range
    may become a mapping of its own, of which a process has 65,530.

    OSError: the kernel refused (before Linux 5.7 it does). The source is as it was. The destination must not be touched
    any more: mremap unmaps it before it counts memory against its limits (mm/mremap.c). It is reserved if possible."""
    moved = _libc.mremap(source, num_bytes, num_bytes, _MREMAP_MAYMOVE_FIXED_DONTUNMAP, destination)
    if moved != destination:
        error = _refused("mremap")
        held = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
        _libc.mmap(destination, num_bytes, _PROT_NONE, held, -1, 0)  # or others' mappings would be unmapped with ours
        raise error


def is_new_memory_locked() -> bool:
    """Whether each new mapping gets all its pages at once, and keeps them: mlockall(2), MCL_FUTURE."""
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # goes with the last reference
    there = ctypes.c_ubyte()
    return _libc.mincore(address_of(memoryview(page)), mmap.PAGESIZE, ctypes.byref(there)) == 0 and there.value == 1


def give_back_locked(address: int, num_bytes: int) -> None:
    """Give pages of private anonymous memory back though they are locked (mlockall(2)). Before Linux 5.18 the kernel
    refuses; the pages are as they were."""
    if _libc.madvise(address, num_bytes, _MADV_DONTNEED_LOCKED) != 0:
        raise _refused("madvise")


def make_pages_huge(descriptor: int, num_bytes: int) -> None:
    """Gather the pages of a memfd into huge ones, as far as the kernel has any; some 0.5 ms for each MiB. On OSError
    they stay as they are. Most kernels give shared memory none by itself (shmem_enabled: never), but do when asked
    (madvise(2), MADV_COLLAPSE; Linux 6.1). O_DIRECT reads twice as fast into huge ones, and writes 1.5 times as fast.
    """
    with mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as place:
        start = -(-address_of(memoryview(place)) // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        length = num_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        map_over(start, descriptor, num_bytes, populate=False)
        if _libc.madvise(start, length, _MADV_COLLAPSE) != 0:
            raise _refused("madvise")


def map_over(start: int, descriptor: int, num_bytes: int, *, populate: bool) -> None:
    """Map a file in the place of a mapping: shared, writable, not for forked children. `populate`: with all its pages
    now."""
    flags = mmap.MAP_SHARED | _MAP_FIXED | (mmap.MAP_POPULATE if populate else 0)
    if _libc.mmap(start, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0) != start:
        raise _refused("mmap")
    dont_fork(start, num_bytes)
