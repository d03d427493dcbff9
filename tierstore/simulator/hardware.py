"""A simulated machine, and how concurrent work shares it. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ..errors import ConfigError


class Activity(Enum):
    """Kinds of work that take time. Work is in seconds of a training thread, a core or an accelerator, or in bytes to
    or from the drive or an accelerator."""

    COMPUTE = "compute"
    CPU = "cpu"
    KERNELS = "kernels"
    WRITE = "write"
    READ = "read"
    OFFLOAD = "offload"
    RELOAD = "reload"


class DepthSpeed(NamedTuple):
    """The speed of all transfers together, with `depth` of them in flight."""

    depth: int
    bytes_per_second: float


@dataclass(frozen=True)
class Drive:
    """The disk tier's device.

    If reads and writes are in flight at once, each transfer gets the same share of the drive's time, and in that share
    moves at the speed of its direction at that depth. Between depths speeds are interpolated.

    Attributes:
        writes, reads: speeds by depth, at least one each, depths rising.
        write_latency_seconds, read_latency_seconds: of a transfer, before its bytes flow; it keeps its turn meanwhile.

    Raises:
        ConfigError: there is no speed, a depth comes twice, or a figure is negative.
    """

    writes: Sequence[DepthSpeed]
    reads: Sequence[DepthSpeed]
    write_latency_seconds: float = 0.0
    read_latency_seconds: float = 0.0
    capacity_bytes: int = 2**63 - 1

    def __post_init__(self) -> None:
        for name, speeds in (("writes", self.writes), ("reads", self.reads)):
            depths = [speed.depth for speed in speeds]
            if not depths or depths != sorted(set(depths)) or depths[0] < 1:
                raise ConfigError(name, depths, "give at least one speed, by rising depths from 1")
            if not all(speed.bytes_per_second > 0 for speed in speeds):
                raise ConfigError(name, speeds, "give speeds above 0")
        _check_not_negative(self, "write_latency_seconds", "read_latency_seconds", "capacity_bytes")


@dataclass(frozen=True)
class CodecSpeed:
    """The effect and speed of a codec on one kind of content, on one core, by unencoded bytes.

    `kind`: as `Saved.kind`; "" stands for every kind without figures of its own. `ratio`: bytes after over bytes
    before.
    """

    kind: str
    codec: str
    ratio: float
    encode_bytes_per_second: float
    decode_bytes_per_second: float


@dataclass(frozen=True)
class Link:
    """The link between host memory and the accelerator of a rank; each rank has its own.

    Copies of one direction go one after the other, as on a stream. Neither direction slows the other. Raises
    ConfigError: a speed is not above 0.
    """

    to_host_bytes_per_second: float
    to_device_bytes_per_second: float

    def __post_init__(self) -> None:
        _check_positive(self, "to_host_bytes_per_second", "to_device_bytes_per_second")


@dataclass(frozen=True)
class Hardware:
    """A machine.

    Attributes:
        drive: shared by all ranks.
        cores: of all ranks together; fractions are possible.
        codecs: by kind and codec.
        contention: how much background work slows training down beyond the cores that it takes. Compute takes
            1 + contention * (share of all cores busy with background work) times as long. Reasons are shared memory
            and caches, the interpreter's lock, and threads that wait for an interrupted one. See `fit`.
        cpu_seconds_per_record: of the store's threads, for each record each way.
        cpu_seconds_per_byte: of the store's threads, for each byte each way: checksum and system call.
        call_seconds_per_record: of the training thread, for each record that its call queues: bookkeeping, and
            handing over the interpreter's lock. Calls that move nothing are part of the workload's compute.
        link: of each rank, to its accelerator; None: there is none.

    Raises:
        ConfigError: there are no cores, or a figure is negative.
    """

    drive: Drive
    cores: float
    codecs: Sequence[CodecSpeed] = ()
    contention: float = 1.0
    cpu_seconds_per_record: float = 0.0
    cpu_seconds_per_byte: float = 0.0
    call_seconds_per_record: float = 0.0
    link: Link | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "cores")
        names = ("contention", "cpu_seconds_per_record", "cpu_seconds_per_byte", "call_seconds_per_record")
        _check_not_negative(self, *names)

    def rates(self, training_cores: float, counts: Mapping[Hashable, int]) -> Mapping[Hashable, float]:
        """The `Rates` of the machine. `training_cores`: that each rank keeps busy while it computes."""
        depth = max(1, counts.get(Activity.WRITE, 0) + counts.get(Activity.READ, 0))
        num_background = counts.get(Activity.CPU, 0)
        wanted_cores = counts.get(Activity.COMPUTE, 0) * training_cores + num_background
        crowding = max(1.0, wanted_cores / self.cores)
        background_share = num_background / crowding / self.cores
        rates: dict[Hashable, float] = {
            Activity.CPU: 1 / crowding,
            Activity.COMPUTE: 1 / crowding / (1 + self.contention * background_share),
            Activity.KERNELS: 1.0,
            Activity.WRITE: _speed_at(self.drive.writes, depth) / depth,
            Activity.READ: _speed_at(self.drive.reads, depth) / depth,
        }
        if self.link is not None:
            rates[Activity.OFFLOAD] = self.link.to_host_bytes_per_second
            rates[Activity.RELOAD] = self.link.to_device_bytes_per_second
        return rates


def _speed_at(speeds: Sequence[DepthSpeed], depth: int) -> float:
    """Bytes per second of all transfers together, interpolated; outside the given depths, as at the nearest."""
    place = bisect_left(speeds, depth, key=lambda speed: speed.depth)
    if place == 0:
        return speeds[0].bytes_per_second
    if place == len(speeds):
        return speeds[-1].bytes_per_second
    below, above = speeds[place - 1], speeds[place]
    if below.bytes_per_second == above.bytes_per_second:
        return above.bytes_per_second  # both may be infinite
    share = (depth - below.depth) / (above.depth - below.depth)
    return below.bytes_per_second + share * (above.bytes_per_second - below.bytes_per_second)


def _check_positive(given: object, *names: str) -> None:
    for name in names:
        if not getattr(given, name) > 0:
            raise ConfigError(name, getattr(given, name), "give more than 0")


def _check_not_negative(given: object, *names: str) -> None:
    for name in names:
        if not getattr(given, name) >= 0:
            raise ConfigError(name, getattr(given, name), "give 0 or more")
