"""Translates errors of files and of LMDB into this package's own, in one place, with the cause chained."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import lmdb

from ..base.system_words import words_of
from ..errors import CorruptDataError, StorageIOError, StoreFullError
from .codec.codec import DamagedBytesError
from .segments import is_out_of_space

__all__ = ["Usage", "means_full", "translated"]

Usage = tuple[int, int]
"""Bytes taken on disk now, and the most that may be taken; a `StoreFullError` states both."""


def means_full(error: Exception) -> bool:
    """Whether the file system, the user's quota on it, or LMDB's map is full."""
    if isinstance(error, lmdb.Error) and getattr(error, "code", None) == errno.EDQUOT:
        return True
    return is_out_of_space(error) or isinstance(error, (lmdb.MapFullError, lmdb.DiskError))


@contextmanager
def translated(
    operation: str, place: str, data: str, *, key: int = 0, num_bytes: int = 0, usage: Usage = (0, 0)
) -> Iterator[None]:
    """Around a block: raise this package's errors in place of those of files and of LMDB.

    Args:
        operation: "write", "read", "open", ...
        place: where, in words.
        data: where the record's bytes are if the operation fails, in words.
        key: the record's.
        num_bytes: the record's length.
        usage: for `StoreFullError`.

    Raises:
        CorruptDataError: the bytes are not those that were written.
        StoreFullError: the file system or LMDB's map is full.
        StorageIOError: anything else that the device, the file system or LMDB said.
    """
    try:
        yield
    except DamagedBytesError as error:
        raise CorruptDataError(key, place, error.expected, error.found) from error
    except (OSError, lmdb.Error) as error:
        if means_full(error):
            raise StoreFullError(num_bytes, *usage, reason=f"{place}: {words_of(error)}") from error
        raise StorageIOError(operation, place, words_of(error), data) from error
