"""The measurements of a machine, as plain records. Units are in the names; None: the value could not be found out.

`tierstore doctor --json` prints these records, so a change of them is a change of `REPORT_VERSION`.
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
        model: the name that the drive reports.
        size_bytes: of the device.
        is_rotational: whether the kernel takes it for a rotating disk.
        total_bytes: of the file system.
        free_bytes: that this user may still write.
        span_bytes: size of the file that was measured on; 0: there was none.
        first_write_bytes_per_second: into space that was only reserved; None: nothing was written.
        write_latency_seconds: of 4 KiB, one at a time, the median; likewise `read_latency_seconds`.
        writes: by block size and depth, over space that was written before.
        reads: likewise.
        device_bytes: moved by the device meanwhile, for all processes; None: the kernel does not say.
        num_left_out: combinations that would have taken too long on this drive, or too much space.
        error: what went wrong at the drive, in words; None: nothing.

    Bytes per second are those of all transfers together.
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
        available_bytes: memory that this process could still take, within its cgroups' limits.
        limit_bytes: the lowest limit of its memory cgroups; None: none is set.
        swap_total_bytes, swap_used_bytes: of the machine.
        shm_total_bytes, shm_free_bytes: of /dev/shm; None: there is none.
        copy_bytes_per_second: of one thread, between buffers that it has used before.
        copy_all_bytes_per_second: of a thread on each core (eight at most), together.
        fresh_bytes_per_second: of one thread that writes to memory it has not used before.
        allocator: what serves `malloc` in this process, and in a training with the same environment.
        allocator_left_alone: why a store does not make it return freed memory, in words; None: the store does.
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
    """Transparent huge pages. They save work: a transfer takes one entry in the device's queue per piece of memory.

    Attributes:
        enabled: the kernel's setting for private memory: "always", "madvise" or "never"; None: it has none.
        shared: its setting for shared memory, "never" on most machines.
        granted_share: share of a new private buffer that became huge pages on request, 0 to 1; None: the kernel does
            not tell.
        collapses: whether a client's window became huge pages when asked afterwards (MADV_COLLAPSE).
        free_bytes: free memory in pieces of a huge page or longer, by /proc/buddyinfo; None: that cannot be read.
        free_share: the same as a share of all free memory; None: that cannot be read.
    """

    enabled: str | None
    shared: str | None
    granted_share: float | None
    collapses: bool
    free_bytes: int | None
    free_share: float | None


class Processor(Struct, frozen=True, kw_only=True):
    """The processor's cores.

    Attributes:
        model: the name that the processor reports; None: it reports none.
        num_present: cores of the machine.
        num_allowed: cores that this process may run on.
        quota_cores: how many of them its CPU cgroups allow; None: no quota.
        load: how many threads wanted a core in the minute before, on average.
    """

    model: str | None
    num_present: int
    num_allowed: int
    quota_cores: float | None
    load: float

    @property
    def usable_cores(self) -> float:
        """How many cores this process may use."""
        return min(float(self.num_allowed), self.quota_cores or float(self.num_allowed))


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of the process.

    Attributes:
        open_files: the soft RLIMIT_NOFILE; None: no limit.
        locked_bytes: the soft RLIMIT_MEMLOCK; None: no limit.
    """

    open_files: int | None
    locked_bytes: int | None


class AcceleratorState(Struct, frozen=True, kw_only=True):
    """The accelerators that were found.

    Attributes:
        links: links to accelerators that were measured.
        note: why there are no accelerators, in words; None: there are some, or measuring one failed.
        error: why an accelerator could not be measured, in words; None: that did not happen.
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
        keeps_directory: whether that is the examined directory.
        note: why it did not answer, in words.
    """

    socket: str
    is_present: bool
    is_answering: bool = False
    is_refusing: bool = False
    path: str | None = None
    keeps_directory: bool = False
    note: str | None = None


class Measurements(Struct, frozen=True, kw_only=True):
    """All measurements of one machine.

    Attributes:
        kernel: release of the kernel.
        num_trainers: processes that will share the machine: LOCAL_WORLD_SIZE, else one for each accelerator, else 1.
        seconds: how long measuring took.
        codecs: speeds on one core, by kind of sample data and codec.
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
