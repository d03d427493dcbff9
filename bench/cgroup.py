"""Cgroups for one process: a memory limit that the kernel enforces, its account of the peak, and a drive of any speed.
Version 1 and 2, whichever has the controller here. Making one takes root, or a subtree that was delegated."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


class CgroupError(Exception):
    pass


class Place(NamedTuple):
    """Where a process is in the hierarchy that has a controller, and its version: 1 or 2."""

    mount: Path
    own: Path
    version: int

    @property
    def above(self) -> Path:
        """Where a new one goes. Version 2 gives controllers to the children of cgroups without processes only."""
        return self.own if self.version == 1 or self.own == self.mount else self.own.parent


def find_cgroup(controller: str, cgroups: str, mounts: str) -> Place:
    """Read `/proc/self/cgroup` and `/proc/self/mountinfo`. Raises CgroupError: the controller is not mounted."""
    paths: dict[str, str] = {}
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path.lstrip("/"))
    for version, kind, name in ((1, "cgroup", controller), (2, "cgroup2", "")):
        for line in mounts.splitlines() if name in paths else ():
            before, _, after = line.partition(" - ")
            found, _, options = after.split(" ")[:3]
            if found == kind and (version == 2 or controller in options.split(",")):
                mount = Path(before.split(" ")[4])
                return Place(mount, mount / paths[name], version)
    raise CgroupError(f"no cgroup hierarchy with the {controller} controller is mounted")


@contextmanager
def _new_cgroup(controller: str) -> Iterator[tuple[Path, Place]]:
    """Removed at the end; by then its processes must have ended or left."""
    place = find_cgroup(controller, Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
    try:
        directory = Path(tempfile.mkdtemp(prefix="tierstore-bench-", dir=place.above))
    except OSError as error:
        raise CgroupError(f"a {controller} cgroup cannot be made here ({error.strerror}); run this as root") from error
    try:
        yield directory, place
    finally:
        ends = time.monotonic() + 5  # a process that was killed is charged for a moment longer
        while directory.exists():
            try:
                directory.rmdir()
            except OSError:
                if time.monotonic() > ends:
                    raise
                time.sleep(0.05)


class MemoryCgroup:
    """One that exists: its directory, and which version it is of."""

    def __init__(self, directory: Path, version: int) -> None:
        self._directory = directory
        self._is_first = version == 1

    def limit(self, limit_bytes: int, *, with_swap: bool = False) -> None:
        """From now on no more memory than that; `with_swap`: what is more may go to swap, else nothing does."""
        (self._directory / ("memory.limit_in_bytes" if self._is_first else "memory.max")).write_text(str(limit_bytes))
        swap = self._directory / ("memory.swappiness" if self._is_first else "memory.swap.max")
        if not with_swap and swap.exists():
            swap.write_text("0")

    def command(self, arguments: Sequence[str]) -> list[str]:
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._directory / "cgroup.procs"), *arguments]

    def _read(self, first: str, second: str) -> str:
        return (self._directory / (first if self._is_first else second)).read_text()

    @property
    def used_bytes(self) -> int:
        return int(self._read("memory.usage_in_bytes", "memory.current"))

    @property
    def peak_bytes(self) -> int:
        """The most memory that was charged to it at once: anonymous, page cache and the kernel's own alike."""
        return int(self._read("memory.max_usage_in_bytes", "memory.peak"))

    @property
    def num_oom_kills(self) -> int:
        found = re.search(r"^oom_kill (\d+)$", self._read("memory.oom_control", "memory.events"), re.MULTILINE)
        return int(found[1]) if found else 0


@contextmanager
def memory_cgroup() -> Iterator[MemoryCgroup]:
    """A new one. Raises CgroupError: it cannot be made; as a rule that takes root and a writable /sys/fs/cgroup."""
    with _new_cgroup("memory") as (directory, place):
        made = MemoryCgroup(directory, place.version)
        if not any((directory / name).exists() for name in ("memory.limit_in_bytes", "memory.max")):
            raise CgroupError("the memory controller is not given to the cgroups here (cgroup.subtree_control)")
        yield made


@contextmanager
def slow_drive(directory: Path, bytes_per_second: int) -> Iterator[None]:
    """Inside, this process reads at most so much in a second from the drive of `directory`, and writes as much, as a
    volume of a cloud. Raises CgroupError: the directory is on no block device, or drives cannot be limited here (it
    takes root)."""
    device = _device_of(directory)
    with _new_cgroup("blkio") as (group, place):
        try:
            for name, limit in drive_limits(device, bytes_per_second, place.version).items():
                (group / name).write_text(limit)
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            raise CgroupError(f"the drive cannot be slowed down here ({error}); run this as root") from error
        try:
            yield
        finally:
            (place.own / "cgroup.procs").write_text(str(os.getpid()))


def drive_limits(device: str, bytes_per_second: int, version: int) -> dict[str, str]:
    if version == 2:
        return {"io.max": f"{device} rbps={bytes_per_second} wbps={bytes_per_second}"}
    return {f"blkio.throttle.{way}_bps_device": f"{device} {bytes_per_second}" for way in ("read", "write")}


def _device_of(directory: Path) -> str:
    """The numbers of the whole drive, such as "254:0": limits are not for partitions."""
    number = directory.stat().st_dev
    entry = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    if not entry.exists():
        raise CgroupError(f"{directory} is on no drive of this machine")
    return ((entry.parent if (entry / "partition").exists() else entry) / "dev").read_text().strip()
