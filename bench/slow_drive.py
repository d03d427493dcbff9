"""A drive of a given speed, by the kernel: what a process reads and writes is held back as on a volume of a cloud.

`paced_drive.py` slows one store down. This holds for whatever the process does, so that who measures the drive finds it
that slow too. See the kernel's admin guide: cgroup-v1/blkio-controller, and cgroup-v2 for io.max.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from .cgroup import CgroupError

__all__ = ["slow_drive"]

_V1, _V2 = Path("/sys/fs/cgroup/blkio"), Path("/sys/fs/cgroup")


class _Place(NamedTuple):
    """Where the process is, where another group can be made, and what to write to which of its files."""

    own: Path
    above: Path
    limits: Mapping[str, str]


@contextmanager
def slow_drive(directory: Path, bytes_per_second: int) -> Iterator[None]:
    """Inside, this process reads at most so much in a second from the drive of `directory`, and writes as much.

    Raises:
        CgroupError: the directory is on no block device, or drives cannot be limited here; as a rule that takes root.
    """
    place = _place(_device_of(directory), bytes_per_second, Path("/proc/self/cgroup").read_text())
    try:
        group = Path(tempfile.mkdtemp(prefix="tierstore-bench-", dir=place.above))
        try:
            for name, limit in place.limits.items():
                (group / name).write_text(limit)
            _move_to(group)
        except OSError:
            group.rmdir()
            raise
    except OSError as error:
        raise CgroupError(f"the drive cannot be slowed down here ({error}); run this as root") from error
    try:
        yield
    finally:
        _move_to(place.own)
        group.rmdir()


def _place(device: str, bytes_per_second: int, cgroups: str) -> _Place:
    """`cgroups`: what `/proc/self/cgroup` says."""
    paths = {}
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path.lstrip("/"))
    if "blkio" in paths:
        own = _V1 / paths["blkio"]
        limit = f"{device} {bytes_per_second}"
        return _Place(own, own, {f"blkio.throttle.{way}_bps_device": limit for way in ("read", "write")})
    own = _V2 / paths.get("", "")
    limit = f"{device} rbps={bytes_per_second} wbps={bytes_per_second}"
    return _Place(own, own if own == _V2 else own.parent, {"io.max": limit})  # no children beside processes there


def _device_of(directory: Path) -> str:
    """The numbers of the whole drive, such as "254:0": limits are not for partitions."""
    number = directory.stat().st_dev
    entry = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    if not entry.exists():
        raise CgroupError(f"{directory} is on no drive of this machine")
    return ((entry.parent if (entry / "partition").exists() else entry) / "dev").read_text().strip()


def _move_to(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))
