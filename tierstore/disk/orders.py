"""The orders that the disk tier gives to the jobs of its I/O pool, and the reports that come back. Plain values."""

from __future__ import annotations

from typing import NamedTuple

from .codec.choice import Sample
from .codec.codec import Codec


class FileRange(NamedTuple):
    """A range of an open file. If its descriptor is O_DIRECT, the offset is a multiple of 4096, and so is
    `alignment_bytes`, which it asks of memory; else that is 1."""

    descriptor: int
    offset: int
    num_bytes: int
    alignment_bytes: int


class WriteOrder(NamedTuple):
    """How to write a record. `codec`: how to encode it, as long as that shrinks it. `itemsize_bytes`: the byte planes'
    stride. `seed`: of the checksum; None: make none. `probe`: also try the candidates of "auto" on a sample.
    `worst_ratio`: the bytes are stored as they are if the ratio is above this."""

    codec: Codec
    itemsize_bytes: int
    seed: int | None
    probe: bool
    worst_ratio: float = 1.0


class Written(NamedTuple):
    """How a write went. `value`: the encoded bytes, where they were small enough for the index (nothing was written
    then). `cpu_seconds`: of this thread, without the probe. `write_seconds`: in the device. `lane_seconds`: of an
    encoded record, from its first byte to its last, waits for a core included; else None."""

    codec: Codec
    encoded_bytes: int
    head_bytes: int
    checksum: int | None
    value: bytes | memoryview | None
    cpu_seconds: float
    write_seconds: float
    samples: tuple[Sample, ...]
    lane_seconds: float | None = None


class ReadReport(NamedTuple):
    """How a read went: seconds spent in the device, and CPU seconds of this thread for everything."""

    read_seconds: float
    cpu_seconds: float
