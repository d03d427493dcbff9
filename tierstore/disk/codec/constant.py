"""Encodes blocks of one value (zeros, ones, a fill): the first eight bytes stand for all. As fast as memory is."""

from __future__ import annotations

import ctypes

from .family import CodecSetting, DamagedBytesError, Family, register

__all__ = ["CONSTANT", "WORD_BYTES", "fill_with", "word_of"]

WORD_BYTES = 8
"""A multiple of every element's length except complex128's, which repeats only if both its halves are equal."""

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def word_of(source: memoryview) -> memoryview | None:
    """The first WORD_BYTES of `source`, if all others repeat them; None if not, or if there are no others.

    One call of C does all of it, because each call gives up the interpreter's lock and waits to get it back.

    Args:
        source: uint8, shape [n].
    """
    import numpy as np  # only where blocks are tried: the sidecar starts without it

    if len(source) <= WORD_BYTES:
        return None
    address = np.frombuffer(source, np.uint8).ctypes.data
    is_repeated = not _libc.memcmp(address, address + WORD_BYTES, len(source) - WORD_BYTES)
    return source[:WORD_BYTES] if is_repeated else None


def fill_with(word: memoryview, destination: memoryview) -> None:
    """Undo `word_of`.

    Args:
        word: uint8, shape [WORD_BYTES].
        destination: writable uint8, shape [n].
    """
    import numpy as np

    rest_bytes = len(destination) % WORD_BYTES
    np.frombuffer(destination[: len(destination) - rest_bytes], np.uint64)[:] = np.frombuffer(word, np.uint64)
    destination[len(destination) - rest_bytes :] = word[:rest_bytes]


def _encode(block: memoryview, room: memoryview, setting: CodecSetting) -> int | None:
    word = word_of(block)
    if word is None:
        return None
    room[:WORD_BYTES] = word
    return WORD_BYTES


def _decode(payload: memoryview, block: memoryview, setting: CodecSetting) -> None:
    if len(payload) != WORD_BYTES:
        raise DamagedBytesError(f"a word of {WORD_BYTES} bytes", f"{len(payload)} bytes")
    fill_with(payload, block)


CONSTANT = register(Family("constant", None, _encode, _decode))
"""Stores blocks that repeat one word as that word, and other blocks as they are."""
