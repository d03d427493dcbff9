"""Real filters that refuse system calls, as a container's or a service's profile does (seccomp(2))."""

import ctypes
import errno
import os
import platform
import struct

__all__ = ["CALLS", "is_available", "refuse"]

_NUMBERS = {
    # name: (x86-64, arm64), by asm/unistd_64.h and asm-generic/unistd.h; None: there is no such call
    "accept4": (288, 242),
    "access": (21, None),
    "bind": (49, 200),
    "chmod": (90, None),
    "clone": (56, 220),
    "clone3": (435, 435),
    "connect": (42, 203),
    "copy_file_range": (326, 285),
    "dup": (32, 23),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "eventfd2": (290, 19),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "fallocate": (285, 47),
    "fchmod": (91, 52),
    "fcntl": (72, 25),
    "fdatasync": (75, 83),
    "flock": (73, 32),
    "fstat": (5, 80),
    "fstatfs": (138, 44),
    "fsync": (74, 82),
    "ftruncate": (77, 46),
    "getdents64": (217, 61),
    "getpriority": (140, 141),
    "getrandom": (318, 278),
    "getrusage": (98, 165),
    "getsockopt": (55, 209),
    "io_uring_setup": (425, 425),
    "ioctl": (16, 29),
    "listen": (50, 201),
    "lseek": (8, 62),
    "madvise": (28, 233),
    "membarrier": (324, 283),
    "memfd_create": (319, 279),
    "mincore": (27, 232),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "mlock": (149, 228),
    "mremap": (25, 216),
    "newfstatat": (262, 79),
    "openat": (257, 56),
    "pipe2": (293, 59),
    "prctl": (157, 167),
    "pread64": (17, 67),
    "preadv": (295, 69),
    "preadv2": (327, 286),
    "prlimit64": (302, 261),
    "pwrite64": (18, 68),
    "pwritev": (296, 70),
    "pwritev2": (328, 287),
    "readlink": (89, None),
    "recvmsg": (47, 212),
    "rt_sigaction": (13, 134),
    "sched_getaffinity": (204, 123),
    "sched_setaffinity": (203, 122),
    "sched_yield": (24, 124),
    "sendmsg": (46, 211),
    "set_robust_list": (273, 99),
    "setpriority": (141, 140),
    "setsockopt": (54, 208),
    "sigaltstack": (131, 132),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "statfs": (137, 43),
    "statx": (332, 291),
    "sysinfo": (99, 179),
    "unlink": (87, None),
    "unlinkat": (263, 35),
}

_MACHINES = {
    "x86_64": (0, 0xC000003E),
    "aarch64": (1, 0xC00000B7),
}  # column, and AUDIT_ARCH_... (linux/audit.h)
_COLUMN, _ARCHITECTURE = _MACHINES.get(platform.machine(), (0, 0))

CALLS = tuple(name for name, numbers in _NUMBERS.items() if numbers[_COLUMN] is not None)
"""The calls that can be refused on this machine."""

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER_MODE = 22, 38, 2  # linux/prctl.h, linux/seccomp.h
_ERRNO, _ALLOW = 0x00050000, 0x7FFF0000  # SECCOMP_RET_...
_LOAD, _RETURN = 0x20, 0x06  # BPF_LD | BPF_W | BPF_ABS, BPF_RET | BPF_K
_EQUAL, _AT_LEAST = 0x15, 0x35  # BPF_JMP | BPF_JEQ | BPF_K, BPF_JMP | BPF_JGE | BPF_K
_NUMBER_AT, _ARCHITECTURE_AT, _OFFSET_AT = 0, 4, 40  # in struct seccomp_data; the last: the fourth argument's low half


class _Program(ctypes.Structure):
    """struct sock_fprog of linux/filter.h."""

    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def is_available() -> bool:
    """Whether this machine's calls are known here. The kernel has had filters since Linux 3.5."""
    return platform.machine() in _MACHINES


def refuse(call: str, error: int = errno.EPERM, *, first_bytes: int | None = None) -> None:
    """Have the kernel refuse a call to this thread, and to all that it starts from now on. It cannot be undone.
    `first_bytes`: of pread64 and pwrite64, only those that begin in so many bytes of a file."""
    number = _NUMBERS[call][_COLUMN]
    assert number is not None, call
    conditions = [(_ARCHITECTURE_AT, _EQUAL, _ARCHITECTURE), (_NUMBER_AT, _EQUAL, number)]
    if first_bytes is not None:
        conditions += [(_OFFSET_AT + 4, _EQUAL, 0), (_OFFSET_AT, _AT_LEAST, first_bytes)]
    steps = []
    for place, (at, kind, value) in enumerate(conditions):
        to_allow = 2 * (len(conditions) - place) - 1
        jumps = (0, to_allow) if kind == _EQUAL else (to_allow, 0)
        steps += [(_LOAD, 0, 0, at), (kind, *jumps, value)]
    steps += [(_RETURN, 0, 0, _ERRNO | error), (_RETURN, 0, 0, _ALLOW)]
    program = _Program(len(steps), b"".join(struct.pack("=HBBI", *step) for step in steps))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _FILTER_MODE, ctypes.byref(program))):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "prctl")
