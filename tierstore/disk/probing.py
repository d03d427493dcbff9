"""What encoding would do to a record, tried on a sample of it. Blocks for about a millisecond."""

from __future__ import annotations

import time

from ..codec import ENCODED_BLOCK_BYTES, BlockDecoder, Codec, encode_block
from ..codec_choice import Sample, candidates
from .scratch import Scratch

__all__ = ["SAMPLE_BYTES", "probe"]

SAMPLE_BYTES = 256 * 2**10
_NUM_TRIES = 2  # the first one pays for the compressor's tables


def probe(source: memoryview, itemsize_bytes: int, scratch: Scratch) -> tuple[Sample, ...]:
    """Encode and decode the middle of a record with each candidate, and time it.

    Args:
        source: uint8, shape [n]; at most SAMPLE_BYTES of it are looked at.
        itemsize_bytes: the byte planes' stride.
        scratch: holds the encoded and the decoded sample.
    """
    start = max(0, len(source) - SAMPLE_BYTES) // 2 // itemsize_bytes * itemsize_bytes
    sample = source[start : start + SAMPLE_BYTES]
    return tuple(_try(sample, codec, itemsize_bytes, scratch) for codec in candidates(itemsize_bytes))


def _try(sample: memoryview, codec: Codec, itemsize_bytes: int, scratch: Scratch) -> Sample:
    decoded = scratch.chunk[ENCODED_BLOCK_BYTES : ENCODED_BLOCK_BYTES + len(sample)]
    encode_seconds = decode_seconds = float("inf")
    length = 0
    for _ in range(_NUM_TRIES):
        started = time.perf_counter()
        length = encode_block(sample, scratch.chunk, codec, itemsize_bytes, scratch.workspace)
        encoded = time.perf_counter()
        BlockDecoder(decoded, codec, itemsize_bytes, scratch.workspace).feed(scratch.chunk[:length])
        encode_seconds = min(encode_seconds, encoded - started)
        decode_seconds = min(decode_seconds, time.perf_counter() - encoded)
    return Sample(codec, len(sample), length, encode_seconds, decode_seconds)
