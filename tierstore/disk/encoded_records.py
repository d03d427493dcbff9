"""Writes and reads encoded records with their checksums, chunk by chunk in constant memory. Blocking jobs."""

from __future__ import annotations

import time

import xxhash

from .allocator import ALIGNMENT_BYTES, round_up
from .codec.codec import ENCODED_BLOCK_BYTES, BlockDecoder, blocks_of, encode_block, is_shrinking
from .codec.family import DamagedBytesError
from .linux import copy_memory
from .location import FileRange, WriteOrder
from .scratch import Scratch
from .transfer import read_all, write_all

_CARRY_BYTES = round_up(ENCODED_BLOCK_BYTES)  # room in front of a read for the start of a block that the last read cut


class ChunkWriter:
    """Collects encoded blocks in the scratch's chunk and writes them to an extent as it fills. Blocks: for jobs.
    `hasher` takes in what is written; None: there is no checksum."""

    def __init__(self, descriptor: int, offset: int, scratch: Scratch, hasher: xxhash.xxh3_64 | None) -> None:
        self._descriptor = descriptor
        self._offset = offset
        self._chunk = scratch.chunk
        self._hasher = hasher
        self._filled_bytes = 0
        self._flushed_bytes = 0
        self.write_seconds = 0.0

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

    def collected(self) -> bytes | None:
        """All bytes, if none had to be written yet; else None."""
        return None if self._flushed_bytes else bytes(self._chunk[: self._filled_bytes])

    def finish(self) -> None:
        self._flush(round_up(self._filled_bytes))

    def _flush(self, num_bytes: int) -> None:
        start = time.perf_counter()
        write_all(self._descriptor, [self._chunk[:num_bytes]], self._offset + self._flushed_bytes)
        self.write_seconds += time.perf_counter() - start
        self._flushed_bytes += num_bytes


def encode_record(
    source: memoryview, order: WriteOrder, writer: ChunkWriter, limit_bytes: int, scratch: Scratch
) -> bool:
    """Encode into `writer`; False, as early as possible, if it does not shrink enough or exceeds the limit."""
    done = 0
    for block in blocks_of(source):
        writer.take(encode_block(block, writer.room(), order.codec, order.itemsize_bytes, scratch.workspace))
        done += len(block)
        if not _is_worth_it(writer.encoded_bytes, done, order) or writer.encoded_bytes > limit_bytes:
            return False
    return True


def encode_value(source: memoryview, order: WriteOrder, scratch: Scratch) -> bytes | None:
    """The encoded record in one piece; None if encoding does not shrink it enough."""
    value = bytearray()
    done = 0
    for block in blocks_of(source):
        length = encode_block(block, scratch.chunk, order.codec, order.itemsize_bytes, scratch.workspace)
        value += scratch.chunk[:length]
        done += len(block)
        if not _is_worth_it(len(value), done, order):
            return None
    return bytes(value)


def _is_worth_it(encoded_bytes: int, raw_bytes: int, order: WriteOrder) -> bool:
    return is_shrinking(encoded_bytes, raw_bytes) and encoded_bytes <= order.worst_ratio * raw_bytes


def decode_value(value: memoryview, decoder: BlockDecoder) -> None:
    """Decode what `encode_value` made. DamagedBytesError: these are not its bytes; the destination holds garbage."""
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
