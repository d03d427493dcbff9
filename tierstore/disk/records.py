"""The jobs of the I/O pool, which write or read one record each, from encoding to checksum. They block."""

from __future__ import annotations

import os
import time

from .allocator import round_up
from .codec.choice import Sample
from .codec.codec import NO_CODEC, BlockDecoder, Codec
from .codec.family import DamagedBytesError
from .codec.probing import probe
from .encoded_records import ChunkWriter, decode_value, encode_record, encode_value, read_encoded
from .linux import copy_memory, populate
from .location import (
    FileRange,
    Location,
    ReadReport,
    WriteOrder,
    Written,
    encoded_seed,
    record_checksum,
    record_hasher,
)
from .raw_records import read_raw, write_raw
from .scratch import Scratch, ScratchPool

_POPULATED_BYTES = 2**20  # pages of shorter destinations come as fast by themselves as by asking the kernel


class DoesNotFitError(Exception):
    """The record, encoded, is longer than the extent that was found for it. Stays inside the package."""


def write_record(
    place: FileRange, source: memoryview, order: WriteOrder, value_limit_bytes: int, pool: ScratchPool
) -> Written:
    """Encode, checksum and write one record (uint8, shape [n]); or return its bytes, if it became small enough for the
    index (`value_limit_bytes`). `pool` lends the working memory, and the turn at the device.

    DoesNotFitError: the place is shorter than the record and encoding does not make up for it. OSError: the device
    failed. In both cases nothing that counts was written.
    """
    samples: tuple[Sample, ...] = ()
    cpu_started = time.thread_time()
    if order.codec != NO_CODEC or order.probe:
        with pool.lend() as scratch:
            samples = probe(source, order.itemsize_bytes, scratch) if order.probe else ()
            started, cpu_started = time.perf_counter(), time.thread_time()
            if order.codec != NO_CODEC:
                written = _write_encoded(place, source, order, value_limit_bytes, scratch)
                if written is not None:
                    cpu_seconds, lane_seconds = time.thread_time() - cpu_started, time.perf_counter() - started
                    return written._replace(cpu_seconds=cpu_seconds, samples=samples, lane_seconds=lane_seconds)
    if round_up(len(source)) > place.num_bytes:
        raise DoesNotFitError
    checksum = _checksum(source, order.seed)
    with pool.lend() as scratch, pool.timed(len(source)):
        started = time.perf_counter()
        head_bytes = write_raw(place.descriptor, place.offset, source, place.alignment_bytes, scratch)
        write_seconds = time.perf_counter() - started
    cpu_seconds = time.thread_time() - cpu_started
    return Written(NO_CODEC, len(source), head_bytes, checksum, None, cpu_seconds, write_seconds, samples)


def _write_encoded(
    place: FileRange, source: memoryview, order: WriteOrder, value_limit_bytes: int, scratch: Scratch
) -> Written | None:
    seed = _seed_of(order.codec.family, order.itemsize_bytes, len(source), order.seed)
    hasher = None if seed is None else record_hasher(seed)
    writer = ChunkWriter(place.descriptor, place.offset, scratch, hasher)
    if not encode_record(source, order, writer, place.num_bytes, scratch):
        return None
    encoded_bytes = writer.encoded_bytes
    value = writer.collected() if encoded_bytes <= value_limit_bytes else None
    if value is None:
        writer.finish()
    checksum = None if hasher is None else hasher.intdigest()
    return Written(order.codec, encoded_bytes, 0, checksum, value, 0.0, writer.write_seconds, ())


def make_value(source: memoryview, order: WriteOrder, pool: ScratchPool) -> Written:
    """Encode and checksum a record that goes into the index; returns its bytes. Touches no file."""
    value: bytes | None = None
    samples: tuple[Sample, ...] = ()
    cpu_started = time.thread_time()
    if order.codec != NO_CODEC or order.probe:
        with pool.lend() as scratch:
            samples = probe(source, order.itemsize_bytes, scratch) if order.probe else ()
            cpu_started = time.thread_time()
            if order.codec != NO_CODEC:
                value = encode_value(source, order, scratch)
    codec, kept = (NO_CODEC, source) if value is None else (order.codec, memoryview(value))
    seed = _seed_of(codec.family, order.itemsize_bytes, len(source), order.seed)
    checksum = _checksum(kept, seed)
    return Written(codec, len(kept), 0, checksum, kept, time.thread_time() - cpu_started, 0.0, samples)


def read_record(
    place: FileRange, location: Location, seed: int | None, destination: memoryview, pool: ScratchPool
) -> ReadReport:
    """Read, verify and decode one record into `destination`: writable uint8, of the record's own length.

    `location`, its entry, may be damaged. `seed`: of its checksum; None: this store takes none. DamagedBytesError: not
    the bytes that were written under this seed. OSError: the device failed; the record is still there. In both cases
    `destination` holds garbage.
    """
    check_head(location, place)
    cpu_started = time.thread_time()
    if location.codec != NO_CODEC.family:
        with pool.lend() as scratch:
            seed = _seed_of(location.codec, location.itemsize_bytes, location.logical_bytes, seed)
            hasher = None if seed is None else record_hasher(seed)
            decoder = _decoder_of(location, destination, scratch)
            read_seconds = read_encoded(place, location.encoded_bytes, decoder, hasher, scratch)
        verify(location, seed, None if hasher is None else hasher.intdigest())
        return ReadReport(read_seconds, time.thread_time() - cpu_started)
    if len(destination) >= _POPULATED_BYTES:
        populate(destination)  # before the turn, so that page faults take no time at the device
    with pool.lend() as scratch, pool.timed(len(destination)):
        started = time.perf_counter()
        read_raw(place.descriptor, place.offset, destination, location.head_bytes, place.alignment_bytes, scratch)
        read_seconds = time.perf_counter() - started
    os.sched_yield()  # lets the next job read meanwhile, even if it waits for this thread's core
    verify(location, seed, _checksum(destination, seed))
    return ReadReport(read_seconds, time.thread_time() - cpu_started)


def decode_small_value(
    value: memoryview, location: Location, seed: int | None, destination: memoryview, pool: ScratchPool
) -> None:
    """Verify and decode a value of the index; arguments and errors as `read_record`'s."""
    is_encoded = location.codec != NO_CODEC.family
    if len(value) != location.encoded_bytes or not (is_encoded or len(value) == len(destination)):
        expected = f"{location.encoded_bytes} bytes for a record of {len(destination)}"
        raise DamagedBytesError(expected, f"{len(value)} bytes")
    seed = _seed_of(location.codec, location.itemsize_bytes, location.logical_bytes, seed)
    verify(location, seed, _checksum(value, seed))
    if not is_encoded:
        copy_memory(destination, value)
        return
    with pool.lend() as scratch:
        decode_value(value, _decoder_of(location, destination, scratch))


def is_record(location: Location, seed: int, memory: memoryview) -> bool:
    """Whether the memory holds the record's bytes; see `DiskTier.confirms`."""
    if location.checksum is None or location.codec != NO_CODEC.family or len(memory) != location.logical_bytes:
        return False
    return _checksum(memory, seed) == location.checksum


def _decoder_of(location: Location, destination: memoryview, scratch: Scratch) -> BlockDecoder:
    codec = Codec(location.codec, location.level)
    return BlockDecoder(destination, codec, location.itemsize_bytes, scratch.workspace)


def _seed_of(family: str, itemsize_bytes: int, logical_bytes: int, seed: int | None) -> int | None:
    if seed is None or family == NO_CODEC.family:
        return seed
    return encoded_seed(seed, family, itemsize_bytes, logical_bytes)


def _checksum(view: memoryview, seed: int | None) -> int | None:
    return None if seed is None else record_checksum(view, seed)


def check_head(location: Location, place: FileRange) -> None:
    """Raises DamagedBytesError if the record's entry gives a head that no record at such a place has."""
    if location.head_bytes >= place.alignment_bytes:
        raise DamagedBytesError(f"a head of fewer than {place.alignment_bytes} bytes", f"{location.head_bytes}")


def verify(location: Location, seed: int | None, found: int | None) -> None:
    """Raises DamagedBytesError if the checksum that was found is not the record's. `seed` None: none was taken."""
    if seed is not None and found != location.checksum:
        expected = "no checksum" if location.checksum is None else f"checksum {location.checksum:016x}"
        raise DamagedBytesError(expected, f"{found or 0:016x}")
