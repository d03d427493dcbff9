"""What a family of codecs is: how one block is encoded, and decoded again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import zstandard

BLOCK_BYTES = 512 * 2**10


class DamagedBytesError(Exception):
    """Encoded bytes make no sense, or are not those that were written: both in words. Stays inside the package: the
    disk tier, which knows the record's key, raises `CorruptDataError` instead."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(expected, found)
        self.expected = expected
        self.found = found


class Workspace:
    """The working memory (`planes`: writable uint8, shape [BLOCK_BYTES]) and the compressors of encoding; for one
    thread at a time."""

    def __init__(self, planes: memoryview) -> None:
        self.planes = planes
        self._compressors: dict[int, zstandard.ZstdCompressor] = {}
        self._decompressor: zstandard.ZstdDecompressor | None = None

    def compressor(self, level: int) -> zstandard.ZstdCompressor:
        if level not in self._compressors:
            import zstandard

            self._compressors[level] = zstandard.ZstdCompressor(level=level, write_checksum=False)
        return self._compressors[level]

    def decompressor(self) -> zstandard.ZstdDecompressor:
        if self._decompressor is None:
            import zstandard

            # A damaged header may ask for gigabytes: no frame of ours is longer than a block.
            self._decompressor = zstandard.ZstdDecompressor(max_window_size=2 * BLOCK_BYTES)
        return self._decompressor


class CodecSetting(NamedTuple):
    """How the blocks of one record are encoded. `level`: 0: its family has none. `itemsize_bytes`: 1 or more."""

    level: int
    itemsize_bytes: int
    workspace: Workspace


class Family(NamedTuple):
    """A family of codecs. `name`: as in the `codec` option, in the index and on the wire.

    Attributes:
        levels: the levels that the option may name, except 0; None: only "auto" uses the family, which has no levels.
        encode: writes block, uint8 of shape [n], to the front of the room, of the same length, and returns the bytes
            used. n or more, or None: the block is stored as it is, and the room may hold anything.
        decode: undoes it: fills the block, uint8 of shape [n], from the payload, or raises `DamagedBytesError`.
    """

    name: str
    levels: range | None
    encode: Callable[[memoryview, memoryview, CodecSetting], int | None]
    decode: Callable[[memoryview, memoryview, CodecSetting], None]
