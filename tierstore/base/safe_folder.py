"""Who could replace a file: by the owners and modes of all folders and links on the way to it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ["is_of_root_alone", "unknown_owners", "who_could_replace"]

_MOST_LINKS = 40  # as the kernel follows
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def who_could_replace(folder: Path) -> str:
    """How another user could replace what this user has in `folder`, in words; "" if only root could.

    As sshd does for its keys, it looks at every folder and link from / on. Each has to belong to this user or to root.
    Others may write to none of them, unless it is sticky, like /tmp: there only the owner of what is in it, or of the
    folder itself, can replace it. In a user namespace root of the host is trusted, which looks like others there.
    OSError: one of them does not exist, or may not be looked at.
    """
    trusted = {0, os.geteuid()} | unknown_owners()
    for place, status in _way_to(folder):
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid not in trusted:
            return f"{place} belongs to another user ({status.st_uid}, mode {mode:04o})"
        if not stat.S_ISLNK(status.st_mode) and mode & _WRITABLE_BY_OTHERS and not mode & stat.S_ISVTX:
            return f"others can write to {place} (of user {status.st_uid}, mode {mode:04o})"
    return ""


def is_of_root_alone(folder: Path) -> bool:
    """Whether only root can make or replace anything in `folder`. False also where that cannot be told."""
    try:
        return all(
            status.st_uid == 0 and (stat.S_ISLNK(status.st_mode) or not status.st_mode & _WRITABLE_BY_OTHERS)
            for _, status in _way_to(folder)
        )
    except OSError:
        return False


def unknown_owners() -> set[int]:
    """The user that stands for all who are not in this user namespace (user_namespaces(7)), such as root of the host.
    Nothing if all users are in it, or if that number is a user's of its own here."""
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
        unknown = int(Path("/proc/sys/fs/overflowuid").read_text())
    except OSError:
        return set()
    ranges = [range(first, first + count) for first, _, count in (map(int, line.split()) for line in lines)]
    return set() if any(unknown in each for each in ranges) else {unknown}


def _way_to(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Each folder and link from / on, links followed, with its own status (lstat)."""
    place = Path("/")
    left = list((Path.cwd() / folder).parts)
    num_links = 0
    while left:
        name = left.pop(0)
        if name == "..":  # of a folder, never of a link
            place = place.parent
            continue
        status = (place / name).lstat()
        yield place / name, status
        if not stat.S_ISLNK(status.st_mode):
            place /= name
            continue
        num_links += 1
        if num_links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
        left[:0] = Path(os.readlink(place / name)).parts
