"""What was measured on a machine, as plain records: every unit in the name, None where something could not be had.

These are also the first half of what `tierstore doctor --json` prints; a change of them is one of `REPORT_VERSION`.
"""

from __future__ import annotations

from msgspec import Struct

from ..hardware import AcceleratorLink, CodecSpeed, Transfer

__all__ = [
    "AcceleratorState",
    "Daemon",
    "Drive",
    "HugePages",
    "Limits",
    "Measurements",
    "Memory",
    "Processor",
    "fastest",
]


class Drive(Struct, frozen=True, kw_only=True):
    """The directory that was asked about, and the drive under it.

    Attributes:
        path: the directory.
        file_system: its type, such as "ext4".
        io_mode: how a store would read and write there: "O_DIRECT", or "buffered" and why; None: it was not found out.
        device: the block device's name; None: there is none, or the kernel does not say. Likewise the next three.
        model: as the drive calls itself.
        size_bytes: of the device.
        is_rotational: what the kernel believes.
        total_bytes: of the file system.
        free_bytes: that this user may still write.
        span_bytes: of the space on which was measured; 0: on none.
        first_write_bytes_per_second: into space that was only reserved; None: nothing was written.
        write_latency_seconds: of 4 KiB, one at a time, the median; likewise `read_latency_seconds`.
        writes: by block size and depth, over space that was written before.
        reads: likewise.
        device_bytes: that the device moved meanwhile, for everybody; None: it does not say.
        num_left_out: combinations that would have taken too long on a drive as slow as this, or too much space.
        error: what went wrong at the drive, in words; None: nothing.

    Bytes per second are of all transfers together.
    """

    path: str
    file_system: str
    io_mode: str | None
    device: str | None
    model: str | None
    size_bytes: int | None
    is_rotational: bool | None
    total_bytes: int
    free_bytes: int
    span_bytes: int = 0
    first_write_bytes_per_second: float | None = None
    write_latency_seconds: float | None = None
    read_latency_seconds: float | None = None
    writes: tuple[Transfer, ...] = ()
    reads: tuple[Transfer, ...] = ()
    device_bytes: int | None = None
    num_left_out: int = 0
    error: str | None = None


class Memory(Struct, frozen=True, kw_only=True):
    """Host memory.

    Attributes:
        total_bytes: of the machine.
        available_bytes: that this process could still take, within its cgroups' limits.
        limit_bytes: the lowest limit of its memory cgroups; None: none is set.
        swap_total_bytes, swap_used_bytes: of the machine.
        shm_total_bytes, shm_free_bytes: of /dev/shm; None: there is none.
        copy_bytes_per_second: of one thread, between buffers that it has used before.
        copy_all_bytes_per_second: of a thread on each core (eight at most), together.
        fresh_bytes_per_second: of one thread that writes to memory it has not used before.
        allocator: what serves `malloc` in this process, and so, in the same environment, in a training.
        allocator_left_alone: why a store does not have it return freed memory, in words; None: it does.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    swap_total_bytes: int
    swap_used_bytes: int
    shm_total_bytes: int | None
    shm_free_bytes: int | None
    copy_bytes_per_second: float
    copy_all_bytes_per_second: float
    fresh_bytes_per_second: float
    allocator: str
    allocator_left_alone: str | None


class HugePages(Struct, frozen=True, kw_only=True):
    """Transparent huge pages: a transfer needs an entry of the device's queue for each piece of memory.

    Attributes:
        enabled: the kernel's setting for private memory: "always", "madvise" or "never"; None: it has none.
        shared: its setting for shared memory, "never" in most.
        granted_share: share of a fresh private buffer, which had asked for them, that became huge pages, 0 to 1;
            None: the kernel does not tell.
        collapses: whether a client's window became huge pages when asked afterwards (MADV_COLLAPSE).
        free_bytes: that lie in pieces of a huge page or longer, by /proc/buddyinfo; None: that cannot be read.
        free_share: of all free memory; None likewise.
    """

    enabled: str | None
    shared: str | None
    granted_share: float | None
    collapses: bool
    free_bytes: int | None
    free_share: float | None


class Processor(Struct, frozen=True, kw_only=True):
    """Cores.

    Attributes:
        model: as the processor calls itself; None: it does not.
        num_present: of the machine.
        num_allowed: that this process may run on.
        quota_cores: what its CPU cgroups leave of them; None: no quota.
        load: how many threads wanted a core in the minute before, on average.
    """

    model: str | None
    num_present: int
    num_allowed: int
    quota_cores: float | None
    load: float

    @property
    def usable_cores(self) -> float:
        """What this process may use."""
        return min(float(self.num_allowed), self.quota_cores or float(self.num_allowed))


class Limits(Struct, frozen=True, kw_only=True):
    """Of the process.

    Attributes:
        open_files: RLIMIT_NOFILE, the soft one; None: there is none.
        locked_bytes: RLIMIT_MEMLOCK; likewise.
    """

    open_files: int | None
    locked_bytes: int | None


class AcceleratorState(Struct, frozen=True, kw_only=True):
    """What stands between PyTorch and accelerators.

    Attributes:
        links: those that were found and measured.
        note: why there are none, in words; None: there are, or one of them failed.
        error: why one that was found could not be measured, in words; None: that did not happen.
    """

    links: tuple[AcceleratorLink, ...] = ()
    note: str | None = None
    error: str | None = None


class Daemon(Struct, frozen=True, kw_only=True):
    """The sidecar of this host.

    Attributes:
        socket: where it was looked for.
        is_present: whether there is a socket.
        is_answering: whether a daemon answered there.
        is_refusing: whether this user may not use it.
        path: the directory that it keeps; None: it did not answer.
        keeps_directory: whether that is the one that was asked about.
        note: why it did not, in words.
    """

    socket: str
    is_present: bool
    is_answering: bool = False
    is_refusing: bool = False
    path: str | None = None
    keeps_directory: bool = False
    note: str | None = None


class Measurements(Struct, frozen=True, kw_only=True):
    """All that was measured of one machine.

    Attributes:
        kernel: its release.
        num_trainers: processes that will share the machine: LOCAL_WORLD_SIZE, else one for each accelerator, else 1.
        seconds: that measuring took.
        codecs: by kind of sample data and codec; one core's speed.
    """

    kernel: str
    num_trainers: int
    seconds: float
    drive: Drive
    memory: Memory
    huge_pages: HugePages
    processor: Processor
    limits: Limits
    codecs: tuple[CodecSpeed, ...]
    accelerators: AcceleratorState
    daemon: Daemon


def fastest(transfers: tuple[Transfer, ...]) -> float | None:
    """Bytes per second of the best combination; None: nothing was measured."""
    return max((each.bytes_per_second for each in transfers), default=None)
