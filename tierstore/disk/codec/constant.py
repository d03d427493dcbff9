"""Encodes blocks of one value (zeros, ones, a fill): the first eight bytes stand for all. As fast as memory is."""

from __future__ import annotations

import ctypes

from .family import CodecSetting, DamagedBytesError, Family

_WORD_BYTES = 8  # a multiple of every element's length except complex128's, which repeats only if its halves are equal

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _encode(block: memoryview, room: memoryview, setting: CodecSetting) -> int | None:
    """In one call of C: each call gives up the interpreter's lock and waits to get it back."""
    import numpy as np  # only where blocks are tried: the sidecar starts without it

    if len(block) <= _WORD_BYTES:
        return None
    address = np.frombuffer(block, np.uint8).ctypes.data
    if _libc.memcmp(address, address + _WORD_BYTES, len(block) - _WORD_BYTES):
        return None
    room[:_WORD_BYTES] = block[:_WORD_BYTES]
    return _WORD_BYTES


def _decode(payload: memoryview, block: memoryview, setting: CodecSetting) -> None:
    import numpy as np

    if len(payload) != _WORD_BYTES:
        raise DamagedBytesError(f"a word of {_WORD_BYTES} bytes", f"{len(payload)} bytes")
    rest_bytes = len(block) % _WORD_BYTES
    np.frombuffer(block[: len(block) - rest_bytes], np.uint64)[:] = np.frombuffer(payload, np.uint64)
    block[len(block) - rest_bytes :] = payload[:rest_bytes]


CONSTANT = Family("constant", None, _encode, _decode)
"""Stores blocks that repeat one word as that word, and other blocks as they are."""
