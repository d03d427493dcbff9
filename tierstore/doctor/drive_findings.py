"""Findings about a drive. Pure."""

from __future__ import annotations

from ..base.config import format_bytes
from ..disk.endurance import DAY_SECONDS
from .finding import Found, note, problem, rate, warning
from .measurements import Drive, Measurements, fastest

__all__ = [
    "are_cores_shared",
    "is_drive_shared",
    "latency",
    "place",
    "room",
    "speed",
    "unfit_because",
    "wear",
    "worth_of_figures",
]

GIB = 2**30

_LITTLE_SPACE_BYTES = 16 * GIB
_USELESS_DRIVE, _SLOW_DRIVE = 200e6, 1e9  # bytes per second; a SATA drive does 500 MB/s
_SLOW_ANSWER_SECONDS = 5e-3
_SPINNING_SECONDS = 1e-3  # a drive that really rotates takes longer
_MOST_SPINNING = 300e6  # bytes per second; no single rotating drive moves more
_IN_MEMORY = ("tmpfs", "ramfs")
_NETWORK = (
    "9p", "afs", "beegfs", "ceph", "cifs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "orangefs", "smb3", "smbfs",
    "fuse.ceph", "fuse.glusterfs", "fuse.gcsfuse", "fuse.s3fs", "fuse.sshfs",
)  # fmt: skip
_SLOW_FIRST_WRITE = 0.6  # of the speed afterwards
_FOREIGN_SHARE = 0.2  # of what the device moved
_BUSY_SHARE = 0.5  # of the cores
_USUAL_DRIVE_WRITES_PER_DAY = 0.3  # the usual warranty of desktop drives, for five years


def room(machine: Measurements) -> Found:
    """Whether there is enough free space."""
    drive = machine.drive
    if drive.error is not None:
        yield problem(
            "drive-fails",
            f"The drive under {drive.path} fails: {drive.error}.",
            "Look at the kernel's log (dmesg), at quotas, and at the network if the drive is behind one.",
        )
    elif not drive.span_bytes:
        yield problem(
            "drive-full",
            f"Only {format_bytes(drive.free_bytes)} are free under {drive.path}: too little to measure or spill to.",
            "Free some space, or name a directory on another drive.",
        )
    elif drive.free_bytes < _LITTLE_SPACE_BYTES:
        yield warning(
            "little-space",
            f"Only {format_bytes(drive.free_bytes)} are free under {drive.path}, and one step may save more than that.",
            "Free some space: a step raises StoreFullError when host memory and disk are used up.",
        )


def place(machine: Measurements) -> Found:
    """The file system and device that the directory is on."""
    drive = machine.drive
    if drive.file_system in _NETWORK:
        yield warning(
            "network-drive",
            f"{drive.path} is on a network file system ({drive.file_system}): its speed depends on the network and on "
            "other users, and training waits when it does.",
            "Name a directory on a local drive, if there is one.",
        )
    if drive.file_system in _IN_MEMORY:
        sentence = (
            f"{drive.path} is in memory ({drive.file_system}), so tensors that are spilled there still take memory."
        )
        advice = "Name a directory on a drive."
        if machine.accelerators.links:
            yield warning(
                "in-memory", sentence, f"{advice} Offloading to this one relieves only the memory of accelerators."
            )
        else:
            yield problem("in-memory", sentence, advice)
    elif drive.io_mode is not None and drive.io_mode.startswith("buffered"):
        yield warning(
            "no-direct-io",
            f"Reads and writes under {drive.path} go through the page cache: {drive.io_mode}. They cost more CPU "
            "time than direct ones, and the cache competes with training for memory.",
            "Name a directory on a local ext4 or xfs, which support O_DIRECT, if there is one.",
        )


def unfit_because(drive: Drive) -> str | None:
    """Why the directory is not recommended for a store, in words; None: it may be used.

    A directory that cannot be written to never comes so far: `check_directory` refuses it.
    """
    if drive.error is not None:
        return f"its drive fails: {drive.error}"
    if not drive.span_bytes:
        return f"only {format_bytes(drive.free_bytes)} are free there"
    if drive.file_system in _IN_MEMORY:
        return f"it is in memory ({drive.file_system})"
    if drive.file_system in _NETWORK:
        return f"it is on a network file system ({drive.file_system})"
    return None


def speed(machine: Measurements) -> Found:
    """Throughput."""
    write, read = fastest(machine.drive.writes), fastest(machine.drive.reads)
    if write is None or read is None:
        return
    figures = f"The drive writes {rate(write)} and reads {rate(read)} at best"
    if min(write, read) < _USELESS_DRIVE:
        yield problem(
            "drive-very-slow",
            f"{figures}: to write and read a gigabyte takes {1e9 / write + 1e9 / read:.0f} s; training waits for it.",
            "Use a local NVMe drive, or give more host_bytes, so that the store spills little.",
        )
    elif min(write, read) < _SLOW_DRIVE:
        yield warning(
            "drive-slow",
            f"{figures}. One NVMe drive is two to five times as fast.",
            "Give host_bytes all memory that training does not need. Steps that save much in little time may wait.",
        )


def _may_spin(drive: Drive) -> bool:
    """Whether the drive may be a rotating one: the kernel says so, and the measurements do not contradict.

    The kernel calls many virtual drives rotating, so such a drive must also be slow to answer. A drive that moves more
    bytes than a rotating one can is none.
    """
    is_late = (drive.read_latency_seconds or 0.0) > _SPINNING_SECONDS
    bytes_per_second = max(fastest(drive.writes) or 0.0, fastest(drive.reads) or 0.0)
    return bool(drive.is_rotational) and is_late and bytes_per_second <= _MOST_SPINNING


def latency(machine: Measurements) -> Found:
    """How long the drive takes to answer. The latency of a busy machine does not tell whether a drive rotates."""
    drive = machine.drive
    slowest_seconds = max(drive.write_latency_seconds or 0.0, drive.read_latency_seconds or 0.0)
    is_busy = is_drive_shared(machine) or are_cores_shared(machine)
    if _may_spin(drive) and not is_busy:
        yield warning(
            "spinning-drive",
            f"This is a hard disk: reading 4 KiB takes {1e3 * (drive.read_latency_seconds or 0.0):.1f} ms.",
            "Use a flash drive, or raise min_bytes, so that only large tensors go there.",
        )
    elif slowest_seconds > _SLOW_ANSWER_SECONDS:
        meanwhile = " Other processes used the machine meanwhile." if is_busy else ""
        yield warning(
            "drive-answers-late",
            f"The drive needs {1e3 * slowest_seconds:.1f} ms to answer a request of 4 KiB.{meanwhile}",
            "Measure again when the machine is idle."
            if is_busy
            else "Raise min_bytes, so that only large tensors go there.",
        )


def is_drive_shared(machine: Measurements) -> bool:
    """Whether others used the drive while it was measured. False if the device does not count what it moves."""
    moved_bytes = machine.drive.device_bytes
    return moved_bytes is not None and moved_bytes * (1 - _FOREIGN_SHARE) > _measured_bytes(machine.drive)


def are_cores_shared(machine: Measurements) -> bool:
    """Whether others used the cores just before the measurements."""
    return machine.processor.load > _BUSY_SHARE * machine.processor.usable_cores


def _measured_bytes(drive: Drive) -> int:
    return sum(each.measured_bytes for each in (*drive.writes, *drive.reads)) + drive.span_bytes


def worth_of_figures(machine: Measurements) -> Found:
    """How far the measured figures can be trusted."""
    drive = machine.drive
    write = fastest(drive.writes)
    if drive.num_left_out:
        yield note(
            "partly-measured",
            f"{drive.num_left_out} of the combinations of block size and depth were not measured: the drive is slow, "
            f"or there is too little space or memory. {format_bytes(drive.span_bytes)} of the drive were used.",
        )
    if write is not None and is_drive_shared(machine):
        yield note(
            "drive-shared",
            f"Other processes used the drive during the measurement: it moved {format_bytes(drive.device_bytes or 0)}, "
            f"{format_bytes(_measured_bytes(drive))} of it for these figures. The drive is faster than they say.",
            "Measure again when the machine is idle.",
        )
    if are_cores_shared(machine):
        yield note(
            "cores-shared",
            f"Other processes used the cores: in the minute before, {machine.processor.load:.1f} threads on average "
            f"were ready to run on {machine.processor.usable_cores:g} cores.",
            "Measure again when the machine is idle.",
        )
    if write is not None and (drive.first_write_bytes_per_second or write) < _SLOW_FIRST_WRITE * write:
        yield note(
            "first-write-slow",
            f"The drive writes {rate(drive.first_write_bytes_per_second or 0.0)} into new space, {rate(write)} into "
            "space that was written before. So the first step is slower than later steps, which use the same space.",
        )


def wear(machine: Measurements) -> Found:
    """How fast writing at full speed would wear out a flash drive."""
    drive, write = machine.drive, fastest(machine.drive.writes)
    if write is None or drive.size_bytes is None or _may_spin(drive):
        return
    day_bytes = write * DAY_SECONDS
    usual_bytes = _USUAL_DRIVE_WRITES_PER_DAY * drive.size_bytes
    yield note(
        "wear",
        f"At full speed a store would write {format_bytes(day_bytes)} a day, {day_bytes / drive.size_bytes:.1f} times "
        f"the size of the drive ({format_bytes(drive.size_bytes)}). A flash drive for desktops is often warranted for "
        f"{_USUAL_DRIVE_WRITES_PER_DAY} times its size: {format_bytes(usual_bytes)} a day, which is "
        f"{usual_bytes / write / 60:.1f} minutes at full speed.",
        f'Look up the warranty of your drive. max_write_bytes_per_day="{int(usual_bytes / GIB)}GiB" limits a store to '
        "the usual one: a step that needs more raises StoreFullError. stats() shows what the store really writes.",
    )
