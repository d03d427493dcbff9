"""The families of codecs: how one block is encoded, and decoded again. numpy and zstandard are loaded where they are
used: the sidecar starts without them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ..linux import address_of
from . import floats

if TYPE_CHECKING:
    import zstandard

BLOCK_BYTES = 512 * 2**10
_WORD_BYTES = 8  # a multiple of every element's length except complex128's, which repeats only if its halves are equal
_LEVELS = range(-(2**17), 23)  # ZSTD_minCLevel() and ZSTD_maxCLevel()

_libc = ctypes.PyDLL(None)  # keeps the interpreter's lock: to get it back takes longer than a block
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


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
        levels: the levels that the option may name, except 0; empty: it has none, so the option names it alone;
            None: only "auto" uses the family, which has no levels.
        encode: writes block, uint8 of shape [n], to the front of the room, of the same length, and returns the bytes
            used. n or more, or None: the block is stored as it is, and the room may hold anything.
        decode: undoes it: fills the block, uint8 of shape [n], from the payload, or raises `DamagedBytesError`.
    """

    name: str
    levels: range | None
    encode: Callable[[memoryview, memoryview, CodecSetting], int | None]
    decode: Callable[[memoryview, memoryview, CodecSetting], None]


def _compress(block: memoryview, room: memoryview, setting: CodecSetting) -> int:
    """If the frame does not fit, it is cut, and fills the room."""
    return setting.workspace.compressor(setting.level).stream_reader(block, size=len(block)).readinto(room)


def _decompress(payload: memoryview, block: memoryview, setting: CodecSetting) -> None:
    import zstandard

    try:
        reader = setting.workspace.decompressor().stream_reader(payload)
        length = reader.readinto(block)
        rest = len(reader.read(1))
    except zstandard.ZstdError as error:
        raise DamagedBytesError("a zstd frame", str(error)) from error
    if length != len(block) or rest:
        found = f"more than {length}" if rest else str(length)
        raise DamagedBytesError(f"{len(block)} bytes in a zstd frame", found)


def _compress_planes(block: memoryview, room: memoryview, setting: CodecSetting) -> int:
    planes = setting.workspace.planes
    split_planes(block, planes, setting.itemsize_bytes)
    return _compress(planes[: len(block)], room, setting)


def _decompress_planes(payload: memoryview, block: memoryview, setting: CodecSetting) -> None:
    planes = setting.workspace.planes[: len(block)]
    _decompress(payload, planes, setting)
    join_planes(planes, block, setting.itemsize_bytes)


def split_planes(source: memoryview, destination: memoryview, itemsize_bytes: int) -> None:
    """Write the byte planes of `source` (uint8, shape [n]) to the first n bytes of `destination`; bytes after the last
    whole element stay at the end as they are. Plane by plane, numpy runs at 2.6-3 GB/s."""
    import numpy as np

    count = len(source) // itemsize_bytes
    elements = np.frombuffer(source, np.uint8, count * itemsize_bytes).reshape(count, itemsize_bytes)
    planes = np.frombuffer(destination, np.uint8, count * itemsize_bytes).reshape(itemsize_bytes, count)
    for index in range(itemsize_bytes):
        planes[index] = elements[:, index]
    destination[count * itemsize_bytes : len(source)] = source[count * itemsize_bytes :]


def join_planes(source: memoryview, destination: memoryview, itemsize_bytes: int) -> None:
    """Undo `split_planes`: fill `destination` (writable uint8, shape [n]) from the planes in `source`."""
    import numpy as np

    count = len(source) // itemsize_bytes
    planes = np.frombuffer(source, np.uint8, count * itemsize_bytes).reshape(itemsize_bytes, count)
    elements = np.frombuffer(destination, np.uint8, count * itemsize_bytes).reshape(count, itemsize_bytes)
    for index in range(itemsize_bytes):
        elements[:, index] = planes[index]
    destination[count * itemsize_bytes : len(source)] = source[count * itemsize_bytes :]


def _pack_bits(block: memoryview, room: memoryview, setting: CodecSetting) -> int | None:
    import numpy as np

    values = np.frombuffer(block, np.uint8)
    if values.max() > 1:  # a bool tensor may hold other bytes, if it is a view of other data
        return None
    packed = np.packbits(values)
    room[: len(packed)] = packed.data
    return len(packed)


def _unpack_bits(payload: memoryview, block: memoryview, setting: CodecSetting) -> None:
    import numpy as np

    if len(payload) != -(-len(block) // 8):
        raise DamagedBytesError(f"{len(block)} bits", f"{len(payload)} bytes")
    np.frombuffer(block, np.uint8)[:] = np.unpackbits(np.frombuffer(payload, np.uint8), count=len(block))


def _find_word(block: memoryview, room: memoryview, setting: CodecSetting) -> int | None:
    """In one call of C, some microseconds long."""
    if len(block) <= _WORD_BYTES:
        return None
    address = address_of(block)
    if _libc.memcmp(address, address + _WORD_BYTES, len(block) - _WORD_BYTES):
        return None
    room[:_WORD_BYTES] = block[:_WORD_BYTES]
    return _WORD_BYTES


def _repeat_word(payload: memoryview, block: memoryview, setting: CodecSetting) -> None:
    import numpy as np

    if len(payload) != _WORD_BYTES:
        raise DamagedBytesError(f"a word of {_WORD_BYTES} bytes", f"{len(payload)} bytes")
    rest_bytes = len(block) % _WORD_BYTES
    np.frombuffer(block[: len(block) - rest_bytes], np.uint64)[:] = np.frombuffer(payload, np.uint64)
    block[len(block) - rest_bytes :] = payload[:rest_bytes]


def _pack_floats(block: memoryview, room: memoryview, setting: CodecSetting) -> int | None:
    return floats.pack(block, room, setting.itemsize_bytes, setting.workspace.planes)


def _unpack_floats(payload: memoryview, block: memoryview, setting: CodecSetting) -> None:
    if not floats.unpack(payload, block, setting.itemsize_bytes, setting.workspace.planes):
        raise DamagedBytesError(f"{len(block)} bytes of packed floats", f"{len(payload)} bytes that are none")


ZSTD = Family("zstd", _LEVELS, _compress, _decompress)
SHUFFLE_ZSTD = Family("shuffle-zstd", _LEVELS, _compress_planes, _decompress_planes)
BITS = Family("bits", None, _pack_bits, _unpack_bits)
"""Masks: bytes that are 0 or 1 as bits, and other blocks as they are. Faster than any compressor (20 GB/s)."""
CONSTANT = Family("constant", None, _find_word, _repeat_word)
"""Blocks of one value (zeros, ones, a fill): the first eight bytes stand for all. As fast as memory is."""
FLOATS = Family("floats", range(0), _pack_floats, _unpack_floats)
"""bfloat16 and float32, by their exponents: `floats.py`. With `tierstore-native`, at half the speed of memory."""

FAMILIES = {family.name: family for family in (ZSTD, SHUFFLE_ZSTD, BITS, CONSTANT, FLOATS)}
"""The families by name. A new one is named here; its name is that in the `codec` option, in the index, on the wire."""
