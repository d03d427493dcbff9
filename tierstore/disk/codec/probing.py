"""Looks at a record's bytes before it is written (microseconds), or tries each codec on a sample of them (milliseconds
at most, and rare)."""

from __future__ import annotations

import time

from ..scratch import Scratch
from ..tier import Kind
from . import floats
from .choice import WORST_RATIO, Sample, candidates
from .codec import ENCODED_BLOCK_BYTES, FLOATS, BlockDecoder, Codec, encode_block

SAMPLE_BYTES = 256 * 2**10
_NUM_PIECES = 8  # of a sample, spread over the record
_LOOK_BYTES = 512  # of each piece
_MANY = 0.25  # of the elements
_NEGATIVE_ZERO = 0x80  # dropout makes these of negative numbers
_NUM_TRIES = 2  # the first one pays for the compressor's tables


def content_of(source: memoryview, kind: Kind) -> str:
    """Whether some of the elements of `source` (uint8, shape [n]) are "all zeros", "many zeros" (a quarter or more), or
    neither (""). Integers of several bytes are not looked at: their upper bytes tell nothing."""
    itemsize_bytes = max(1, kind.itemsize_bytes)
    if not source or ("int" in kind.dtype and itemsize_bytes > 1):
        return ""
    num_zeros = num_seen = 0
    for piece in _pieces(source, _LOOK_BYTES, itemsize_bytes):
        seen = piece[itemsize_bytes - 1 :: itemsize_bytes]  # sign and exponent of a float: 0 where it is 0, or nearly
        num_zeros += seen.count(0)
        if itemsize_bytes > 1:
            num_zeros += seen.count(_NEGATIVE_ZERO)
        num_seen += len(seen)
    if num_zeros < _MANY * num_seen or not num_seen:
        return ""
    return "all zeros" if num_zeros == num_seen else "many zeros"


def probe(source: memoryview, itemsize_bytes: int, scratch: Scratch) -> tuple[Sample, ...]:
    """Encode and decode SAMPLE_BYTES of a record (uint8, shape [n]), from all over it, with each candidate."""
    sample = memoryview(b"".join(_pieces(source, SAMPLE_BYTES // _NUM_PIECES, itemsize_bytes)))
    tried = [codec for codec in candidates(itemsize_bytes) if codec != FLOATS or floats.has_native()]
    return tuple(_try(sample, codec, itemsize_bytes, scratch) for codec in tried)


def _pieces(source: memoryview, num_bytes: int, itemsize_bytes: int) -> list[bytes]:
    """Copies of pieces of `num_bytes` from all over a record, each from an element's first byte on."""
    length = max(num_bytes // itemsize_bytes, 1) * itemsize_bytes
    last = max(0, len(source) - length) // itemsize_bytes
    starts = dict.fromkeys([index * last // (_NUM_PIECES - 1) * itemsize_bytes for index in range(_NUM_PIECES)])
    return [bytes(source[start : start + length]) for start in starts]


def _try(sample: memoryview, codec: Codec, itemsize_bytes: int, scratch: Scratch) -> Sample:
    decoded = scratch.chunk[ENCODED_BLOCK_BYTES : ENCODED_BLOCK_BYTES + len(sample)]
    encode_seconds = decode_seconds = float("inf")
    length = 0
    for _ in range(_NUM_TRIES):
        started = time.thread_time()
        length = encode_block(sample, scratch.chunk, codec, itemsize_bytes, scratch.workspace)
        encoded = time.thread_time()
        BlockDecoder(decoded, codec, itemsize_bytes, scratch.workspace).feed(scratch.chunk[:length])
        encode_seconds = min(encode_seconds, encoded - started)
        decode_seconds = min(decode_seconds, time.thread_time() - encoded)
        if length >= WORST_RATIO * len(sample):
            break  # it will not be used, so its time does not matter
    return Sample(codec, len(sample), length, encode_seconds, decode_seconds)
