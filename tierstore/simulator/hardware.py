"""A simulated machine, and how concurrent work shares it. `tuning/tune.py` makes one of the doctor's figures."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct

Rate = Annotated[float, Meta(gt=0)]
"""Bytes per second."""

CALL_SECONDS_PER_RECORD = 0.3e-3
"""Of a training thread; see `Hardware`. Traces of two models show so much, without waits, more than in a step in which
nothing moves."""
CPU_SECONDS_PER_RECORD = 0.5e-3
"""`docs/project/internals/measurements.md` gives 0.4 ms for a record each way."""


class Activity(Enum):
    """Kinds of work that take time. Work is in seconds of a training thread or a core, or in bytes to or from the
    drive."""

    COMPUTE = "compute"
    CPU = "cpu"
    WRITE = "write"
    READ = "read"


class CodecSpeed(Struct, frozen=True, kw_only=True):
    """Ratio (after over before) and speed, in unencoded bytes, of a codec on one kind of sample data, on one core."""

    data: str
    codec: str
    ratio: float
    encode_bytes_per_second: Rate
    decode_bytes_per_second: Rate


@dataclass(frozen=True)
class Drive:
    """The disk tier's device. `writes`, `reads`: bytes per second of all transfers together, by how many are in flight.

    If reads and writes are in flight at once, each transfer gets the same share of the drive's time, and in that share
    moves at the speed of its direction at that depth. A latency passes before the bytes of a transfer flow."""

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
    """

    drive: Drive
    cores: float
    codecs: Mapping[tuple[str, str], CodecSpeed] = field(default_factory=dict)
    cpu_seconds_per_record: float = 0.0
    cpu_seconds_per_byte: float = 0.0
    call_seconds_per_record: float = 0.0

    def rates(self, training_cores: float, counts: Mapping[Hashable, int]) -> Mapping[Hashable, float]:
        """The `Rates` of the machine. `training_cores`: that each rank keeps busy while it computes."""
        depth = max(1, counts.get(Activity.WRITE, 0) + counts.get(Activity.READ, 0))
        wanted_cores = counts.get(Activity.COMPUTE, 0) * training_cores + counts.get(Activity.CPU, 0)
        core_share = 1 / max(1.0, wanted_cores / self.cores)
        return {
            Activity.CPU: core_share,
            Activity.COMPUTE: core_share,
            Activity.WRITE: _speed_at(self.drive.writes, depth) / depth,
            Activity.READ: _speed_at(self.drive.reads, depth) / depth,
        }


def _speed_at(speeds: Mapping[int, float], depth: int) -> float:
    """Interpolated; outside the given depths, as at the nearest."""
    below = max((each for each in speeds if each <= depth), default=min(speeds))
    above = min((each for each in speeds if each >= depth), default=max(speeds))
    if below >= above:
        return speeds[below]
    return speeds[below] + (depth - below) / (above - below) * (speeds[above] - speeds[below])
