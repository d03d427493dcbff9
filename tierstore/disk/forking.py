"""Keeps files from forked children: a killed parent's disk space would stay taken for as long as a child lives."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection

Inode = tuple[int, int]
"""(device, inode): the file that a descriptor refers to."""

not_while_forking = threading.RLock()  # a finalizer may open a store, or fork, where its thread holds it
"""Held while a file is opened and noted, and by `os.fork`, so a child knows of every file that it inherits."""
os.register_at_fork(
    before=not_while_forking.acquire,
    after_in_parent=not_while_forking.release,
    after_in_child=not_while_forking.release,
)


def inode_of(descriptor: int) -> Inode:
    """The file that a descriptor refers to. Raises OSError: it is not open."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def descriptors_of(inodes: Collection[Inode]) -> list[int]:
    """Every descriptor of this process that refers to one of the files, whoever opened it."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if inode_of(int(name)) in inodes:
                found.append(int(name))
        except OSError:
            pass  # the one that listed the directory
    return found


def release_files(inodes: Collection[Inode]) -> None:
    """In a forked child: give up its copies of the files' descriptors. They are turned to /dev/null rather than closed:
    the code that has opened them will close those numbers one day, and they must not belong to another file by then."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in descriptors_of(inodes):
        os.dup2(null, descriptor, inheritable=False)
    os.close(null)
