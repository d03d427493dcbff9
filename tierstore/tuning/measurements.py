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
    """The directory that was asked about, and the drive under it. Bytes per second are of all transfers together."""

    path: str
    file_system: str
    io_mode: str | None
    """How a store would read and write there: "O_DIRECT", or "buffered" and why."""
    device: str | None
    model: str | None
    size_bytes: int | None
    is_rotational: bool | None
    """What the kernel says."""
    total_bytes: int
    free_bytes: int
    """What this user may still write."""
    span_bytes: int = 0
    """Size of the file that was measured on; 0: there was none."""
    first_write_bytes_per_second: float | None = None
    """Into space that was only reserved; all others: over space that was written before."""
    write_latency_seconds: float | None = None
    """Of 4 KiB, one at a time, the median."""
    read_latency_seconds: float | None = None
    writes: tuple[Transfer, ...] = ()
    reads: tuple[Transfer, ...] = ()
    device_bytes: int | None = None
    """Moved by the device meanwhile, for all processes."""
    num_left_out: int = 0
    """Combinations that would have taken too long on this drive, or too much space."""
    error: str | None = None
    """What went wrong at the drive; None: nothing."""


class Memory(Struct, frozen=True, kw_only=True):
    """Host memory."""

    total_bytes: int
    available_bytes: int
    """What this process could still take, within its cgroups' limits."""
    limit_bytes: int | None
    """The lowest limit of its memory cgroups; None: none is set."""
    swap_total_bytes: int
    swap_used_bytes: int
    shm_total_bytes: int | None
    shm_free_bytes: int | None
    copy_bytes_per_second: float
    """Of one thread, between buffers that it has used before."""
    copy_all_bytes_per_second: float
    """Of a thread on each core (eight at most), together."""
    fresh_bytes_per_second: float
    """Of one thread that writes to memory it has not used before."""
    allocator: str
    allocator_left_alone: str | None
    """Why a store does not make it return freed memory; None: the store does."""


class HugePages(Struct, frozen=True, kw_only=True):
    """Transparent huge pages. They save work: a transfer takes one entry in the device's queue per piece of memory."""

    enabled: str | None
    """The kernel's setting for private memory; None: it has none. Likewise for shared memory."""
    shared: str | None
    granted_share: float | None
    """Share of a new private buffer that became huge pages on request, 0 to 1."""
    collapses: bool
    """Whether a client's window became huge pages when asked afterwards (MADV_COLLAPSE)."""
    free_bytes: int | None
    """Free memory in pieces of a huge page or longer, by /proc/buddyinfo; then as a share of all free memory."""
    free_share: float | None


class Processor(Struct, frozen=True, kw_only=True):
    """The processor's cores."""

    model: str | None
    num_present: int
    num_allowed: int
    quota_cores: float | None
    """How many of them its CPU cgroups allow; None: no quota."""
    load: float
    """How many threads wanted a core in the minute before, on average."""

    @property
    def usable_cores(self) -> float:
        """How many cores this process may use."""
        return min(float(self.num_allowed), self.quota_cores or float(self.num_allowed))


class Limits(Struct, frozen=True, kw_only=True):
    """Soft limits of the process (RLIMIT_NOFILE, RLIMIT_MEMLOCK); None: no limit."""

    open_files: int | None
    locked_bytes: int | None


class AcceleratorState(Struct, frozen=True, kw_only=True):
    """The accelerators that were measured; why there are none (`note`), or one could not be measured (`error`)."""

    links: tuple[AcceleratorLink, ...] = ()
    note: str | None = None
    error: str | None = None


class Daemon(Struct, frozen=True, kw_only=True):
    """The sidecar of this host, at the socket where it was looked for."""

    socket: str
    is_present: bool
    is_answering: bool = False
    is_refusing: bool = False
    """Whether this user may not use it."""
    path: str | None = None
    """The directory that it keeps."""
    keeps_directory: bool = False
    """Whether that is the examined directory."""
    note: str | None = None
    """Why it did not answer."""


class Measurements(Struct, frozen=True, kw_only=True):
    """All measurements of one machine."""

    kernel: str
    num_trainers: int
    """Processes that will share the machine: LOCAL_WORLD_SIZE, else one for each accelerator, else 1."""
    seconds: float
    """How long measuring took."""
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
