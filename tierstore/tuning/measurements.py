"""The measurements of a machine, as plain records. Units are in the names; None: the value could not be found out.

`tierstore doctor --json` prints these records, so a change of them, but for
more fields that have a default, is a change of `REPORT_VERSION`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Rate = Annotated[float, Meta(gt=0)]
"""Bytes per second."""

_BUSY_SHARE, _BUSY_LOAD = 0.2, 1.5  # the load for each core; a doctor that has just ended leaves one of its own


class CodecSpeed(Struct, frozen=True, kw_only=True):
    """Ratio (after over before) and speed, in unencoded bytes, of a codec on one kind of sample data, on one core."""

    data: str
    codec: str
    ratio: float
    encode_bytes_per_second: Rate
    decode_bytes_per_second: Rate


class Transfer(Struct, frozen=True, kw_only=True):
    """How fast blocks of one size move in one direction, with `depth` of them at once, each on a thread of its own."""

    block_bytes: int
    depth: int
    bytes_per_second: Rate


class Drive(Struct, frozen=True, kw_only=True):
    """The directory that was asked about, and the drive under it. Bytes per second are of all transfers together.

    Attributes:
        io_mode: how a store would read and write there: "O_DIRECT", or "buffered" and why.
        model, size_bytes, is_rotational: of the device; None: not known. Virtual ones report no model.
        free_bytes: what this user may still write.
        span_bytes: size of the file that was measured on; 0: there was none.
        write_latency_seconds, read_latency_seconds: of 4 KiB, one at a time, the median.
        error: what went wrong at the drive; None: nothing.
    """

    path: str
    file_system: str
    io_mode: str | None
    free_bytes: int
    model: str | None = None
    size_bytes: int | None = None
    is_rotational: bool | None = None
    span_bytes: int = 0
    write_latency_seconds: float | None = None
    read_latency_seconds: float | None = None
    writes: tuple[Transfer, ...] = ()
    reads: tuple[Transfer, ...] = ()
    error: str | None = None


class Memory(Struct, frozen=True, kw_only=True):
    """Host memory.

    Attributes:
        available_bytes: what this process could still take, within its cgroups' limits.
        limit_bytes: the lowest limit of its memory cgroups; None: none is set.
        copy_bytes_per_second: of one thread, between buffers that it has used before.
        huge_pages: the kernel's setting for private memory; None: it has none.
        allocator_left_alone: why a store does not make it return freed memory; None: the store does.
        no_caching_allocator: why PyTorch's tensors do not use freed memory again by the caching allocator; None: they
            do, or there is no PyTorch.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    swap_used_bytes: int
    copy_bytes_per_second: Rate
    huge_pages: str | None
    allocator: str
    allocator_left_alone: str | None
    no_caching_allocator: str | None = None


class Processor(Struct, frozen=True, kw_only=True):
    """The processor's cores, and how busy the machine was before it was measured.

    Attributes:
        load: threads of the whole machine that ran or waited, on average of the last minute.
        waiting_share: part of the last ten seconds, from 0 to 1, in which work waited for a core; None: the kernel does
            not tell.
    """

    num_present: int
    num_allowed: int
    quota_cores: float | None
    load: float | None = None
    waiting_share: float | None = None

    @property
    def usable_cores(self) -> float:
        return min(float(self.num_allowed), self.quota_cores or float(self.num_allowed))

    @property
    def is_busy(self) -> bool:
        """By what waits now. The load is of the last minute, and counts waits for drives: it decides where the kernel
        tells nothing else."""
        if self.waiting_share is not None:
            return self.waiting_share >= _BUSY_SHARE
        return self.load is not None and self.load >= _BUSY_LOAD * self.num_present


class Limits(Struct, frozen=True, kw_only=True):
    """Soft limits of the process (RLIMIT_NOFILE, RLIMIT_MEMLOCK); None: no limit."""

    open_files: int | None
    locked_bytes: int | None


class AcceleratorLink(Struct, frozen=True, kw_only=True):
    """Copies between host memory and an accelerator, one at a time. `host_memory`: its kind on the host's side:
    "pinned", or "pageable" and why."""

    name: str
    memory_bytes: int
    host_memory: str
    to_host_bytes_per_second: float
    to_device_bytes_per_second: float


class AcceleratorState(Struct, frozen=True, kw_only=True):
    """The accelerators that were measured; why there are none (`note`), or one could not be measured (`error`)."""

    links: tuple[AcceleratorLink, ...] = ()
    note: str | None = None
    error: str | None = None


class Daemon(Struct, frozen=True, kw_only=True):
    """The sidecar of this host, at the socket where it was looked for. `is_refusing`: this user may not use it.
    `keeps_directory`: `path`, the directory that it keeps, is the examined one. `note`: why it did not answer."""

    socket: str
    is_present: bool
    is_answering: bool = False
    is_refusing: bool = False
    path: str | None = None
    keeps_directory: bool = False
    note: str | None = None


class Measurements(Struct, frozen=True, kw_only=True):
    """All measurements of one machine, which took `seconds`. `num_trainers`: processes that will share it:
    LOCAL_WORLD_SIZE, else one for each accelerator, else 1."""

    num_trainers: int
    seconds: float
    drive: Drive
    memory: Memory
    processor: Processor
    limits: Limits
    codecs: tuple[CodecSpeed, ...]
    accelerators: AcceleratorState
    daemon: Daemon


def fastest(transfers: tuple[Transfer, ...]) -> float | None:
    """Bytes per second of the best combination; None: nothing was measured."""
    return max((each.bytes_per_second for each in transfers), default=None)


def rate(bytes_per_second: float) -> str:
    """A speed in words, such as "1.21 GB/s": in decimal units, as on data sheets of drives."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes_per_second >= factor:
            return f"{bytes_per_second / factor:.3g} {unit}/s"
    return f"{bytes_per_second:.3g} B/s"
