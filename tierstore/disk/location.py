"""Plain values: where a record lies, the checksum that shows that it is the right one, the orders for the jobs that
write and read it, and their reports."""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec
import xxhash

from .codec.choice import Sample
from .codec.codec import Codec


class Location(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Everything that is needed to read a record. Kept in memory for every live record, and in the index.

    Attributes:
        segment: the segment file's number; None: the bytes are a value in the index.
        offset: in the segment, or in the index's own file; None: the value is small and read through the index.
        taken_bytes, encoded_bytes, logical_bytes: on disk, padding included; those written for the record; its length.
        head_bytes: of an unencoded record in a segment, how many bytes precede the aligned interior (they and the
            unaligned tail lie behind it).
        checksum: xxh3-64 over the encoded bytes, seeded by `record_seed`, and `encoded_seed` if they are encoded; None:
            none was asked for.
    """

    segment: int | None
    offset: int | None
    taken_bytes: int
    encoded_bytes: int
    logical_bytes: int
    codec: str
    level: int
    itemsize_bytes: int
    head_bytes: int
    checksum: int | None


def record_seed(session: int, key: int) -> int:
    """The seed of a record's checksum: a sound record under the wrong key or session is refused too."""
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", session, key))


def encoded_seed(seed: int, codec: str, itemsize_bytes: int, logical_bytes: int) -> int:
    """The seed of an encoded record's checksum: bytes that would be decoded in another way are refused too."""
    return xxhash.xxh3_64_intdigest(struct.pack("<QQQ", seed, itemsize_bytes, logical_bytes) + codec.encode())


def record_checksum(record: memoryview, seed: int) -> int:
    """The checksum of a whole record as it is on disk. Releases the interpreter's lock (xxhash does from 4.0 on)."""
    return xxhash.xxh3_64_intdigest(record, seed)


def record_hasher(seed: int) -> xxhash.xxh3_64:
    """The same checksum for a record that comes in pieces."""
    return xxhash.xxh3_64(seed=seed)


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
