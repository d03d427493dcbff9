"""What a family of codecs is: how one block is encoded, and decoded again. `families.py` imports all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import zstandard

__all__ = ["BLOCK_BYTES", "CodecSetting", "DamagedBytesError", "Family", "Workspace", "register", "registered"]

BLOCK_BYTES = 512 * 2**10


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


class CodecSetting(NamedTuple):
    """How the blocks of one record are encoded.

    Attributes:
        level: of the codec; 0: its family has no levels.
        itemsize_bytes: bytes of an element, 1 or more.
        workspace: not used by anyone else meanwhile.
    """

    level: int
    itemsize_bytes: int
    workspace: Workspace


class Family(NamedTuple):
    """A family of codecs.

    Attributes:
        name: as in the `codec` option, in the index and on the wire.
        levels: the levels that the option may name, except 0; None: only "auto" uses the family, which has no levels.
        encode: writes block, uint8 of shape [n], to the front of the room, of the same length, and returns the bytes
            used. n or more, or None: the block is stored as it is, and the room may hold anything.
        decode: undoes it: fills the block, uint8 of shape [n], from the payload. Raises `DamagedBytesError` if the
            payload is not what `encode` makes of n bytes.
    """

    name: str
    levels: range | None
    encode: Callable[[memoryview, memoryview, CodecSetting], int | None]
    decode: Callable[[memoryview, memoryview, CodecSetting], None]


registered: dict[str, Family] = {}
"""The families by name; read it through `families.py`, which makes sure that it is complete."""


def register(family: Family) -> Family:
    """Make a family known by its name: to the `codec` option if it has levels, to the index and to the wire."""
    registered[family.name] = family
    return family
