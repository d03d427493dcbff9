"""Space on a drive that is kept for deletions. Blocking calls.

LMDB writes a changed page to another place, so even to delete takes pages: new ones, or freed ones, whose space may
have been given back. On a drive that is full it is refused, and what is dead would fill the drive for ever."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from pathlib import Path

from .forking import inode_of, not_while_forking
from .linux import open_unnamed, reserve

_MOST_BYTES = 2**20  # some dozen commits of one deletion each; the pages that they free are given back after that
_LEAST_SHARE = 64  # of a small budget


class Reserve:
    """An unnamed file of 1 MiB, or less if the budget is small. OSError from the constructor: it cannot be opened.

    Attributes:
        is_kept: the file has its space. Not where the drive is full, until `keep` finds room.
    """

    def __init__(self, directory: Path, disk_bytes: int) -> None:
        self._num_bytes = min(_MOST_BYTES, disk_bytes // _LEAST_SHARE)
        with not_while_forking:
            self._file = io.FileIO(open_unnamed(directory), "r+")
            self.inode = inode_of(self._file.fileno())
        self.is_kept = False

    def keep(self) -> None:
        """Take the space, if it can be had now."""
        if self.is_kept or self._file.closed or not self._num_bytes:
            return
        try:
            reserve(self._file.fileno(), self._num_bytes)
            self.is_kept = True
        except OSError:  # the drive is full, or files may not be so long
            self.let_go()

    def let_go(self) -> None:
        """Give the space to whoever is first to need some. A drive that fails keeps it: no deletion is to raise."""
        with suppress(OSError):
            os.ftruncate(self._file.fileno(), 0)
            self.is_kept = False

    def close(self) -> None:
        self._file.close()
