"""Encodes and decodes records block by block, in constant memory and without any I/O.

An encoded record is a sequence of blocks of up to `BLOCK_BYTES`, independent of each other: a header, u32 little-endian
(bit 31: stored as it is; bits 0-30: length of the payload), and the payload, as its family makes it. So it can be
decoded straight into its destination from chunks of any size, and the encoder can stop at any block."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ...errors import ConfigError, ConfigTypeError
from . import family
from .family import BLOCK_BYTES, FAMILIES, CodecSetting, DamagedBytesError, Workspace

_HEADER_BYTES = 4
_STORED_AS_IS = 1 << 31
ENCODED_BLOCK_BYTES = _HEADER_BYTES + BLOCK_BYTES
"""The most that one encoded block can take."""

_DEFAULT_LEVEL = 1
_NAMED = {each.name: each.levels for each in FAMILIES.values() if each.levels is not None}
_CODEC = re.compile(rf"({'|'.join(_NAMED)})(?::(-?\d{{1,6}}))?", re.ASCII)


def _allowed() -> str:
    forms = ((each, f"{each}:LEVEL") if levels else (each,) for each, levels in _NAMED.items())
    names = ["auto", "none", *(name for form in forms for name in form)]
    texts, levels = [f'"{name}"' for name in names], max(_NAMED.values(), key=len)
    return f"give {', '.join(texts[:-1])} or {texts[-1]}; a level is from {levels[0]} to {levels[-1]}, not 0"


class Codec(NamedTuple):
    """How bytes are encoded: "none", or the name of one of `FAMILIES`, and its level; 0: it has none."""

    family: str
    level: int = 0

    def __str__(self) -> str:
        return f"{self.family}:{self.level}" if self.level else self.family


NO_CODEC = Codec("none")
BITS = Codec(family.BITS.name)
CONSTANT = Codec(family.CONSTANT.name)
FLOATS = Codec(family.FLOATS.name)


def parse_codec(text: str) -> Codec | None:
    """Read the `codec` option; None means "auto". ConfigError: it is no codec."""
    if text == "auto":
        return None
    if text == "none":
        return NO_CODEC
    if isinstance(text, str) and (match := _CODEC.fullmatch(text)):
        levels = _NAMED[match[1]]
        if not levels and not match[2]:
            return Codec(match[1])
        level = int(match[2]) if match[2] else _DEFAULT_LEVEL
        if level in levels and level != 0:  # zstd's 0 means 3: each level has one name here
            return Codec(match[1], level)
    raise (ConfigError if isinstance(text, str) else ConfigTypeError)("codec", text, _allowed())


def blocks_of(source: memoryview) -> Iterator[memoryview]:
    """Cut a record: uint8, shape [BLOCK_BYTES], the last one shorter."""
    for start in range(0, len(source), BLOCK_BYTES):
        yield source[start : start + BLOCK_BYTES]


def encode_block(block: memoryview, out: memoryview, codec: Codec, itemsize_bytes: int, workspace: Workspace) -> int:
    """Encode one block (uint8, shape [n], n at most BLOCK_BYTES) to the front of `out` (writable uint8, at least
    ENCODED_BLOCK_BYTES long); returns the bytes used. `codec`: not "none"."""
    room = out[_HEADER_BYTES : _HEADER_BYTES + len(block)]
    setting = CodecSetting(codec.level, itemsize_bytes, workspace)
    length = FAMILIES[codec.family].encode(block, room, setting) or len(block)
    header = length
    if length == len(block):  # not encoded, or the frame fills the room: it is cut, or as long as the block
        room[:] = block
        header |= _STORED_AS_IS
    out[:_HEADER_BYTES] = header.to_bytes(_HEADER_BYTES, "little")
    return _HEADER_BYTES + length


class BlockDecoder:
    """Fills a destination, uint8, shape [n], n the record's length, from encoded bytes in pieces of any size."""

    def __init__(self, destination: memoryview, codec: Codec, itemsize_bytes: int, workspace: Workspace) -> None:
        self._destination = destination
        self._decode_block = FAMILIES[codec.family].decode
        self._setting = CodecSetting(codec.level, itemsize_bytes, workspace)
        self._filled_bytes = 0

    @property
    def is_complete(self) -> bool:
        return self._filled_bytes == len(self._destination)

    def feed(self, encoded: memoryview) -> int:
        """Decode all blocks that lie whole in `encoded`; returns the bytes used. The rest is the start of a block.
        DamagedBytesError: these are no blocks of this record; the destination holds garbage."""
        used = 0
        while len(encoded) - used >= _HEADER_BYTES:
            header = int.from_bytes(encoded[used : used + _HEADER_BYTES], "little")
            length = header & ~_STORED_AS_IS
            block = self._destination[self._filled_bytes : self._filled_bytes + BLOCK_BYTES]
            is_as_is = header != length
            if not 0 < length <= len(block) or (is_as_is and length < len(block)):
                lengths = f"{len(block)}" if is_as_is else f"1 to {len(block)}"
                raise DamagedBytesError(f"a block of {lengths} bytes", f"one of {length} bytes")
            payload = encoded[used + _HEADER_BYTES : used + _HEADER_BYTES + length]
            if len(payload) < length:
                break
            if is_as_is:
                block[:] = payload
            else:
                self._decode_block(payload, block, self._setting)
            self._filled_bytes += len(block)
            used += _HEADER_BYTES + length
        return used
