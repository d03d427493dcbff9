"""Where a tier's files live: without names, or with names by which the next process finds them.

All differences between the two layouts are here; the rest of the tier is the same code for both. `NamedFileLayout`
keeps these files in its folder:

=================  =========================================================================================
``lock``           held by the process that uses the folder; its pid
``format``         version of this format, boot id, seed of the checksums, how extents are aligned
``opening``        while a start reads the index: a byte for each start in a row killed then, or a crash's words
``index``          LMDB (`index.py`)
``segment-NNNNNN``  extents (`segments.py`)
=================  =========================================================================================
"""

from __future__ import annotations

import errno
import faulthandler
import io
import os
import re
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import lmdb
import msgspec

from ..base.config import check_directory
from .allocator import ALIGNMENT_BYTES, round_up
from .boundary import means_full
from .budget import map_bytes_for, value_charge_bytes
from .codec.codec import NO_CODEC
from .codec.family import FAMILIES, DamagedBytesError
from .folder import LockedFolder
from .forking import Inode
from .index import Index, may_be_short_write
from .linux import open_unnamed
from .location import Location
from .segments import IoMode, Segment, close_segments, reopen_segment

FOLDER_NAME = "tierstore-daemon"
_FORMAT_VERSION = 2
_FORMAT, _OPENING, _INDEX = "format", "opening", "index"
_OWN_NAMES = re.compile(r"format|opening|index|segment-(?:\d{6}|[1-9]\d{6,})", re.ASCII)
_MOST_FORMAT_BYTES = 4096
_MOST_STARTS = 3  # that may be killed while they read the index; a crash leaves more bytes
_MOST_ITEMSIZE_BYTES = 1024  # as in the protocol's `Write`; decoding makes a pass for each byte of it
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# The cause of these errors is this process or the drive, not the index.
_PASSING = (
    errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS,
)  # fmt: skip


Spans = dict[int, dict[int, int]]
"""The ranges in use, by the number of their segment: offset -> length. Segments without records are left out."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What was in a file layout that was opened; the receiver closes it. `session`: part of every checksum. `leases`:
    number -> bytes. `segments`: open, only those that hold records. `spans`: the ranges in use, by segment."""

    session: int
    index: Index
    locations: dict[int, Location]
    leases: dict[int, bytes]
    segments: list[Segment]
    spans: Spans


class UnnamedFileLayout:
    """Files without names: nobody sees them, and no kill leaves them behind."""

    outlives = False  # the next process does not find the files again

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.inodes: set[Inode] = set()  # of files that the file layout itself keeps open

    def open(self, disk_bytes: int, mode: IoMode) -> Contents:
        return _empty(0, Index.without_name(self.directory, map_bytes_for(disk_bytes)))

    def make_segment(self, number: int) -> int:
        return open_unnamed(self.directory)

    def remove_segment(self, number: int) -> None:
        """It never had a name."""

    def close(self, *, keep: bool) -> None:
        """There is nothing to keep."""


class _Format(msgspec.Struct, frozen=True):
    """The format of the files, which are read only if it is this process's own; and the checksums' seed."""

    version: int
    boot_id: str
    alignment_bytes: int
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class NamedFileLayout:
    """Files with names, in the folder `tierstore-daemon` of a directory, which survive a kill, not a power loss:
    nothing is synced. So files from before the last boot are removed, not read, as are files of another version, and an
    index that is damaged: also if the process crashed at the last start while it read it, or was killed then at the
    last three. Other files in the folder stay."""

    outlives = True  # so every record must be entered in the index

    def __init__(self, directory: Path, new_seed: int | None = None) -> None:
        """Lock the folder; make it, if it is not there. ConfigError: the directory or the folder cannot be used, or
        another process uses it. OSError: it cannot be made or opened. In both cases nothing was changed. `new_seed`: of
        63 bits, for the checksums, if no files are kept that have one; None: a random one."""
        self._folder = LockedFolder(check_directory(directory), FOLDER_NAME)
        self.directory = self._folder.path
        self._new_seed = secrets.randbits(63) if new_seed is None else new_seed
        self.found = "nothing"  # when it was opened, and what was done with it, in words

    @property
    def inodes(self) -> set[Inode]:
        return self._folder.inodes

    @property
    def taken_bytes(self) -> int:
        """The space of its files on the drive; before `open`, of those that it will find or clear."""
        return sum(self._folder.sizes(name)[1] for name in self._own_names())

    def open(self, disk_bytes: int, mode: IoMode) -> Contents:
        """Open the files that are there, or make new ones; those that must not or cannot be read are cleared first.
        Called once. On lmdb.Error and OSError nothing is left open, and the files are as they were."""
        format_ = self._read_format()
        reason = self._reason_to_clear(format_)
        if format_ is not None and reason is None:
            try:
                with self._leaving_a_trace():
                    return self._restore(format_.seed, disk_bytes, mode)
            except (lmdb.Error, DamagedBytesError, MemoryError) as error:
                if getattr(error, "code", None) in _PASSING:
                    raise
                reason = f"the index is damaged ({error})"
        if self._clear():
            self.found = f"cleared: {reason}"
        return self._begin(disk_bytes)

    def make_segment(self, number: int) -> int:
        return self._folder.open(_segment_name(number), os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def remove_segment(self, number: int) -> None:
        """If the system refuses, the next start removes it: it holds no record."""
        try:
            self._folder.remove(_segment_name(number))
        except OSError:
            pass

    def close(self, *, keep: bool) -> None:
        """Leave the file layout after all files were closed, and unlock it; idempotent. Without `keep`, no file stays;
        an empty folder does not either. Raises nothing."""
        try:
            if not keep:
                self._clear()
            self._folder.close(remove=True)
        except OSError:
            self._folder.close(remove=False)  # what stays is for the next start

    def _read_format(self) -> _Format | None:
        packed = self._folder.read(_FORMAT, _MOST_FORMAT_BYTES)
        try:
            return None if packed is None else msgspec.json.decode(packed, type=_Format)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # the last: brackets without end
            return None

    def _reason_to_clear(self, found: _Format | None) -> str | None:
        if found is None:
            return "it has no readable format"
        if found.version != _FORMAT_VERSION:
            return f"written in format {found.version}, not {_FORMAT_VERSION}"
        if found.boot_id != _boot_id():
            return "written before the last boot"
        if found.alignment_bytes != ALIGNMENT_BYTES:
            return f"written with an alignment of {found.alignment_bytes} bytes, not {ALIGNMENT_BYTES}"
        if self._folder.sizes(_INDEX)[0] == 0:
            return "it has no index"
        if self._folder.sizes(_OPENING)[0] >= _MOST_STARTS:
            return "the last start ended while it read the index"
        return None

    def _begin(self, disk_bytes: int) -> Contents:
        seed = self._new_seed
        format_ = _Format(_FORMAT_VERSION, _boot_id(), ALIGNMENT_BYTES, seed)
        try:
            self._folder.write(_FORMAT, msgspec.json.encode(format_))
            return _empty(seed, self._open_index(disk_bytes))
        except BaseException:  # a full file system: nothing was there, and nothing stays
            self._clear()
            raise

    @contextmanager
    def _leaving_a_trace(self) -> Iterator[None]:
        """Around the reading of the index, of which a crash or a kill leaves the file `opening`."""
        others = faulthandler.is_enabled()
        with io.FileIO(self._folder.open(_OPENING, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a") as file:
            file.truncate(os.fstat(file.fileno()).st_size + 1)  # takes no space: the drive may be full
            faulthandler.enable(file, all_threads=False)
            try:
                yield
            finally:
                faulthandler.disable()
                if others and sys.__stderr__ is not None:
                    faulthandler.enable(sys.__stderr__)
                self._folder.remove(_OPENING)

    def _restore(self, seed: int, disk_bytes: int, mode: IoMode) -> Contents:
        index = self._open_index(disk_bytes)
        segments: list[Segment] = []
        try:
            locations, leases = index.entries()
            spans = spans_of(locations, {number: self._folder.sizes(name)[0] for number, name in self._segment_names()})
            for number, name in self._segment_names():
                if number in spans:
                    segments.append(reopen_segment(number, partial(self._folder.open, name, os.O_RDWR), mode))
                else:
                    self._folder.remove(name)
            self._try_to_write(index)
        except BaseException:
            close_segments(segments, set())
            index.close()
            raise
        self.found = f"taken up: {len(locations)} records"
        return Contents(seed, index, locations, leases, segments, spans)

    def _try_to_write(self, index: Index) -> None:
        """A damaged list of free pages may end the process, and better now."""
        try:
            index.try_to_write()
        except (lmdb.Error, OSError) as error:
            if not means_full(error) and not may_be_short_write(error):  # the entries can still be read
                raise

    def _segment_names(self) -> list[tuple[int, str]]:
        names = [name for name in self._folder.names() if name.startswith("segment-") and _OWN_NAMES.fullmatch(name)]
        return [(int(name.partition("-")[2]), name) for name in names]

    def _open_index(self, disk_bytes: int) -> Index:
        """Open the index; its map has room for the entries that are there, even if the budget was lowered."""
        file = io.FileIO(self._folder.open(_INDEX, os.O_RDWR | os.O_CREAT), "r+")
        return Index(file, map_bytes_for(max(disk_bytes, self._folder.sizes(_INDEX)[0])))

    def _clear(self) -> bool:
        names = self._own_names()
        for name in names:
            self._folder.remove(name)
        return bool(names)

    def _own_names(self) -> list[str]:
        return [name for name in self._folder.names() if _OWN_NAMES.fullmatch(name)]


FileLayout = UnnamedFileLayout | NamedFileLayout


def _empty(session: int, index: Index) -> Contents:
    return Contents(session, index, {}, {}, [], {})


def _segment_name(number: int) -> str:
    return f"segment-{number:06d}"


def _boot_id() -> str:
    return _BOOT_ID.read_text(encoding="ascii").strip()


def spans_of(locations: Mapping[int, Location], segment_bytes: Mapping[int, int]) -> Spans:
    """The ranges of all records. DamagedBytesError: one of them cannot be right, or two overlap. `segment_bytes`: the
    length of each segment file that is there, by number."""
    extents = []
    for key, location in locations.items():
        if not _could_be_right(location, segment_bytes):
            raise DamagedBytesError(f"a place of record {key} that there is", str(location))
        if location.segment is not None and location.offset is not None:
            extents.append((location.segment, location.offset, location.taken_bytes))
    spans: Spans = {}
    for segment, offset, num_bytes in sorted(extents):
        of_segment = spans.setdefault(segment, {})
        if of_segment and offset < (end := sum(next(reversed(of_segment.items())))):
            raise DamagedBytesError(f"records of segment {segment} that do not overlap", f"{offset} before {end}")
        of_segment[offset] = num_bytes
    return spans


def _could_be_right(location: Location, segment_bytes: Mapping[int, int]) -> bool:
    encoded_bytes, taken_bytes, offset = location.encoded_bytes, location.taken_bytes, location.offset
    if encoded_bytes < 0 or location.logical_bytes < 0 or location.codec not in (NO_CODEC.family, *FAMILIES):
        return False
    if not 1 <= location.itemsize_bytes <= _MOST_ITEMSIZE_BYTES:
        return False
    if location.codec == NO_CODEC.family and location.logical_bytes != encoded_bytes:
        return False
    if location.segment is None:
        return taken_bytes == value_charge_bytes(encoded_bytes)
    if offset is None or offset < 0 or offset % ALIGNMENT_BYTES or not 0 <= location.head_bytes < ALIGNMENT_BYTES:
        return False
    is_snug = taken_bytes == max(round_up(encoded_bytes), ALIGNMENT_BYTES)
    return is_snug and offset + taken_bytes <= segment_bytes.get(location.segment, 0)
