"""Translates errors of files and of LMDB into this package's own, in one place, with the cause chained."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import lmdb

from ..base.system_words import words_of
from ..errors import CorruptDataError, StorageIOError, StoreFullError
from .codec.family import DamagedBytesError
from .segments import is_out_of_space

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
    """Around a block: CorruptDataError (not the bytes that were written), StoreFullError (the file system or LMDB's map
    is full) or StorageIOError in place of the errors of files and of LMDB. `operation`: "write", "open", ...; `place`,
    and `data` (where the record's bytes are if it fails): in words."""
    try:
        yield
    except DamagedBytesError as error:
        raise CorruptDataError(key, place, error.expected, error.found) from error
    except (OSError, lmdb.Error) as error:
        if means_full(error):
            raise StoreFullError(num_bytes, *usage, reason=f"{place}: {words_of(error, place)}") from error
        raise StorageIOError(operation, place, words_of(error, place), data) from error


def naming_the_limit(full: StoreFullError, directory: Path) -> StoreFullError:
    """The same error; if the drive, a quota on it or `ulimit -v` is the limit, not a budget, it says so."""
    cause = full.__cause__
    number = getattr(cause, "errno", None) or getattr(cause, "code", None)
    advice = "free space there, use another drive, or raise host_bytes"
    told = full
    if number == errno.EDQUOT:
        told = replace(full, reason=f"your quota on the drive of {directory} is used up: {cause}", advice=advice)
    elif number == errno.ENOSPC or isinstance(cause, lmdb.DiskError):
        told = replace(full, reason=f"the drive of {directory} is full: {os.strerror(errno.ENOSPC)}", advice=advice)
    elif isinstance(cause, lmdb.MapFullError):
        told = replace(full, advice="raise `ulimit -v` or host_bytes")
    told.__cause__ = cause
    return told
