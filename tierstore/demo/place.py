"""Finds the directory of the demo's store. By default it is one on a real disk. Nothing is left there: the store's
files have no names."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from ..base.config import check_directory
from ..errors import ConfigError


def store_directory(path: str | None) -> Path:
    """The directory to use: `path` itself, or the first of the usual places that is on a disk. Raises ConfigError:
    `path` cannot be used, or none of the usual places is writable and on a disk."""
    if path is not None:
        return check_directory(path)
    for find in (Path.cwd, _cache, tempfile.gettempdir, lambda: "/var/tmp"):
        try:
            if not is_in_memory(directory := check_directory(find())):
                return directory
        except (OSError, RuntimeError, ConfigError):  # there is none, such as a working directory that was deleted
            continue
    raise ConfigError("--path", None, "no usual place is writable and on a disk; name a directory on one")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def is_in_memory(directory: Path) -> bool:
    """Whether files in the directory take memory instead of disk."""
    return file_system_of(directory) in ("tmpfs", "ramfs")


def file_system_of(directory: Path) -> str:
    """The type of the file system, such as "ext4", from /proc/self/mountinfo (proc(5))."""
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    place, found = directory.resolve(), (Path("/"), "unknown")
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        # A space in a path is written as \040, and so on.
        path = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split(" ")[4])
        # A later line hides an earlier one with the same path; a deeper path hides a shallower one.
        if place.is_relative_to(path) and len(Path(path).parts) >= len(found[0].parts):
            found = (Path(path), after.split(" ")[0])
    return found[1]
