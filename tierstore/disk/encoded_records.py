"""Writes and reads encoded records with their checksums, chunk by chunk in constant memory. Blocking jobs."""

from __future__ import annotations

import time

import xxhash

from .allocator import ALIGNMENT_BYTES, round_up
from .codec.choice import WriteOrder
from .codec.codec import ENCODED_BLOCK_BYTES, BlockDecoder, blocks_of, encode_block
from .codec.family import DamagedBytesError
from .linux import copy_memory
from .location import FileRange, Written, encoded_seed
from .scratch import Scratch
from .transfer import read_all, write_all

_CARRY_BYTES = round_up(ENCODED_BLOCK_BYTES)  # room in front of a read for the start of a block that the last read cut


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
