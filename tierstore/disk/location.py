"""Plain values: where a record lies, the checksum that shows that it is the right one, the orders for the jobs that
write and read it, and how a write went."""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec
import xxhash

from .codec.choice import Sample
from .codec.codec import NO_CODEC, Codec


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


def encoded_seed(seed: int | None, codec: str, itemsize_bytes: int, logical_bytes: int) -> int | None:
    """The seed of a record's checksum by its codec: bytes that would be decoded in another way are refused too."""
    if seed is None or codec == NO_CODEC.family:
        return seed
    return xxhash.xxh3_64_intdigest(struct.pack("<QQQ", seed, itemsize_bytes, logical_bytes) + codec.encode())


def record_checksum(record: memoryview, seed: int) -> int:
    """The checksum of a whole record as it is on disk. Releases the interpreter's lock (xxhash does from 4.0 on)."""
    return xxhash.xxh3_64_intdigest(record, seed)


class FileRange(NamedTuple):
    """A range of an open file. If its descriptor is O_DIRECT, the offset is a multiple of 4096, and so is
    `alignment_bytes`, which it asks of memory; else that is 1."""

    descriptor: int
    offset: int
    num_bytes: int
    alignment_bytes: int


class Written(NamedTuple):
    """How a write went. `value`: the bytes, if they are for the index, and nothing was written. `cpu_seconds`: of this
    thread, without the probe. `write_seconds`: in the device. `lane_seconds`: of an encoded record that was written,
    from its first byte to its last, waits for a core included; else None."""

    codec: Codec
    encoded_bytes: int
    head_bytes: int
    checksum: int | None
    value: memoryview | None
    cpu_seconds: float
    write_seconds: float
    samples: tuple[Sample, ...]
    lane_seconds: float | None = None
