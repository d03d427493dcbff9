"""Sizes and options: what a caller may write, made numbers or a clear `ConfigError`; and what the machine has."""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

from ..errors import ConfigError, ConfigTypeError, TierStoreWarning
from .caller import stacklevel_of_user
from .system_words import words_of

SizeLike = int | str
"""A number of bytes: an `int`, or a string such as "8GiB", "64 KiB", "1.5GB"."""

_UNITS: Mapping[str, int] = {
    "": 1, "b": 1,
    "k": 2**10, "kib": 2**10, "kb": 10**3,
    "m": 2**20, "mib": 2**20, "mb": 10**6,
    "g": 2**30, "gib": 2**30, "gb": 10**9,
    "t": 2**40, "tib": 2**40, "tb": 10**12,
}  # fmt: skip
_KILOBYTES = re.compile(rb"^(\w+):\s+(\d+) kB", re.MULTILINE)
_SIZE = re.compile(r"\s*(\d{1,19}(?:\.\d{1,19})?)\s*([a-zA-Z]*)\s*", re.ASCII)
_LEAST_BUDGET_BYTES = 2**20
_MOST_IO_DEPTH = 64
_CGROUP = Path("/sys/fs/cgroup")
_MEMORY_FILES = {
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_cache total_shmem total_inactive_file total_active_file",
    ),
    2: ("memory.max", "memory.current", "file shmem inactive_file active_file"),
}
"""Of the versions of memory cgroups: the files of limit and use, and keys in memory.stat."""

_UNLIMITED_BYTES = 2**62
"""At this value and above there is no limit: version 1 of memory cgroups then gives the largest number of pages."""

Mode = Literal["auto", "always", "never"]
"""When memory that was freed goes back to the system: see `tierstore.returning.policy`."""
MODES: tuple[Mode, ...] = get_args(Mode)

_MOST_BYTES = 2**63 - 1
_WHICH_DIRECTORY = "give the path of an existing directory"
_ALLOWED_SIZE = 'give a number of bytes (0 or more) or a string such as "8GiB", "64KiB", "1.5GB"'


def parse_size(value: SizeLike, option: str) -> int:
    """Turn a size, in bytes or as a string with a binary ("KiB") or decimal ("kB") unit of any case, into bytes.
    ConfigError: it is no size. ConfigTypeError: it is neither a number nor a string."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigTypeError(option, value, _ALLOWED_SIZE)
    num_bytes = -1
    if isinstance(value, int):
        num_bytes = value
    elif match := _SIZE.fullmatch(value):
        number, unit = match.groups()
        if (factor := _UNITS.get(unit.lower())) is not None:
            num_bytes = int(float(number) * factor) if "." in number else int(number) * factor
    if num_bytes < 0:
        raise ConfigError(option, value, _ALLOWED_SIZE)
    if num_bytes > _MOST_BYTES:
        raise ConfigError(option, value, f'give at most {_MOST_BYTES} bytes, such as "8GiB"')
    return num_bytes


def parse_budget(value: SizeLike, option: str) -> int:
    """As `parse_size`, of a size that nobody gives in single bytes: a number without a unit that is below 1 MiB, and
    not 0, gets a `TierStoreWarning`, which may be raised. "64KiB" has a unit, so it is meant."""
    num_bytes = parse_size(value, option)
    if 0 < num_bytes < _LEAST_BUDGET_BYTES and (isinstance(value, int) or value.strip().isdigit()):
        unit = "GiB" if num_bytes < 1024 else "MiB"
        what = f'{option}={value!r} is {num_bytes} bytes: did you mean "{num_bytes}{unit}"?'
        warnings.warn(f'{what} If not, give a unit too: "{num_bytes}B"', TierStoreWarning, stacklevel_of_user())
    return num_bytes


def parse_io_depth(value: int) -> int:
    """Check how many records may be at a drive at once. Raises ConfigError if it is no whole number from 1 to 64."""
    allowed = f"give a whole number from 1 to {_MOST_IO_DEPTH}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigTypeError("io_depth", value, allowed)
    if not 1 <= value <= _MOST_IO_DEPTH:
        raise ConfigError("io_depth", value, allowed)
    return value


def parse_return_memory(value: str) -> Mode:
    """Check when freed memory is to be returned. Raises ConfigError if the value is none of `MODES`."""
    if value in MODES:
        return value
    kind = ConfigError if isinstance(value, str) else ConfigTypeError
    raise kind("return_memory", value, f"give one of {', '.join(map(repr, MODES))}")


def format_bytes(nbytes: float) -> str:
    """A size for people, with three digits and a binary unit, such as "1.21 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB" if abs(nbytes) < 1000 else f"{nbytes / 1024:.2f} TiB"


def check_directory(path: object) -> Path:
    """Return `path`, absolute, if a store can live there. ConfigError: it is no path, or "", does not exist, is not a
    directory, or cannot be written to. None is created: an unmounted drive must not fill the system disk."""
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigTypeError("path", path, _WHICH_DIRECTORY)
    if not os.fspath(path):  # most likely a variable that is not set; "." is the working directory
        raise ConfigError("path", path, _WHICH_DIRECTORY)
    try:
        directory = Path(os.path.expanduser(path)).absolute()  # it stays the same if the program goes elsewhere
        exists = directory.exists()
    except (OSError, ValueError) as error:  # too long, not to be looked into, or with a zero byte
        raise ConfigError("path", str(path), f"the directory cannot be examined: {words_of(error)}") from error
    if not exists:
        raise ConfigError("path", str(path), "no such directory; it is never created (is the drive mounted?)")
    if not directory.is_dir():
        raise ConfigError("path", str(path), "this is not a directory")
    # access() says yes to root even where nobody can write, so the file system's own flag is checked too.
    read_only = bool(_file_system_of(directory).f_flag & os.ST_RDONLY)
    if read_only or not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError("path", str(path), "this directory cannot be written to")
    return directory


def check_directories(path: object) -> tuple[Path, ...]:
    """The directories of a store: `path` itself, or those in the list `path`, each checked like `check_directory`. The
    list may not be empty, nor name a directory twice."""
    if not isinstance(path, (list, tuple)):
        return (check_directory(path),)
    if not path:
        raise ConfigError("path", path, "give at least one existing directory")
    directories: dict[tuple[int, int], Path] = {}
    for directory in map(check_directory, path):
        status = directory.stat()
        if (status.st_dev, status.st_ino) in directories:
            raise ConfigError("path", str(directory), "this directory is given twice; give each drive once")
        directories[status.st_dev, status.st_ino] = directory
    return tuple(directories.values())


def free_bytes_of_each(directories: Sequence[Path]) -> list[int]:
    """Like `free_disk_bytes` for each directory; those on one file system have equal shares of what is free there."""
    devices = [directory.stat().st_dev for directory in directories]
    return [free_disk_bytes(each) // devices.count(device) for each, device in zip(directories, devices, strict=True)]


def free_disk_bytes(directory: Path) -> int:
    """Bytes that an ordinary user may still write under `directory`. Raises ConfigError: the system does not tell."""
    status = _file_system_of(directory)
    return status.f_bavail * status.f_frsize


def _file_system_of(directory: Path) -> os.statvfs_result:
    try:
        return os.statvfs(directory)
    except OSError as error:  # a stale mount, or refused
        raise ConfigError("path", str(directory), f"its file system cannot be examined: {words_of(error)}") from error


def local_world_size(environment: Mapping[str, str] = os.environ) -> int:
    """How many trainers of this host share its memory and its drive (torchrun's LOCAL_WORLD_SIZE), at least 1.
    ConfigError: the variable is set to something that is not a positive number."""
    text = environment.get("LOCAL_WORLD_SIZE", "1")
    if not _is_number(text) or int(text) < 1:
        raise ConfigError("LOCAL_WORLD_SIZE", text, "the environment variable must be a positive number")
    return int(text)


def rank_of_process(environment: Mapping[str, str] = os.environ) -> int | None:
    """The process's rank in its job (torchrun's RANK); None: it has none."""
    text = environment.get("RANK", "")
    return int(text) if _is_number(text) else None


def _is_number(text: str) -> bool:
    """Whether it is a decimal number of at most nine digits: no job has more processes."""
    return text.isdecimal() and len(text) < 10


def program_name() -> str:
    """The name of the running program, for people: its file's name, or "python"."""
    return Path(sys.argv[0]).name[:64] or "python" if sys.argv else "python"


def version_of(package: str) -> str | None:
    """Of an installed package, without its import; None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def allowed_cores() -> set[int]:
    """The cores that this thread may run on; all, if the system does not tell."""
    try:
        return os.sched_getaffinity(0)
    except OSError:  # a filter of system calls may refuse it
        return set(range(os.cpu_count() or 1))


def available_host_bytes() -> int:
    """Bytes of memory that this process may still take: the least that the kernel (MemAvailable of /proc/meminfo), a
    memory cgroup or `ulimit -v` leaves. Against that limit (RLIMIT_AS) all mapped memory counts as taken."""
    available = meminfo().get("MemAvailable", os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit, used in memory_cgroup_limits():
        available = min(available, max(0, limit - used))
    address_limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_limit != resource.RLIM_INFINITY:
        num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        available = min(available, max(0, address_limit - num_pages * os.sysconf("SC_PAGE_SIZE")))
    return available


def meminfo() -> dict[str, int]:
    """The memory of the machine in bytes, by the kernel's names (proc(5), /proc/meminfo)."""
    return _sizes_in(Path("/proc/meminfo"))


def memory_of_process() -> dict[str, int]:
    """The memory of this process in bytes: "VmRSS", "RssAnon" and others (proc(5), /proc/PID/status)."""
    return _sizes_in(Path("/proc/self/status"))


def _sizes_in(file: Path) -> dict[str, int]:
    return {name.decode(): int(kilobytes) * 1024 for name, kilobytes in _KILOBYTES.findall(_read(file))}


def memory_cgroup_limits() -> list[tuple[int, int]]:
    """(limit, use) in bytes of every memory cgroup above this process. Inactive page cache counts as free, active page
    cache by half, much as in the kernel's MemAvailable (mm/show_mem.c)."""
    return [each for folder, version in memory_cgroups() for each in _limit_of(folder, version)]


def available_cores() -> float:
    """How many cores this process may use: its affinity, and its container's or service's quota."""
    allowed = float(len(allowed_cores()))
    return min(allowed, quota_cores() or allowed)


def quota_cores() -> float | None:
    """The quota by the CPU cgroups above this process (cgroups(7), version 2 and 1); None: they set none."""
    quotas = []
    for folder, version in _cgroups_of_process("cpu"):
        files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        try:
            quota, period = " ".join((folder / file).read_text() for file in files).split()
            if quota not in ("max", "-1"):
                quotas.append(int(quota) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue  # this level has no CPU controller, or is not ours to read
    return min(quotas, default=None)


def memory_cgroups() -> tuple[tuple[Path, int], ...]:
    """The folder and the version (1 or 2) of every memory cgroup above this process; some may be missing."""
    return _cgroups_of_process("memory")


def _cgroups_of_process(controller: str) -> tuple[tuple[Path, int], ...]:
    return _cgroups_in(os.fsdecode(_read(Path("/proc/self/cgroup"))), controller, _CGROUP)


def _read(file: Path) -> bytes:
    """Of a small file. `Path.read_bytes` takes twice as long, which counts where memory is short."""
    with open(file, "rb", buffering=0) as opened:
        return opened.read()


@lru_cache(maxsize=4)
def _cgroups_in(text: str, controller: str, top: Path) -> tuple[tuple[Path, int], ...]:
    """The cgroups of this process and all above it, each with its version. Where a container's own cgroup is mounted as
    the root, /proc may still show the host's path, which is missing then."""
    found = []
    for version, name, root in ((2, "", top), (1, controller, top / controller)):
        found.append((root, version))
        for line in text.splitlines():
            _, controllers, group = line.split(":", 2)
            if name in controllers.split(","):
                folder = root / group.lstrip("/")
                while folder != root and folder.is_relative_to(root):
                    found.append((folder, version))
                    folder = folder.parent
    return tuple(found)


def _limit_of(folder: Path, version: int) -> list[tuple[int, int]]:
    limit_name, used_name, keys = _MEMORY_FILES[version]
    try:
        limit = _read(folder / limit_name).strip()
        if not limit.isdigit() or int(limit) >= _UNLIMITED_BYTES:
            return []  # "max", or the number that version 1 gives instead
        used = int(_read(folder / used_name))
        statistics = b"\n" + _read(folder / "memory.stat")
    except (OSError, ValueError):
        return []  # this level has no memory controller, or may not be read: no limit is known
    cached, shared, idle, in_use = (
        int(statistics.partition(b"\n%s " % key.encode())[2].partition(b"\n")[0] or 0) for key in keys.split()
    )
    # Memory that was freed with MADV_FREE counts as inactive, too, even when it is in use again (mm/swap.c).
    in_files = max(cached - shared, 0)
    in_use = min(in_use, in_files)
    return [(int(limit), used - min(idle, in_files - in_use) - in_use // 2)]
