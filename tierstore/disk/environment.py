"""LMDB on an open file, opened anew where LMDB itself gives up. Blocking calls; no two may overlap.

LMDB's map takes only addresses, and at most an eighth of those that the process can have (`ulimit -v`). Forked children
do not get it. `writemap` is never used: on a full disk it ends the process with SIGBUS. With `sync=False` a commit
survives the process: its pages go to the page cache, the one that makes it valid last. It does not survive a power
loss."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

import lmdb

from .allocator import round_up
from .codec.family import DamagedBytesError
from .forking import descriptors_of, inode_of
from .linux import address_of, dont_fork, has_addresses_for, mapping_around

if TYPE_CHECKING:
    Transaction = lmdb.Transaction[Any]

_FORMAT = b"tierstore 1"
_LEAST_MAP_BYTES = 64 * 2**20
_SHARE_OF_ADDRESSES = 8


class Environment:
    """An LMDB environment with three tables. It closes `file`, which may have no name: LMDB reaches it through
    /proc/self/fd. `map_bytes`: the length of the map, if the process can have so many addresses.

    Attributes:
        locations, values, leases: the tables. They, and `map_start`, change when `begin` opens the file anew.
        map_start: the address at which the map begins; None: it could not be found out.

    Raises:
        lmdb.Error, DamagedBytesError: the file is damaged, or the map cannot be made.
        OSError: the system refuses. In all cases `file` is closed.
    """

    def __init__(self, file: io.FileIO, map_bytes: int) -> None:
        self.file = file
        self.inode = inode_of(file.fileno())
        self.map_bytes = self._most_bytes = map_bytes
        least_bytes = max(_LEAST_MAP_BYTES, 2 * round_up(os.fstat(file.fileno()).st_size))
        while self.map_bytes > least_bytes and not has_addresses_for(_SHARE_OF_ADDRESSES * self.map_bytes):
            self.map_bytes = max(least_bytes, round_up(self.map_bytes // 2))
        self._lmdb: Any = None  # its own types want to know of `buffers` beforehand
        try:
            self._open()
        except BaseException:
            file.close()
            raise

    def descriptors(self) -> list[int]:
        return descriptors_of({self.inode})

    def begin(self, *, write: bool = False, buffers: bool = False) -> Transaction:
        """Begin a transaction. Once a write of the page that makes a commit valid has failed, LMDB refuses all others
        (MDB_PANIC), also on a drive that is well again. Then the file is opened anew, as it was before that commit."""
        if self._lmdb is None:
            self._open()
        try:
            begun: Transaction = self._lmdb.begin(write=write, buffers=buffers)
        except lmdb.PanicError:
            self._close()
            self._open()
            begun = self._lmdb.begin(write=write, buffers=buffers)
        return begun

    def try_to_write(self) -> None:
        """Commit an empty change, which takes pages from the list of free ones. If it raises, nothing changed."""
        with self.begin(write=True) as transaction:
            transaction.put(b"format", _FORMAT)

    def close(self) -> None:
        self._close()
        self.file.close()

    def _open(self) -> None:
        """If it raises, the next `begin` tries again."""
        self._lmdb = lmdb.open(
            f"/proc/self/fd/{self.file.fileno()}",
            map_size=self.map_bytes,
            subdir=False,
            lock=False,
            sync=False,
            readahead=True,
            mode=0o600,
            max_dbs=3,
        )
        try:
            self._cover_pages()
            self.locations, self.values, self.leases = map(self._lmdb.open_db, (b"locations", b"values", b"leases"))
            self.map_start = self._keep_from_children()
            for descriptor in self.descriptors():
                os.set_inheritable(descriptor, False)  # LMDB leaves its first one open across exec
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        if self._lmdb is not None:
            self._lmdb.close()
            self._lmdb = None

    def _cover_pages(self) -> None:
        """Make the file as long as the pages it claims: a page of zeros is an error, a page beyond the end a SIGBUS."""
        claimed_bytes = (self._lmdb.info()["last_pgno"] + 1) * self._lmdb.stat()["psize"]
        if claimed_bytes > self._most_bytes:
            raise DamagedBytesError(f"at most {self._most_bytes} bytes", f"{claimed_bytes}")
        if os.fstat(self.file.fileno()).st_size < claimed_bytes:
            os.ftruncate(self.file.fileno(), claimed_bytes)

    def _keep_from_children(self) -> int | None:
        """Leave the map out of forked children; returns where it starts, None if that cannot be found out."""
        with self.begin() as transaction:
            is_new = transaction.get(b"format") is None
        if is_new:
            self.try_to_write()
        with self.begin(buffers=True) as transaction:
            found = mapping_around(address_of(memoryview(transaction.get(b"format", b""))))
        if found is None:
            return None
        dont_fork(*found)
        return found[0]
