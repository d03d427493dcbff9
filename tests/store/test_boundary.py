"""Errors of files and of LMDB, as they come out of the disk tier."""

import errno
import os
import re
from pathlib import Path

import lmdb
import pytest

from tierstore.disk.boundary import naming_the_limit, translated
from tierstore.disk.codec.codec import DamagedBytesError
from tierstore.errors import CorruptDataError, StorageIOError, StoreFullError


def _os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _error_of_lmdb(number: int) -> lmdb.Error:
    error = lmdb.Error(os.strerror(number))
    error.code = number
    return error


@pytest.mark.parametrize(
    "error",
    [
        _os_error(errno.ENOSPC),
        _os_error(errno.EDQUOT),
        lmdb.MapFullError("full"),
        lmdb.DiskError("ENOSPC"),
        _error_of_lmdb(errno.EDQUOT),
    ],
)
def test_full_device_quota_or_map_is_store_full_with_figures(error: Exception) -> None:
    usage = (10, 11)
    with pytest.raises(StoreFullError) as caught, translated("write", "here", "there", num_bytes=5, usage=usage):
        raise error
    assert "still in memory" in str(caught.value)
    full = caught.value
    assert (full.needed_bytes, full.disk_bytes, full.disk_budget_bytes) == (5, 10, 11)
    assert full.__cause__ is error


@pytest.mark.parametrize("error", [_os_error(errno.EIO), _os_error(errno.ENODEV), lmdb.CorruptedError("broken")])
def test_broken_device_is_an_io_error_that_says_where_the_data_is(error: Exception) -> None:
    with pytest.raises(StorageIOError) as caught, translated("write", "a segment", "the data is here"):
        raise error
    assert "the data is here" in str(caught.value)
    assert (caught.value.operation, caught.value.place) == ("write", "a segment")
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("place", "num_times"), [("{}", 1), ("a, {}", 1), ("segment 1", 1), ("{}/folder", 2)], ids=lambda value: str(value)
)
def test_path_is_told_once(tmp_path: Path, place: str, num_times: int) -> None:
    """But also where another one is told that begins with it."""
    missing = tmp_path / "it's missing"
    with pytest.raises(StorageIOError) as caught, translated("open", place.format(missing), "nothing was stored"):
        os.open(missing, os.O_RDONLY)
    assert str(caught.value).count("missing") == num_times
    assert "[Errno 2] No such file or directory" in caught.value.reason


def test_damaged_bytes_are_told_with_the_key() -> None:
    with pytest.raises(CorruptDataError) as caught, translated("read", "a segment", "on disk", key=7):
        raise DamagedBytesError("checksum 1", "2")
    assert (caught.value.key, caught.value.expected, caught.value.found) == (7, "checksum 1", "2")


@pytest.mark.parametrize(
    ("cause", "reason", "advice"),
    [
        (None, "the disk budget is used up", "raise disk_bytes or host_bytes"),
        (_os_error(errno.ENOSPC), "the drive of {} is full: No space left on device", "free space there"),
        (lmdb.DiskError("ENOSPC"), "the drive of {} is full: No space left on device", "free space there"),
        (_os_error(errno.EDQUOT), "your quota on the drive of {} is used up: .*quota exceeded", "free space there"),
        (_error_of_lmdb(errno.EDQUOT), "your quota on the drive of {} is used up: .*quota", "free space there"),
        (lmdb.MapFullError("raise `ulimit -v`"), "the disk budget is used up", "raise `ulimit -v` or host_bytes"),
    ],
    ids=str,
)
def test_full_names_what_is_the_limit_and_advises_no_other(
    tmp_path: Path, cause: Exception | None, reason: str, advice: str
) -> None:
    full = StoreFullError(5, 10, 11)
    full.__cause__ = cause
    told = naming_the_limit(full, tmp_path)
    assert re.search(reason.format(tmp_path), told.reason)
    assert told.advice.startswith(advice)
    assert (told.needed_bytes, told.disk_bytes, told.disk_budget_bytes) == (5, 10, 11)
    assert told.__cause__ is cause
