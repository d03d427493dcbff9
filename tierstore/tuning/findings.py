"""Makes findings from measurements, in plain words. Pure.

A *problem* keeps offloading from working, or makes it almost useless; a *warning* costs something; a *note* is good to
know. Each check is a function that yields its findings. The codes are stable, the words are not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

from msgspec import Struct

from ..base.config import format_bytes
from ..disk.budget import DAY_SECONDS
from .measurements import Drive, Measurements, fastest, rate

MIB, GIB = 2**20, 2**30

_LITTLE_SPACE_BYTES = 16 * GIB
_USELESS_DRIVE, _SLOW_DRIVE = 200e6, 1e9  # bytes per second; a SATA drive does 500 MB/s
_SLOW_ANSWER_SECONDS = 5e-3
_OVERLAY_IN_MEMORY = "tmpfs under overlayfs"  # in the mode of transfers; as a file system it is an "overlay"
_IN_MEMORY = ("tmpfs", "ramfs", _OVERLAY_IN_MEMORY)
_NETWORK = (
    "9p", "afs", "beegfs", "ceph", "cifs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "orangefs", "smb3", "smbfs",
    "fuse.ceph", "fuse.glusterfs", "fuse.gcsfuse", "fuse.s3fs", "fuse.sshfs",
)  # fmt: skip
_USELESS_MEMORY_BYTES, _LITTLE_MEMORY_BYTES = 512 * MIB, 4 * GIB
_SWAPPED_SHARE = 0.05  # of memory
_SEGMENT_BYTES = GIB  # size of an extent file; each takes a descriptor
_OTHER_DESCRIPTORS = 64  # what else a training process has open
_RATED_DRIVE_WRITES = 600  # in a life: what drives for desktops are usually warranted for
_SHORT_LIFE_DAYS = 365.0
_SLOW_LINK = 6e9  # PCIe 3.0 with 8 lanes

Severity = Literal["problem", "warning", "note"]


class Finding(Struct, frozen=True):
    """One thing to know about a machine. `code`: a stable name. `advice`: what to do; None: nothing."""

    severity: Severity
    code: str
    sentence: str
    advice: str | None = None


_Found = Iterator[Finding]


_problem, _warning, _note = partial(Finding, "problem"), partial(Finding, "warning"), partial(Finding, "note")


def findings_of(machine: Measurements) -> tuple[Finding, ...]:
    """Every finding about a machine, the worst first; within a severity in the order of the checks."""
    checks: tuple[Callable[[Measurements], _Found], ...] = (
        _room, _place, _speed, _accelerators, _memory, _cores_and_files, _daemon, _wear,
    )  # fmt: skip
    found = [finding for check in checks for finding in check(machine)]
    return tuple(sorted(found, key=lambda finding: ("problem", "warning", "note").index(finding.severity)))


# --- the drive --------------------------------------------------------------------------------------------------------


def unfit_because(drive: Drive) -> str | None:
    """Why the directory is not recommended for a store, in words; None: it may be used."""
    if drive.error is not None:
        return f"its drive fails: {drive.error}"
    if not drive.span_bytes:
        return f"only {format_bytes(drive.free_bytes)} are free there"
    if drive.file_system in _IN_MEMORY:
        return f"it is in memory ({drive.file_system})"
    return f"it is on a network file system ({drive.file_system})" if drive.file_system in _NETWORK else None


def _room(machine: Measurements) -> _Found:
    drive = machine.drive
    free = f"Only {format_bytes(drive.free_bytes)} are free under {drive.path}"
    if drive.error is not None:
        advice = "Look at the kernel's log (dmesg), at quotas, and at the network if the drive is behind one."
        yield _problem("drive-fails", f"The drive under {drive.path} fails: {drive.error}.", advice)
    elif not drive.span_bytes:
        advice = "Free some space, or name a directory on another drive."
        yield _problem("drive-full", f"{free}: too little to measure or spill to.", advice)
    elif drive.free_bytes < _LITTLE_SPACE_BYTES:
        advice = "Free some space: a step raises StoreFullError when host memory and disk are used up."
        yield _warning("little-space", f"{free}, and one step may save more than that.", advice)


def _place(machine: Measurements) -> _Found:
    drive, has_links = machine.drive, bool(machine.accelerators.links)
    if drive.file_system in _NETWORK:
        yield _warning(
            "network-drive",
            f"{drive.path} is on a network file system ({drive.file_system}): its speed depends on the network and on "
            "other users, and training waits when it does.",
            "Name a directory on a local drive, if there is one.",
        )
    kind = _OVERLAY_IN_MEMORY if _OVERLAY_IN_MEMORY in (drive.io_mode or "") else drive.file_system
    if kind in _IN_MEMORY:
        yield (_warning if has_links else _problem)(
            "in-memory",
            f"{drive.path} is in memory ({kind}), so tensors that are spilled there still take memory.",
            "Name a directory on a drive." + " This one relieves only the memory of accelerators." * has_links,
        )
    elif drive.io_mode is not None and drive.io_mode.startswith("buffered"):
        yield _warning(
            "no-direct-io",
            f"Reads and writes under {drive.path} go through the page cache: {drive.io_mode}. They cost more CPU "
            "time than direct ones, and the cache competes with training for memory.",
            "Name a directory on a local ext4 or xfs, which support O_DIRECT, if there is one.",
        )


def _speed(machine: Measurements) -> _Found:
    drive, write, read = machine.drive, fastest(machine.drive.writes), fastest(machine.drive.reads)
    if write is not None and read is not None:
        figures = f"The drive writes {rate(write)} and reads {rate(read)} at best"
        if min(write, read) < _USELESS_DRIVE:
            seconds = 1e9 / write + 1e9 / read
            yield _problem(
                "drive-very-slow",
                f"{figures}: to write and read a gigabyte takes {seconds:.0f} s; training waits for it.",
                "Use a local NVMe drive, or give more host_bytes, so that the store spills little.",
            )
        elif min(write, read) < _SLOW_DRIVE:
            yield _warning(
                "drive-slow",
                f"{figures}. One NVMe drive is two to five times as fast.",
                "Give host_bytes all memory that training does not need. Steps that save much in little time may wait.",
            )
    answer_seconds = max(drive.write_latency_seconds or 0.0, drive.read_latency_seconds or 0.0)
    if answer_seconds > _SLOW_ANSWER_SECONDS:
        yield _warning(
            "drive-answers-late",
            f"The drive needs {1e3 * answer_seconds:.1f} ms to answer a request of 4 KiB.",
            "Measure again if others used the machine. Else raise min_bytes, so that only large tensors go there.",
        )


# --- memory, cores, limits --------------------------------------------------------------------------------------------


def _memory(machine: Measurements) -> _Found:
    memory = machine.memory
    if memory.available_bytes < _LITTLE_MEMORY_BYTES:
        yield (_problem if memory.available_bytes < _USELESS_MEMORY_BYTES else _warning)(
            "little-memory",
            f"Only {format_bytes(memory.available_bytes)} of memory are available.",
            "End other processes, or raise the limit: PyTorch and the model need memory beside the store.",
        )
    if memory.swap_used_bytes > _SWAPPED_SHARE * memory.total_bytes:
        yield _warning(
            "swapping",
            f"{format_bytes(memory.swap_used_bytes)} are swapped out, and training may need some of that memory.",
            "Keep host_bytes below the memory that is really free: the store spills faster than the kernel swaps.",
        )
    if memory.no_caching_allocator is not None:
        yield _note(
            "no-caching-allocator",
            f"Freed memory is returned and taken anew, not used again ({memory.no_caching_allocator}). That costs page "
            "faults where memory is short: steps within a limit take longer.",
            "pip install ./native, with a C++ compiler. docs/how_to/memory_on_cpu.md says what it does.",
        )
    if memory.no_caching_allocator is not None and memory.allocator_left_alone is not None:
        yield _note(
            "memory-not-returned",
            f"The store does not return freed memory of {memory.allocator} to the system here, because "
            f"{memory.allocator_left_alone}. The process may then not shrink by what the store moves out.",
            "docs/how_to/memory_on_cpu.md lists the settings that matter.",
        )
    if memory.huge_pages in (None, "never"):
        yield _warning(
            "no-huge-pages",
            "The kernel gives no huge pages (transparent_hugepage/enabled): transfers are up to a third slower.",
            "As root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )


def _cores_and_files(machine: Measurements) -> _Found:
    processor, open_files = machine.processor, machine.limits.open_files
    if processor.quota_cores is not None and processor.quota_cores < processor.num_allowed:
        sentence = f"A quota leaves {processor.quota_cores:.2g} of {processor.num_allowed} cores."
        advice = "Limit PyTorch to that many threads (OMP_NUM_THREADS): beyond the quota the kernel stops all of them."
        yield _note("cpu-quota", sentence, advice)
    if processor.usable_cores < 2:
        sentence = "This process can use less than two cores, so the store takes its CPU time from training."
        yield _warning("one-core", sentence)
    wanted = math.ceil(machine.drive.free_bytes / _SEGMENT_BYTES) + _OTHER_DESCRIPTORS
    if open_files is not None and open_files < wanted:
        yield (_problem if open_files < _OTHER_DESCRIPTORS else _warning)(
            "few-descriptors",
            f"A process may open {open_files} files, and a store that fills the drive opens one for each GiB.",
            f"Run ulimit -n {wanted} before you start training, or give a smaller disk_bytes.",
        )


# --- accelerators and the daemon --------------------------------------------------------------------------------------


def _accelerators(machine: Measurements) -> _Found:
    if machine.accelerators.error is not None:
        yield _warning("accelerator-fails", f"An accelerator cannot be used: {machine.accelerators.error}.")
    for number, link in enumerate(machine.accelerators.links):
        slowest = min(link.to_host_bytes_per_second, link.to_device_bytes_per_second)
        if link.host_memory != "pinned":
            limit_bytes = machine.limits.locked_bytes
            limit = "not limited" if limit_bytes is None else format_bytes(limit_bytes)
            yield _warning(
                "not-pinned",
                f"Host memory for {link.name} ({number}) is {link.host_memory}: copies do not overlap with compute.",
                f"Look at the driver's version, and at the limit of locked memory (ulimit -l: {limit}).",
            )
        if slowest < _SLOW_LINK:
            sentence = f"Copies to and from {link.name} ({number}) reach {rate(slowest)}."
            yield _warning("link-slow", sentence, "Check how many PCIe lanes the card uses, and of which generation.")


def _daemon(machine: Measurements) -> _Found:
    daemon = machine.daemon
    if daemon.is_answering and daemon.path is not None:
        sentence = f"A daemon answers at {daemon.socket} and uses {daemon.path}."
        yield _note("daemon-runs", sentence, f'Its clients use TierStore.connect("{daemon.socket}").')
    elif daemon.is_refusing:
        yield _warning(
            "daemon-refuses",
            f"A daemon's socket is at {daemon.socket}, but this user may not use it: {daemon.note}.",
            "If it is a daemon of another user, name that user with --daemon-uid. That user can allow this one with "
            "--allow-uid, and open the socket with --socket-group.",
        )
    elif daemon.is_present:
        yield _warning(
            "daemon-silent",
            f"There is a socket at {daemon.socket}, but no daemon can be used there: {daemon.note}.",
            "Look at the daemon's log. If no daemon runs, remove the socket.",
        )


def _wear(machine: Measurements) -> _Found:
    """Of a flash drive of one's own that the store alone could wear out in a year."""
    drive, write = machine.drive, fastest(machine.drive.writes)
    if write is None or drive.size_bytes is None or drive.model is None or drive.is_rotational:
        return
    days = _RATED_DRIVE_WRITES * drive.size_bytes / (write * DAY_SECONDS)
    if days < _SHORT_LIFE_DAYS:
        yield _note(
            "wear",
            "A store writes only what host_bytes does not hold. Written to at its full speed day and night, a flash "
            f"drive of {format_bytes(drive.size_bytes)} would last {days:.0f} days, if it is rated for "
            f"{_RATED_DRIVE_WRITES} times its size.",
            "stats() shows what a store really writes, max_write_bytes_per_day limits it.",
        )
