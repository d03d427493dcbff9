"""Reads what the kernel knows about the machine from /proc and /sys. Nothing fails: a value that cannot be read is
None."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path
from typing import Any

import msgspec

from ..base.address import default_address, find_address, may_exist
from ..base.config import (
    allowed_cores,
    available_host_bytes,
    free_disk_bytes,
    meminfo,
    memory_cgroup_limits,
    quota_cores,
)
from ..demo.place import file_system_of
from ..errors import DaemonUnavailableError, TierStoreError
from ..sidecar.inspection import inspect_daemon
from .measurements import Daemon, Drive, Limits, Processor

_DAEMON_SECONDS = 3.0
_SECTOR_BYTES = 512  # the unit of /sys/block/*/size, whatever the device's sectors are
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CPU_PRESSURE = Path("/proc/pressure/cpu")  # "some avg10=82.80 avg60=...", in percent; kernels may be built without


def describe_drive(directory: Path) -> Drive:
    """Describe a writable directory and its drive, without moving any bytes."""
    number = directory.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()  # sysfs(5); it may be missing
    device = device.parent if (device / "partition").exists() else device
    size, rotational = _read(device / "size"), _read(device / "queue/rotational")
    return Drive(
        path=str(directory),
        file_system=file_system_of(directory),
        io_mode=None,
        free_bytes=free_disk_bytes(directory),
        model=_read(device / "device/model"),
        size_bytes=int(size) * _SECTOR_BYTES if size and size.isdecimal() else None,
        is_rotational=None if rotational is None else rotational == "1",
    )


def describe_processor() -> Processor:
    """Of this process and, as to what makes it busy, of the machine."""
    waiting = re.match(r"some avg10=([\d.]+) ", _read(_CPU_PRESSURE) or "")
    return Processor(
        num_present=os.cpu_count() or 1,
        num_allowed=len(allowed_cores()),
        quota_cores=quota_cores(),
        load=_load(),
        waiting_share=float(waiting[1]) / 100 if waiting else None,
    )


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def describe_limits() -> Limits:
    """Of this process."""
    soft = [resource.getrlimit(number)[0] for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)]
    open_files, locked_bytes = (None if limit == resource.RLIM_INFINITY else limit for limit in soft)
    return Limits(open_files=open_files, locked_bytes=locked_bytes)


def memory_figures() -> dict[str, Any]:
    """The fields of `Memory` that the kernel knows. Cgroups of version 1 say "no limit" by a huge one."""
    machine = meminfo()
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [limit for limit, _ in memory_cgroup_limits() if limit < total_bytes]
    chosen = re.search(r"\[(.+?)\]", _read(_HUGE_PAGES) or "")  # of "always [madvise] never"
    return {
        "total_bytes": total_bytes,
        "available_bytes": available_host_bytes(),
        "limit_bytes": min(limits, default=None),
        "swap_used_bytes": machine.get("SwapTotal", 0) - machine.get("SwapFree", 0),
        "huge_pages": chosen[1] if chosen else None,
    }


class _Report(msgspec.Struct):
    path: str


def find_daemon(socket: str | None, directory: Path, daemon_uid: int | None = None) -> Daemon:
    """Ask the daemon at that socket (None: where `TierStore.connect()` would look) whether it keeps `directory`. Blocks
    for `_DAEMON_SECONDS` at most. `daemon_uid`: as `check_daemon`'s."""
    if socket is None:
        try:
            socket = find_address()
        except DaemonUnavailableError:
            return Daemon(socket=default_address(), is_present=False)
    socket = os.path.expanduser(socket)
    if not may_exist(socket):
        return Daemon(socket=socket, is_present=False)
    try:
        state = inspect_daemon(socket, seconds=_DAEMON_SECONDS, daemon_uid=daemon_uid)
        kept = msgspec.json.decode(state, type=_Report).path
    except (TierStoreError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        is_refusing = isinstance(error.__cause__, PermissionError)
        note = error.reason if isinstance(error, DaemonUnavailableError) else str(error)
        return Daemon(socket=socket, is_present=True, is_refusing=is_refusing, note=note)
    is_the_same = os.path.realpath(kept) == os.path.realpath(directory)
    return Daemon(socket=socket, is_present=True, is_answering=True, path=kept, keeps_directory=is_the_same)


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
