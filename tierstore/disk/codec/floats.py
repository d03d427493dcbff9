"""Packs blocks of bfloat16 or float32: the exponents of what a model saves lie close together, so a few bits tell them
apart. No entropy coder: every number takes as many bits as its neighbours, so the work is the same on all of them.

A packed block, of `count` elements, little-endian::

    header    8 bytes: u8 width of a code, 1 to 7; u8 base; u8 1 if zeros are left out, else 0; u8 0; u32 kept elements
    mask      count/8 bytes, only if zeros are left out: bit k of byte i says whether element 8i+k is kept
    signs     a byte for each kept element: its sign (bit 7), and the upper seven bits of its mantissa
    halves    the lower 16 bits of each kept element, only of float32
    codes     row by row: a row is 4096 kept elements; the last one is filled up to a multiple of 64 with code 1
    escapes   the exponents whose code is 0, a byte each, in order; then four bytes 0

An exponent's code is exponent - base, modulo 256, if that is 1 to 2^width - 1, else 0. Of a row of n codes, of width
4a + 2b + c, lie first a times the lowest 4 bits, then b times the next 2, then c times the next one; each in n/8 times
as many bytes as these are bits, of which byte i has the bits of codes i, i + n·bits/8, i + 2n·bits/8 ..., from its
lowest bit up. So neighbouring bytes come from neighbouring codes, in vectors of any width.

Width and base are chosen on a sample, and every bit pattern comes back whatever they are: what does not fit in is an
escape. Zeros are left out if an eighth of the elements are +0. The package `tierstore-native` does the same in C, ten
times as fast as numpy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

try:
    import tierstore_native
except ImportError:
    tierstore_native = None

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

SWITCH = "TIERSTORE_NATIVE"
FLOAT_BYTES = (2, 4)
"""The lengths of elements that are packed. A float16 gains a little: its exponent's bits are among the eight."""

_HEADER_BYTES = 8
_ROW = 4096
_GROUP = 64
_PADDING_BYTES = 4
_SAMPLE_STRIDE = 127  # odd: rows of tensors have even lengths
_WIDTHS = range(1, 8)
_WORST_CODE_BITS = 6  # of the 8 of an exponent: else the block stays as it is


def has_native() -> bool:
    """Whether `tierstore-native` packs and unpacks here."""
    return hasattr(tierstore_native, "pack_floats") and os.environ.get(SWITCH) != "0"


def pack(block: memoryview, room: memoryview, itemsize_bytes: int, workspace: memoryview) -> int | None:
    """Pack a block (uint8, shape [n]) to the front of the room (writable, n bytes); returns the bytes used. None: it
    stays as it is, and the room may hold anything. `workspace`: n bytes."""
    if itemsize_bytes not in FLOAT_BYTES or len(block) % (8 * itemsize_bytes):
        return None
    if has_native():
        return tierstore_native.pack_floats(block, room, itemsize_bytes, workspace) or None
    return _pack(block, room, itemsize_bytes)


def unpack(payload: memoryview, block: memoryview, itemsize_bytes: int, workspace: memoryview) -> bool:
    """Fill the block from what `pack` made of it. False: these are not its bytes; the block holds garbage."""
    if itemsize_bytes not in FLOAT_BYTES or len(block) % (8 * itemsize_bytes):
        return False
    if has_native():
        return bool(tierstore_native.unpack_floats(payload, block, itemsize_bytes, workspace))
    return _unpack(payload, block, itemsize_bytes)


class _Choice(NamedTuple):
    width: int
    base: int
    is_sparse: bool


def _choose(elements: Array) -> _Choice | None:
    """By a sample; None: packing would gain too little."""
    import numpy as np

    sample = elements[::_SAMPLE_STRIDE]
    num_zeros = len(sample) - int(np.count_nonzero(sample))
    is_sparse = 8 * num_zeros >= len(sample)
    counts = np.bincount(_exponents(_upper_halves(sample)), minlength=256)
    if is_sparse:
        counts[0] -= num_zeros
    below = np.concatenate(([0], np.cumsum(counts)))
    num_coded = int(below[-1])
    choice, least_bits = None, _WORST_CODE_BITS * len(sample) + 1
    for width in _WIDTHS:
        num_codes = (1 << width) - 1
        fitting = below[num_codes:] - below[:-num_codes]
        first = int(fitting.argmax())
        bits = num_coded * width + 8 * (num_coded - int(fitting[first]))
        if bits < least_bits:
            choice, least_bits = _Choice(width, (first - 1) % 256, is_sparse), bits
    return choice


def _upper_halves(elements: Array) -> Array:
    return elements if elements.itemsize == 2 else (elements >> 16).astype("<u2")


def _exponents(upper: Array) -> Array:
    return (upper >> 7).astype("u1")


def _pack(block: memoryview, room: memoryview, itemsize_bytes: int) -> int | None:
    import numpy as np

    elements = np.frombuffer(block, f"<u{itemsize_bytes}")
    choice = _choose(elements)
    if choice is None:
        return None
    parts: list[Any] = []
    if choice.is_sparse:
        is_kept = elements != 0
        elements = elements[is_kept]
        parts.append(np.packbits(is_kept, bitorder="little"))
    upper = _upper_halves(elements)
    parts.append(((upper & 0x7F) | ((upper >> 8) & 0x80)).astype("u1"))
    if itemsize_bytes == 4:
        parts.append(elements.astype("<u2"))
    exponents = _exponents(upper)
    codes = np.full(_filled(len(elements)), 1, "u1")
    np.subtract(exponents, np.uint8(choice.base), out=codes[: len(elements)])
    codes *= codes < 1 << choice.width
    parts += [_narrow(rows, choice.width) for rows in _rows(codes)]
    parts += [exponents[codes[: len(elements)] == 0], np.zeros(_PADDING_BYTES, "u1")]
    used: int = _HEADER_BYTES + sum(part.nbytes for part in parts)
    if used >= len(block):
        return None
    room[:_HEADER_BYTES] = bytes(choice) + b"\0" + len(elements).to_bytes(4, "little")
    packed = np.frombuffer(room, "u1")
    np.concatenate([part.reshape(-1).view("u1") for part in parts], out=packed[_HEADER_BYTES:used])
    return used


def _unpack(payload: memoryview, block: memoryview, itemsize_bytes: int) -> bool:
    import numpy as np

    whole = np.frombuffer(payload, "u1")
    num_kept = count = len(block) // itemsize_bytes
    if len(whole) < _HEADER_BYTES or whole[0] not in _WIDTHS or whole[2] > 1 or whole[3]:
        return False
    choice = _Choice(int(whole[0]), int(whole[1]), bool(whole[2]))
    mask, rest = np.split(whole[_HEADER_BYTES:], [count // 8 if choice.is_sparse else 0])
    is_kept = np.unpackbits(mask, bitorder="little").view(bool)
    if choice.is_sparse:
        num_kept = int(np.count_nonzero(is_kept))
    if num_kept != int.from_bytes(payload[4:_HEADER_BYTES], "little"):
        return False
    elements = np.frombuffer(block, f"<u{itemsize_bytes}")
    if not choice.is_sparse:
        return _unpack_kept(rest, choice, elements)
    kept = np.empty(num_kept, elements.dtype)
    if len(is_kept) != count or not _unpack_kept(rest, choice, kept):
        return False
    elements[:] = 0
    elements[is_kept] = kept
    return True


def _unpack_kept(packed: Array, choice: _Choice, elements: Array) -> bool:
    import numpy as np

    count, halves_bytes = len(elements), len(elements) * (elements.itemsize - 2)
    code_bytes = _filled(count) // 8 * choice.width
    signs, halves, narrow, escapes = np.split(packed, np.cumsum([count, halves_bytes, code_bytes]))
    if len(escapes) < _PADDING_BYTES:
        return False
    codes = np.empty(_filled(count), "u1")
    for rows in _rows(codes):
        used = rows.size // 8 * choice.width
        _widen(narrow[:used], choice.width, rows)
        narrow = narrow[used:]
    escaped = np.flatnonzero(codes == 0)
    if len(escaped) != len(escapes) - _PADDING_BYTES:
        return False
    codes += np.uint8(choice.base)
    codes[escaped] = escapes[: len(escaped)]
    upper = (codes[:count].astype("<u2") << 7) | (signs & 0x7F) | ((signs.astype("<u2") & 0x80) << 8)
    if elements.itemsize == 2:
        elements[:] = upper
    else:
        np.left_shift(upper, 16, out=elements, dtype="<u4")
        elements |= halves.view("<u2")
    return True


def _filled(count: int) -> int:
    return -(-count // _GROUP) * _GROUP


def _rows(codes: Array) -> Iterator[Array]:
    """All whole rows together, then the last one; shape [rows, codes]."""
    whole = len(codes) // _ROW * _ROW
    yield codes[:whole].reshape(-1, _ROW)
    yield codes[whole:].reshape(1, -1)


def _parts(width: int) -> Iterator[tuple[int, int]]:
    """Of a code: how many bits lie together, and the lowest of them."""
    first = 0
    for bits in (4, 2, 1):
        if width & bits:
            yield bits, first
            first += bits


def _narrow(rows: Array, width: int) -> Array:
    import numpy as np

    narrow = []
    for bits, first in _parts(width):
        part = (rows >> first) & ((1 << bits) - 1)
        slices = np.split(part, 8 // bits, axis=1)
        for number in range(1, len(slices)):
            slices[0] |= slices[number] << (number * bits)
        narrow.append(slices[0])
    return np.concatenate(narrow, axis=1)


def _widen(narrow: Array, width: int, rows: Array) -> None:
    import numpy as np

    rows[:] = 0
    narrow = narrow.reshape(len(rows), rows.shape[1] // 8 * width)
    for bits, first in _parts(width):
        slices = np.split(rows, 8 // bits, axis=1)
        packed, narrow = np.split(narrow, [slices[0].shape[1]], axis=1)
        for number, codes in enumerate(slices):
            codes |= ((packed >> (number * bits)) & ((1 << bits) - 1)) << first
