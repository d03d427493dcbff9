"""A memory cgroup for one process: a limit that the kernel enforces, and its own account of the peak.

cgroup v1 (memory.limit_in_bytes) and v2 (memory.max), whichever has the memory controller on this machine; see
cgroups(7) and the kernel's admin guide. Making one takes root, or a subtree that was delegated to the user.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

__all__ = ["CgroupError", "MemoryCgroup", "Paths", "find_memory_cgroup", "memory_cgroup"]


class CgroupError(Exception):
    """No memory cgroup can be made here; the message says why."""


class Files(NamedTuple):
    """The names that a version of cgroups gives to what is needed here."""

    limit: str
    swap: tuple[str, str]
    """A file and what to write there once the limit is set, so that nothing goes to swap instead."""
    used: str
    peak: str
    events: str
    """Holds a line "oom_kill N"."""


V1 = Files(
    "memory.limit_in_bytes",
    ("memory.swappiness", "0"),
    "memory.usage_in_bytes",
    "memory.max_usage_in_bytes",
    "memory.oom_control",
)
V2 = Files("memory.max", ("memory.swap.max", "0"), "memory.current", "memory.peak", "memory.events")


class Paths(NamedTuple):
    """Where a process is in the hierarchy that has the memory controller."""

    mount: Path
    own: Path
    files: Files


def find_memory_cgroup(cgroups: str, mounts: str) -> Paths:
    """Read `/proc/self/cgroup` and `/proc/self/mountinfo`.

    Raises:
        CgroupError: no memory controller is mounted.
    """
    lines = [line.split(":", 2) for line in cgroups.splitlines()]
    version_1 = next((path for _, controllers, path in lines if "memory" in controllers.split(",")), None)
    version_2 = next((path for number, _, path in lines if number == "0"), None)
    for path, kind, files in ((version_1, "cgroup", V1), (version_2, "cgroup2", V2)):
        if path is not None and (mount := _mount_of(kind, mounts)) is not None:
            return Paths(mount, mount / path.lstrip("/"), files)
    raise CgroupError("no cgroup hierarchy with the memory controller is mounted")


def _mount_of(kind: str, mounts: str) -> Path | None:
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        found, _, options = after.split(" ")[:3]
        if found == kind and (kind == "cgroup2" or "memory" in options.split(",")):
            return Path(before.split(" ")[4])
    return None


class MemoryCgroup:
    """One cgroup that exists.

    Args:
        directory: of it.
        files: as its version calls them.
    """

    def __init__(self, directory: Path, files: Files) -> None:
        self._directory = directory
        self._files = files

    def limit(self, limit_bytes: int, *, with_swap: bool = False) -> None:
        """From now on no more memory than that; `with_swap`: what is more may go to swap, else nothing does."""
        (self._directory / self._files.limit).write_text(str(limit_bytes))
        if with_swap:
            return
        name, value = self._files.swap
        if (self._directory / name).exists():
            (self._directory / name).write_text(value)

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The same command, run inside from its first instruction on."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._directory / "cgroup.procs"), *arguments]

    @property
    def used_bytes(self) -> int:
        """What is charged to it now."""
        return int((self._directory / self._files.used).read_text())

    @property
    def peak_bytes(self) -> int:
        """The most memory that was charged to it at once: anonymous, page cache and the kernel's own alike."""
        return int((self._directory / self._files.peak).read_text())

    @property
    def num_oom_kills(self) -> int:
        """How many of its processes the kernel has ended for want of memory."""
        found = re.search(r"^oom_kill (\d+)$", (self._directory / self._files.events).read_text(), re.MULTILINE)
        return int(found[1]) if found else 0


@contextmanager
def memory_cgroup() -> Iterator[MemoryCgroup]:
    """A new one, removed at the end; by then its processes must have ended.

    Version 1 puts it below the process's own. Version 2 gives controllers to the children of cgroups without
    processes only, so there it stands beside the process's own, or below the root.

    Raises:
        CgroupError: it cannot be made; as a rule that takes root and a writable /sys/fs/cgroup.
    """
    paths = find_memory_cgroup(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
    above = paths.own if paths.files is V1 or paths.own == paths.mount else paths.own.parent
    try:
        directory = Path(tempfile.mkdtemp(prefix="tierstore-bench-", dir=above))
    except OSError as error:
        raise CgroupError(f"a memory cgroup cannot be made here ({error.strerror}); run this as root") from error
    try:
        if not (directory / paths.files.limit).exists():
            raise CgroupError("the memory controller is not given to the cgroups here (cgroup.subtree_control)")
        yield MemoryCgroup(directory, paths.files)
    finally:
        _remove(directory)


def _remove(directory: Path) -> None:
    """A process that was killed is charged for a moment longer."""
    for _ in range(100):
        try:
            directory.rmdir()
            return
        except OSError:
            time.sleep(0.05)
    directory.rmdir()
