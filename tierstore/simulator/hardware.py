"""A simulated machine, and how concurrent work shares it. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import NamedTuple

from ..errors import ConfigError

__all__ = ["Activity", "CodecSpeed", "Copying", "DepthSpeed", "Drive", "Hardware", "Link", "Sharing"]


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


class Copying(NamedTuple):
    """A copy on the link of one rank; `direction`: OFFLOAD or RELOAD."""

    direction: Activity
    rank: int


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
        capacity_bytes: bytes that may be stored.
        num_at_once: how many transfers, reads and writes, are served together; others wait in order. None: all, as by
            drives with queues of their own.

    Raises:
        ConfigError: there is no speed, a depth comes twice, or a figure is negative.
    """

    writes: Sequence[DepthSpeed]
    reads: Sequence[DepthSpeed]
    write_latency_seconds: float = 0.0
    read_latency_seconds: float = 0.0
    capacity_bytes: int = 2**63 - 1
    num_at_once: int | None = None

    def __post_init__(self) -> None:
        for name, speeds in (("writes", self.writes), ("reads", self.reads)):
            depths = [speed.depth for speed in speeds]
            if not depths or depths != sorted(set(depths)) or depths[0] < 1:
                raise ConfigError(name, depths, "give at least one speed, by rising depths from 1")
            if not all(speed.bytes_per_second > 0 for speed in speeds):
                raise ConfigError(name, speeds, "give speeds above 0")
        if self.num_at_once is not None and self.num_at_once < 1:
            raise ConfigError("num_at_once", self.num_at_once, "give at least 1, or None for all")
        for name in ("write_latency_seconds", "read_latency_seconds", "capacity_bytes"):
            _check_not_negative(name, getattr(self, name))


@dataclass(frozen=True)
class CodecSpeed:
    """The effect and speed of a codec on one kind of content, on one core.

    Attributes:
        kind: of the content, as `Saved.kind`; "" stands for every kind without figures of its own.
        codec: such as "zstd:1".
        ratio: bytes after over bytes before.
        encode_bytes_per_second, decode_bytes_per_second: of unencoded bytes.
    """

    kind: str
    codec: str
    ratio: float
    encode_bytes_per_second: float
    decode_bytes_per_second: float


@dataclass(frozen=True)
class Link:
    """The link between host memory and the accelerator of a rank; each rank has its own.

    Copies of one direction go one after the other, as on a stream. Queueing one costs nothing.

    Attributes:
        to_host_bytes_per_second, to_device_bytes_per_second: while nothing goes the other way.
        both_bytes_per_second: limit of both directions together; if they exceed it, both are slowed by one factor.

    Raises:
        ConfigError: a speed is not above 0.
    """

    to_host_bytes_per_second: float
    to_device_bytes_per_second: float
    both_bytes_per_second: float = inf

    def __post_init__(self) -> None:
        for name in ("to_host_bytes_per_second", "to_device_bytes_per_second", "both_bytes_per_second"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, getattr(self, name), "give more than 0")

    def bytes_per_second(self, direction: Activity, *, is_two_way: bool) -> float:
        """The speed of the copy in that direction; `is_two_way`: there is one in the other direction, too."""
        out, back = self.to_host_bytes_per_second, self.to_device_bytes_per_second
        alone = out if direction is Activity.OFFLOAD else back
        return alone * min(1.0, self.both_bytes_per_second / (out + back)) if is_two_way else alone


@dataclass(frozen=True)
class Hardware:
    """A machine.

    Attributes:
        drive: shared by all ranks.
        link: of each rank, to its accelerator; None: there is none.
        cores: of all ranks together; fractions are possible.
        codecs: by kind and codec.
        contention: how much background work slows training down beyond the cores that it takes. Compute takes
            1 + contention * (share of all cores busy with background work) times as long. Reasons are shared memory
            and caches, the interpreter's lock, and threads that wait for an interrupted one. 0: none. Fitted to runs of
            a machine (see `fit`).
        cpu_seconds_per_record: of the store's threads, for each record each way.
        cpu_seconds_per_byte: of the store's threads, for each byte each way: checksum and system call.
        call_seconds_per_record: of the training thread, for each record that its call queues: bookkeeping, and
            handing over the interpreter's lock. Calls that move nothing are part of the workload's compute.
        memory_bytes_per_second: of host memory, for all that the ranks move. Each byte counts once for a copy from or
            to an accelerator, once for the drive, and once for the CPU work on it. If all of that together would be
            faster, all of it is slowed by one factor.
    """

    drive: Drive
    cores: float
    codecs: Sequence[CodecSpeed] = ()
    contention: float = 1.0
    cpu_seconds_per_record: float = 0.0
    cpu_seconds_per_byte: float = 0.0
    call_seconds_per_record: float = 0.0
    link: Link | None = None
    memory_bytes_per_second: float = inf

    def __post_init__(self) -> None:
        for name in ("cores", "memory_bytes_per_second"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, getattr(self, name), "give more than 0")
        for name in ("contention", "cpu_seconds_per_record", "cpu_seconds_per_byte", "call_seconds_per_record"):
            _check_not_negative(name, getattr(self, name))


class Sharing:
    """The `Rates` of a machine: how concurrent work shares it.

    Args:
        hardware: the machine.
        training_cores: cores that each rank's training keeps busy while it computes.
    """

    def __init__(self, hardware: Hardware, training_cores: float) -> None:
        self._hardware = hardware
        self._training_cores = training_cores

    def __call__(self, counts: Mapping[Hashable, int]) -> Mapping[Hashable, float]:
        num_writes, num_reads = counts.get(Activity.WRITE, 0), counts.get(Activity.READ, 0)
        depth = max(1, num_writes + num_reads)
        num_background = counts.get(Activity.CPU, 0)
        wanted_cores = counts.get(Activity.COMPUTE, 0) * self._training_cores + num_background
        crowding = max(1.0, wanted_cores / self._hardware.cores)
        background_share = num_background / crowding / self._hardware.cores
        moving = self._copying(counts) | {
            Activity.CPU: 1 / crowding,
            Activity.WRITE: speed_at(self._hardware.drive.writes, depth) / depth,
            Activity.READ: speed_at(self._hardware.drive.reads, depth) / depth,
        }
        return self._within_memory(moving, counts) | {
            Activity.COMPUTE: 1 / crowding / (1 + self._hardware.contention * background_share),
            Activity.KERNELS: 1.0,
        }

    def _within_memory(self, rates: dict[Hashable, float], counts: Mapping[Hashable, int]) -> dict[Hashable, float]:
        """The rates, slowed by one factor if they would move more than host memory can."""
        limit = self._hardware.memory_bytes_per_second
        if limit == inf:
            return rates
        transfers = {
            each: min(rate, limit / max(1, counts.get(each, 0))) for each, rate in rates.items() if each != Activity.CPU
        }
        wanted = sum(rate * counts.get(each, 0) for each, rate in transfers.items())
        if self._hardware.cpu_seconds_per_byte:
            wanted += rates[Activity.CPU] * counts.get(Activity.CPU, 0) / self._hardware.cpu_seconds_per_byte
        slower = min(1.0, limit / wanted) if wanted else 1.0
        return {each: rate * slower for each, rate in (rates | transfers).items()}

    def _copying(self, counts: Mapping[Hashable, int]) -> dict[Hashable, float]:
        link = self._hardware.link
        if link is None:
            return {}
        copying = [each for each in counts if isinstance(each, Copying)]
        num_ways = Counter(each.rank for each in copying)
        return {each: link.bytes_per_second(each.direction, is_two_way=num_ways[each.rank] == 2) for each in copying}


def speed_at(speeds: Sequence[DepthSpeed], depth: int) -> float:
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


def _check_not_negative(name: str, value: float) -> None:
    if not value >= 0:
        raise ConfigError(name, value, "give 0 or more")
