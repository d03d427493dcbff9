"""Jobs of the I/O pool that write or read one record each, from encoding to checksum, at any address and in constant
memory. They block.

O_DIRECT wants memory aligned to a block; torch's is aligned to 64 bytes. So the aligned interior of an unencoded record
is written as it lies, and the unaligned head and tail follow it in a side block::

    memory   ──┤head├───────────── interior ─────────────┤tail├──
    extent     ├───────────── interior ─────────────┤head tail 0…├     rounded up to 4096

A destination whose address gives the same head is read into in the same way; any other through a bounce buffer."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import xxhash

from .allocator import ALIGNMENT_BYTES, round_up
from .codec.choice import Sample, WriteOrder
from .codec.codec import ENCODED_BLOCK_BYTES, NO_CODEC, BlockDecoder, Codec, blocks_of, encode_block
from .codec.family import DamagedBytesError
from .codec.probing import probe
from .linux import address_of, copy_memory, populate
from .location import FileRange, Location, Written, encoded_seed, record_checksum
from .scratch import Scratch, ScratchPool
from .tier import Loaded
from .transfer import read_all, write_all

_POPULATED_BYTES = 2**20  # pages of shorter destinations come as fast by themselves as by asking the kernel
_CARRY_BYTES = round_up(ENCODED_BLOCK_BYTES)  # room in front of a read for the start of a block that the last read cut


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
            head_bytes = write_raw(place, source, scratch)
            write_seconds = time.perf_counter() - started
    cpu_seconds, value = time.thread_time() - cpu_started, source if place is None else None
    return Written(NO_CODEC, len(source), head_bytes, checksum, value, cpu_seconds, write_seconds, samples)


def read_record(
    place: FileRange, location: Location, seed: int | None, destination: memoryview, pool: ScratchPool
) -> Loaded:
    """Read, verify and decode one record into `destination`: writable uint8, of the record's own length.

    `location`, its entry, may be damaged. `seed`: of its checksum; None: this store takes none. DamagedBytesError: not
    the bytes that were written under this seed. OSError: the device failed; the record is still there. In both cases
    `destination` holds garbage."""
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
        read_raw(place, destination, location.head_bytes, scratch)
        read_seconds = time.perf_counter() - started
    os.sched_yield()  # lets the next job read meanwhile, even if it waits for this thread's core
    verify(location, seed, _checksum(destination, seed))
    return Loaded(place.num_bytes, read_seconds, time.thread_time() - cpu_started)


def decode_small_value(
    location: Location, seed: int | None, destination: memoryview, pool: ScratchPool, value: memoryview
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


class _Writer:
    """Collects encoded blocks in the scratch's chunk, and writes them to `place` as it fills; None: to `value`.
    `hasher` takes in what is written; None: there is no checksum."""

    def __init__(self, place: FileRange | None, scratch: Scratch, hasher: xxhash.xxh3_64 | None) -> None:
        self._place = place
        self._chunk = scratch.chunk
        self._hasher = hasher
        self._filled_bytes = 0
        self._flushed_bytes = 0
        self.write_seconds = 0.0
        self.value = bytearray()

    @property
    def encoded_bytes(self) -> int:
        return self._flushed_bytes + self._filled_bytes

    def room(self) -> memoryview:
        if len(self._chunk) - self._filled_bytes < ENCODED_BLOCK_BYTES:
            whole = self._filled_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            self._flush(whole)
            rest = self._filled_bytes - whole
            self._chunk[:rest] = self._chunk[whole : self._filled_bytes]
            self._filled_bytes = rest
        return self._chunk[self._filled_bytes :]

    def take(self, num_bytes: int) -> None:
        """Count the bytes that were put at the front of `room()`."""
        block = self._chunk[self._filled_bytes : self._filled_bytes + num_bytes]
        if self._hasher is not None:
            self._hasher.update(block)
        self._filled_bytes += num_bytes

    def finish(self) -> None:
        self._flush(self._filled_bytes if self._place is None else round_up(self._filled_bytes))

    def _flush(self, num_bytes: int) -> None:
        piece = self._chunk[:num_bytes]
        if self._place is None:
            self.value += piece
        else:
            start = time.perf_counter()
            write_all(self._place.descriptor, [piece], self._place.offset + self._flushed_bytes)
            self.write_seconds += time.perf_counter() - start
        self._flushed_bytes += num_bytes


def write_encoded(place: FileRange | None, source: memoryview, order: WriteOrder, scratch: Scratch) -> Written | None:
    """Encode, checksum and write a record; without a place, its bytes are the `value`. None, as early as possible, if
    it does not shrink enough: nothing that counts was written then. `Written` has no CPU seconds yet."""
    seed = encoded_seed(order.seed, order.codec.family, order.itemsize_bytes, len(source))
    hasher = None if seed is None else xxhash.xxh3_64(seed=seed)
    writer = _Writer(place, scratch, hasher)
    done = 0
    for block in blocks_of(source):
        writer.take(encode_block(block, writer.room(), order.codec, order.itemsize_bytes, scratch.workspace))
        done += len(block)
        if writer.encoded_bytes > order.worst_ratio * done:
            return None
    encoded_bytes = writer.encoded_bytes
    writer.finish()
    checksum = None if hasher is None else hasher.intdigest()
    value = memoryview(writer.value) if place is None else None
    return Written(order.codec, encoded_bytes, 0, checksum, value, 0.0, writer.write_seconds, ())


def decode_value(value: memoryview, decoder: BlockDecoder) -> None:
    """Decode what `write_encoded` made. DamagedBytesError: these are not its bytes; the destination holds garbage."""
    used = decoder.feed(value)
    if not decoder.is_complete or used != len(value):
        raise DamagedBytesError("a whole record", f"{used} of {len(value)} bytes made sense")


def read_encoded(
    place: FileRange, encoded_bytes: int, decoder: BlockDecoder, hasher: xxhash.xxh3_64 | None, scratch: Scratch
) -> float:
    """Read, checksum and decode a record chunk by chunk; returns the seconds spent in the device. `hasher` takes every
    encoded byte in order. Raises as `read_record`."""
    chunk, carried_bytes, done, seconds = scratch.chunk, 0, 0, 0.0
    while done < encoded_bytes:
        wanted = min(encoded_bytes - done, len(chunk) - _CARRY_BYTES)
        start = time.perf_counter()
        read_bytes = min(round_up(wanted, place.alignment_bytes), len(chunk) - _CARRY_BYTES)
        read_all(place.descriptor, [chunk[_CARRY_BYTES : _CARRY_BYTES + read_bytes]], place.offset + done)
        seconds += time.perf_counter() - start
        if hasher is not None:
            hasher.update(chunk[_CARRY_BYTES : _CARRY_BYTES + wanted])
        pending = chunk[_CARRY_BYTES - carried_bytes : _CARRY_BYTES + wanted]
        rest = pending[decoder.feed(pending) :]
        carried_bytes = len(rest)
        copy_memory(chunk[_CARRY_BYTES - carried_bytes : _CARRY_BYTES], rest)
        done += wanted
    if not decoder.is_complete or carried_bytes:
        raise DamagedBytesError("a whole record", f"a record cut short, {carried_bytes} bytes left over")
    return seconds


class RawLayout(NamedTuple):
    """The lengths of a record's parts."""

    head_bytes: int
    interior_bytes: int
    tail_bytes: int


def lay_out(address: int, num_bytes: int, alignment_bytes: int) -> RawLayout:
    """Cut memory at `address` so that its interior is aligned."""
    return split_at(-address % alignment_bytes, num_bytes, alignment_bytes)


def split_at(head_bytes: int, num_bytes: int, alignment_bytes: int) -> RawLayout:
    """Cut a record whose head is given. Without an aligned interior everything is tail, and the head is 0."""
    interior = (num_bytes - head_bytes) // alignment_bytes * alignment_bytes
    if interior <= 0:
        return RawLayout(0, 0, num_bytes)
    return RawLayout(head_bytes, interior, num_bytes - head_bytes - interior)


def write_raw(place: FileRange, source: memoryview, scratch: Scratch) -> int:
    """Write a record (uint8, shape [n], any address) into its extent of n rounded up to 4096; returns its head's
    length. On OSError the caller still owns the bytes."""
    layout = lay_out(address_of(source), len(source), place.alignment_bytes)
    head, interior, tail, side = _cut(source, layout, place.alignment_bytes, scratch)
    side[: len(head)] = head
    side[len(head) : len(head) + len(tail)] = tail
    write_all(place.descriptor, [interior, side], place.offset)
    return layout.head_bytes


def read_raw(place: FileRange, destination: memoryview, head_bytes: int, scratch: Scratch) -> None:
    """Read a record that `write_raw` wrote with this head. OSError: it is still there; `destination` holds garbage."""
    layout = split_at(head_bytes, len(destination), place.alignment_bytes)
    head, interior, tail, side = _cut(destination, layout, place.alignment_bytes, scratch)
    if not interior or address_of(interior) % place.alignment_bytes == 0:
        read_all(place.descriptor, [interior, side], place.offset)
    else:
        _read_through(place, interior, scratch)
        read_all(place.descriptor, [side], place.offset + len(interior))
    head[:] = side[: len(head)]
    tail[:] = side[len(head) : len(head) + len(tail)]


def _cut(memory: memoryview, layout: RawLayout, alignment_bytes: int, scratch: Scratch) -> tuple[memoryview, ...]:
    """Head, interior, tail, and room for head and tail, padded so that a write ends on a block: ext4 is slow else."""
    begin, end = layout.head_bytes, layout.head_bytes + layout.interior_bytes
    side_bytes = 0 if alignment_bytes == 1 else round_up(len(memory)) - layout.interior_bytes
    return memory[:begin], memory[begin:end], memory[end:], scratch.side[:side_bytes]


def _read_through(place: FileRange, interior: memoryview, scratch: Scratch) -> None:
    done = 0
    while done < len(interior):
        piece = scratch.chunk[: len(interior) - done]
        read_all(place.descriptor, [piece], place.offset + done)
        copy_memory(interior[done : done + len(piece)], piece)
        done += len(piece)
