"""The jobs of the I/O pool, which write or read one record each, from encoding to checksum. They block."""

from __future__ import annotations

import os
import time

import xxhash

from .codec.choice import Sample, WriteOrder
from .codec.codec import NO_CODEC, BlockDecoder, Codec
from .codec.family import DamagedBytesError
from .codec.probing import probe
from .encoded_records import decode_value, read_encoded, write_encoded
from .linux import copy_memory, populate
from .location import FileRange, Location, Written, encoded_seed, record_checksum
from .raw_records import read_raw, write_raw
from .scratch import Scratch, ScratchPool
from .tier import Loaded

_POPULATED_BYTES = 2**20  # pages of shorter destinations come as fast by themselves as by asking the kernel


def write_record(place: FileRange | None, source: memoryview, order: WriteOrder, pool: ScratchPool) -> Written:
    """Encode, checksum and write one record (uint8, shape [n]), for which there is room. Without a place, which is for
    values of the index, nothing is written: its bytes are the `value`. `pool` lends the working memory, and the turn at
    the device. OSError: the device failed; nothing that counts was written."""
    samples: tuple[Sample, ...] = ()
    cpu_started = time.thread_time()
    if order.codec != NO_CODEC or order.probe:
        with pool.lend() as scratch:
            samples = probe(source, order.itemsize_bytes, scratch) if order.probe else ()
            started, cpu_started = time.perf_counter(), time.thread_time()
            written = None if order.codec == NO_CODEC else write_encoded(place, source, order, scratch)
            if written is not None:
                cpu_seconds = time.thread_time() - cpu_started
                lane_seconds = None if place is None else time.perf_counter() - started
                return written._replace(cpu_seconds=cpu_seconds, samples=samples, lane_seconds=lane_seconds)
    checksum = _checksum(source, order.seed)
    head_bytes, write_seconds = 0, 0.0
    if place is not None:
        with pool.lend() as scratch, pool.timed(len(source)):
            started = time.perf_counter()
            head_bytes = write_raw(place.descriptor, place.offset, source, place.alignment_bytes, scratch)
            write_seconds = time.perf_counter() - started
    cpu_seconds, value = time.thread_time() - cpu_started, source if place is None else None
    return Written(NO_CODEC, len(source), head_bytes, checksum, value, cpu_seconds, write_seconds, samples)


def read_record(
    place: FileRange, location: Location, seed: int | None, destination: memoryview, pool: ScratchPool
) -> Loaded:
    """Read, verify and decode one record into `destination`: writable uint8, of the record's own length.

    `location`, its entry, may be damaged. `seed`: of its checksum; None: this store takes none. DamagedBytesError: not
    the bytes that were written under this seed. OSError: the device failed; the record is still there. In both cases
    `destination` holds garbage.
    """
    check_head(location, place)
    cpu_started = time.thread_time()
    if location.codec != NO_CODEC.family:
        with pool.lend() as scratch:
            seed = encoded_seed(seed, location.codec, location.itemsize_bytes, location.logical_bytes)
            hasher = None if seed is None else xxhash.xxh3_64(seed=seed)
            decoder = _decoder_of(location, destination, scratch)
            read_seconds = read_encoded(place, location.encoded_bytes, decoder, hasher, scratch)
        verify(location, seed, None if hasher is None else hasher.intdigest())
        return Loaded(place.num_bytes, read_seconds, time.thread_time() - cpu_started)
    if len(destination) >= _POPULATED_BYTES:
        populate(destination)  # before the turn, so that page faults take no time at the device
    with pool.lend() as scratch, pool.timed(len(destination)):
        started = time.perf_counter()
        read_raw(place.descriptor, place.offset, destination, location.head_bytes, place.alignment_bytes, scratch)
        read_seconds = time.perf_counter() - started
    os.sched_yield()  # lets the next job read meanwhile, even if it waits for this thread's core
    verify(location, seed, _checksum(destination, seed))
    return Loaded(place.num_bytes, read_seconds, time.thread_time() - cpu_started)


def decode_small_value(
    value: memoryview, location: Location, seed: int | None, destination: memoryview, pool: ScratchPool
) -> None:
    """Verify and decode a value of the index; arguments and errors as `read_record`'s."""
    is_encoded = location.codec != NO_CODEC.family
    if len(value) != location.encoded_bytes or not (is_encoded or len(value) == len(destination)):
        expected = f"{location.encoded_bytes} bytes for a record of {len(destination)}"
        raise DamagedBytesError(expected, f"{len(value)} bytes")
    seed = encoded_seed(seed, location.codec, location.itemsize_bytes, location.logical_bytes)
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
