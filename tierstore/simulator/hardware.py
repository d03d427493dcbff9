"""A simulated machine, made from what `tierstore doctor --hardware` writes, and how concurrent work shares it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from ..hardware import AcceleratorLink, CodecSpeed, Transfer
from ..hardware import Hardware as DescribedHardware

CALL_SECONDS_PER_RECORD = 0.3e-3
"""Of a training thread; see `Hardware`. Traces of two models show so much, without waits, more than in a step in which
nothing moves."""
_CPU_SECONDS_PER_RECORD = 0.5e-3
"""`docs/project/internals/measurements.md` gives 0.4 ms for a record each way."""


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


@dataclass(frozen=True)
class Drive:
    """The disk tier's device. `writes`, `reads`: bytes per second of all transfers together, by how many are in flight.

    If reads and writes are in flight at once, each transfer gets the same share of the drive's time, and in that share
    moves at the speed of its direction at that depth. A latency passes before the bytes of a transfer flow.
    """

    writes: Mapping[int, float]
    reads: Mapping[int, float]
    write_latency_seconds: float = 0.0
    read_latency_seconds: float = 0.0
    capacity_bytes: int = 2**63 - 1


@dataclass(frozen=True)
class Hardware:
    """A machine.

    Attributes:
        drive: shared by all ranks.
        cores: of all ranks together; fractions are possible.
        codecs: by kind of content (as `Saved.kind`; "": every kind without figures of its own) and codec.
        cpu_seconds_per_record, cpu_seconds_per_byte: of the store's threads, each way.
        call_seconds_per_record: of the training thread, for each record that its call queues: bookkeeping, and
            handing over the interpreter's lock. Calls that move nothing are part of the workload's compute.
        link: of each rank, to its accelerator; None: there is none. Neither direction slows the other.
    """

    drive: Drive
    cores: float
    codecs: Mapping[tuple[str, str], CodecSpeed] = field(default_factory=dict)
    cpu_seconds_per_record: float = 0.0
    cpu_seconds_per_byte: float = 0.0
    call_seconds_per_record: float = 0.0
    link: AcceleratorLink | None = None

    def rates(self, training_cores: float, counts: Mapping[Hashable, int]) -> Mapping[Hashable, float]:
        """The `Rates` of the machine. `training_cores`: that each rank keeps busy while it computes."""
        depth = max(1, counts.get(Activity.WRITE, 0) + counts.get(Activity.READ, 0))
        wanted_cores = counts.get(Activity.COMPUTE, 0) * training_cores + counts.get(Activity.CPU, 0)
        core_share = 1 / max(1.0, wanted_cores / self.cores)
        rates: dict[Hashable, float] = {
            Activity.CPU: core_share,
            Activity.COMPUTE: core_share,
            Activity.KERNELS: 1.0,
            Activity.WRITE: _speed_at(self.drive.writes, depth) / depth,
            Activity.READ: _speed_at(self.drive.reads, depth) / depth,
        }
        if self.link is not None:
            rates[Activity.OFFLOAD] = self.link.to_host_bytes_per_second
            rates[Activity.RELOAD] = self.link.to_device_bytes_per_second
        return rates


def _speed_at(speeds: Mapping[int, float], depth: int) -> float:
    """Interpolated; outside the given depths, as at the nearest."""
    below = max((each for each in speeds if each <= depth), default=min(speeds))
    above = min((each for each in speeds if each >= depth), default=max(speeds))
    if below >= above:
        return speeds[below]
    return speeds[below] + (depth - below) / (above - below) * (speeds[above] - speeds[below])


def hardware_of(described: DescribedHardware, *, kinds: Mapping[str, str] | None = None) -> Hardware:
    """The machine of a description; see `read_hardware`.

    For each direction the speeds of the largest blocks are taken, since records are large. Checksum and system call are
    taken to cost as much as a copy of the bytes, an upper bound: a file says nothing more exact. If there are several
    accelerators, each rank has one like the first. `kinds`: for each kind of content in a workload, the sample data
    that stands for it; None: the first data of each codec stands for every kind.
    """
    drive = described.drive
    codecs: dict[tuple[str, str], CodecSpeed] = {}
    for speed in described.codecs:
        for kind in [""] if kinds is None else [kind for kind, data in kinds.items() if data == speed.data]:
            codecs.setdefault((kind, speed.codec), speed)
    return Hardware(
        Drive(
            _largest_blocks(drive.writes),
            _largest_blocks(drive.reads),
            drive.write_latency_seconds,
            drive.read_latency_seconds,
            drive.capacity_bytes,
        ),
        described.host.cores,
        codecs,
        cpu_seconds_per_record=_CPU_SECONDS_PER_RECORD,
        cpu_seconds_per_byte=1 / described.host.copy_bytes_per_second,
        call_seconds_per_record=CALL_SECONDS_PER_RECORD,
        link=next(iter(described.accelerators), None),
    )


def _largest_blocks(transfers: Iterable[Transfer]) -> dict[int, float]:
    by_size = sorted(transfers, key=lambda transfer: transfer.block_bytes)
    return {transfer.depth: transfer.bytes_per_second for transfer in by_size}
