"""Encodes and decodes records block by block, in constant memory and without any I/O.

An encoded record is a sequence of blocks. Each holds up to `BLOCK_BYTES` of the record, independent of the
others::

    ┌──────────────────────────────┬──────────────────────┐
    │ u32 little-endian            │ payload              │
    │ bit 31: stored as it is      │ a zstd frame (of the │
    │ bits 0-30: length of payload │ bytes or of their    │
    │                              │ byte planes), packed │
    │                              │ bits, a word that is │
    │                              │ repeated, or the     │
    │                              │ bytes themselves     │
    └──────────────────────────────┴──────────────────────┘

Because blocks are independent, a record can be decoded straight into its destination from chunks of any size, and the
encoder can stop at any block. This costs zstd nothing at level 1, whose window is one block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ...errors import ConfigError, ConfigTypeError
from .bits import pack_bits, packed_bytes, unpack_bits
from .byte_planes import join_planes, split_planes
from .constant import WORD_BYTES, fill_with, word_of

if TYPE_CHECKING:
    import zstandard

__all__ = [
    "BITS",
    "BLOCK_BYTES",
    "CONSTANT",
    "ENCODED_BLOCK_BYTES",
    "NO_CODEC",
    "BlockDecoder",
    "Codec",
    "DamagedBytesError",
    "Workspace",
    "blocks_of",
    "encode_block",
    "is_shrinking",
    "parse_codec",
]

BLOCK_BYTES = 512 * 2**10
_HEADER_BYTES = 4
_STORED_AS_IS = 1 << 31
ENCODED_BLOCK_BYTES = _HEADER_BYTES + BLOCK_BYTES
"""The most that one encoded block can take."""

_DEFAULT_LEVEL = 1
_LEVELS = range(-(2**17), 23)  # ZSTD_minCLevel() and ZSTD_maxCLevel()
_CODEC = re.compile(r"(zstd|shuffle-zstd)(?::(-?\d{1,6}))?", re.ASCII)
_ALLOWED = (
    'give "auto", "none", "zstd", "zstd:LEVEL", "shuffle-zstd" or "shuffle-zstd:LEVEL" '
    f"with a level from {_LEVELS[0]} to {_LEVELS[-1]}, not 0"
)


class DamagedBytesError(Exception):
    """Encoded bytes make no sense, or are not those that were written.

    Stays inside the package: the disk tier, which knows the record's key, raises `CorruptDataError` instead.

    Attributes:
        expected: the bytes that should have been there, in words.
        found: those that were there, in words.
    """

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(expected, found)
        self.expected = expected
        self.found = found


class Codec(NamedTuple):
    """How bytes are encoded.

    Attributes:
        family: "none", "zstd", "shuffle-zstd", or "bits" or "constant", which only "auto" uses.
        level: zstd's; 0 for the others.
    """

    family: str
    level: int = 0

    def __str__(self) -> str:
        return f"{self.family}:{self.level}" if self.level else self.family


NO_CODEC = Codec("none")
BITS = Codec("bits")
"""Stores bytes that are 0 or 1 as bits, and other blocks as they are."""
CONSTANT = Codec("constant")
"""Stores blocks that repeat one word as that word, and other blocks as they are."""


def parse_codec(text: str) -> Codec | None:
    """Read the `codec` option; None means "auto": chosen per kind of record.

    Raises:
        ConfigError: names what was given and what is allowed.
    """
    if text == "auto":
        return None
    if text == "none":
        return NO_CODEC
    if isinstance(text, str) and (match := _CODEC.fullmatch(text)):
        level = int(match[2]) if match[2] else _DEFAULT_LEVEL
        if level in _LEVELS and level != 0:  # zstd's 0 means 3: each level has one name here
            return Codec(match[1], level)
    raise (ConfigError if isinstance(text, str) else ConfigTypeError)("codec", text, _ALLOWED)


class Workspace:
    """The working memory and the compressors of encoding; for one thread at a time.

    Attributes:
        planes: writable uint8, shape [BLOCK_BYTES].
    """

    def __init__(self, planes: memoryview) -> None:
        self.planes = planes
        self._compressors: dict[int, zstandard.ZstdCompressor] = {}
        self._decompressor: zstandard.ZstdDecompressor | None = None

    def compressor(self, level: int) -> zstandard.ZstdCompressor:
        """The compressor of this level; made at its first use."""
        if level not in self._compressors:
            import zstandard

            self._compressors[level] = zstandard.ZstdCompressor(level=level, write_checksum=False)
        return self._compressors[level]

    def decompressor(self) -> zstandard.ZstdDecompressor:
        """The decompressor; made at its first use."""
        if self._decompressor is None:
            import zstandard

            # A damaged header may ask for gigabytes: no frame of ours is longer than a block.
            self._decompressor = zstandard.ZstdDecompressor(max_window_size=2 * BLOCK_BYTES)
        return self._decompressor


def is_shrinking(encoded_bytes: int, raw_bytes: int) -> bool:
    """Whether encoding is worth its cost: it must save a sixteenth."""
    return encoded_bytes * 16 < raw_bytes * 15


def blocks_of(source: memoryview) -> Iterator[memoryview]:
    """The record's blocks in order: uint8, shape [BLOCK_BYTES], the last one shorter."""
    for start in range(0, len(source), BLOCK_BYTES):
        yield source[start : start + BLOCK_BYTES]


def encode_block(block: memoryview, out: memoryview, codec: Codec, itemsize_bytes: int, workspace: Workspace) -> int:
    """Encode one block to the front of `out`; returns the bytes used.

    Args:
        block: uint8, shape [n], n at most BLOCK_BYTES.
        out: writable uint8, shape [m], m at least ENCODED_BLOCK_BYTES.
        codec: not "none".
        itemsize_bytes: the byte planes' stride.
        workspace: not used by anyone else meanwhile.
    """
    room = out[_HEADER_BYTES : _HEADER_BYTES + len(block)]
    if codec == BITS:
        length = pack_bits(block, room) or len(block)
    elif codec == CONSTANT:
        length = _keep_word(block, room) or len(block)
    else:
        length = _compress(block, room, codec, itemsize_bytes, workspace)
    header = length
    if length == len(block):  # not encoded, or the frame fills the room: it is cut, or as long as the block
        room[:] = block
        header |= _STORED_AS_IS
    out[:_HEADER_BYTES] = header.to_bytes(_HEADER_BYTES, "little")
    return _HEADER_BYTES + length


def _keep_word(block: memoryview, room: memoryview) -> int | None:
    word = word_of(block)
    if word is None:
        return None
    room[:WORD_BYTES] = word
    return WORD_BYTES


def _compress(block: memoryview, room: memoryview, codec: Codec, itemsize_bytes: int, workspace: Workspace) -> int:
    payload = block
    if codec.family == "shuffle-zstd":
        split_planes(block, workspace.planes, itemsize_bytes)
        payload = workspace.planes[: len(block)]
    return workspace.compressor(codec.level).stream_reader(payload, size=len(payload)).readinto(room)


class BlockDecoder:
    """Fills a destination from encoded bytes that come in pieces of any size.

    Args:
        destination: uint8, shape [n], writable, n the record's length before it was encoded.
        codec, itemsize_bytes: with which it was encoded.
        workspace: the job's.
    """

    def __init__(self, destination: memoryview, codec: Codec, itemsize_bytes: int, workspace: Workspace) -> None:
        self._destination = destination
        self._codec = codec
        self._itemsize_bytes = itemsize_bytes
        self._workspace = workspace
        self._filled_bytes = 0

    @property
    def is_complete(self) -> bool:
        """Whether the whole destination is filled."""
        return self._filled_bytes == len(self._destination)

    def feed(self, encoded: memoryview) -> int:
        """Decode all blocks that lie whole in `encoded`; returns the bytes used. The rest is the start of a block.

        Raises:
            DamagedBytesError: these are no blocks of this record; the destination holds garbage.
        """
        used = 0
        while len(encoded) - used >= _HEADER_BYTES:
            header = int.from_bytes(encoded[used : used + _HEADER_BYTES], "little")
            length = header & ~_STORED_AS_IS
            block = self._next_block(length)
            start = used + _HEADER_BYTES
            if start + length > len(encoded):
                break
            self._decode(encoded[start : start + length], block, as_is=bool(header & _STORED_AS_IS))
            self._filled_bytes += len(block)
            used = start + length
        return used

    def _next_block(self, length: int) -> memoryview:
        block = self._destination[self._filled_bytes : self._filled_bytes + BLOCK_BYTES]
        if not 0 < length <= len(block):
            raise DamagedBytesError(f"a block of 1 to {len(block)} bytes", f"one of {length} bytes")
        return block

    def _decode(self, payload: memoryview, block: memoryview, *, as_is: bool) -> None:
        if as_is:
            if len(payload) != len(block):
                raise DamagedBytesError(f"a block of {len(block)} bytes", f"one of {len(payload)} bytes")
            block[:] = payload
        elif self._codec == BITS:
            if len(payload) != packed_bytes(len(block)):
                raise DamagedBytesError(f"{len(block)} bits", f"{len(payload)} bytes")
            unpack_bits(payload, block)
        elif self._codec == CONSTANT:
            if len(payload) != WORD_BYTES:
                raise DamagedBytesError(f"a word of {WORD_BYTES} bytes", f"{len(payload)} bytes")
            fill_with(payload, block)
        elif self._codec.family == "shuffle-zstd":
            planes = self._workspace.planes[: len(block)]
            self._decompress(payload, planes)
            join_planes(planes, block, self._itemsize_bytes)
        else:
            self._decompress(payload, block)

    def _decompress(self, payload: memoryview, out: memoryview) -> None:
        import zstandard

        try:
            reader = self._workspace.decompressor().stream_reader(payload)
            length = reader.readinto(out)
            rest = len(reader.read(1))
        except zstandard.ZstdError as error:
            raise DamagedBytesError("a zstd frame", str(error)) from error
        if length != len(out) or rest:
            found = f"more than {length}" if rest else str(length)
            raise DamagedBytesError(f"{len(out)} bytes in a zstd frame", found)
