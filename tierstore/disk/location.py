"""Where a record lies, and the checksum that shows that it is the right one."""

from __future__ import annotations

import struct

import msgspec
import xxhash


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
