"""The LMDB environment of an index: opened in a file of its own, with a map that grows. Blocking calls.

The map begins small, because a map for all of the disk budget breaks `ulimit -v`. Forked children do not get it.
`writemap` is never used: on a full disk it ends the process with SIGBUS. With `sync=False` a commit survives the
process: its pages go to the page cache, the one that makes it valid last. It does not survive a power loss.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence

import lmdb

from .allocator import round_up
from .budget import MAP_SPARE_BYTES
from .codec.family import DamagedBytesError
from .forking import descriptors_of, inode_of
from .linux import address_of, dont_fork, has_addresses_for, mapping_around

_FORMAT = b"tierstore 1"
_FIRST_MAP_BYTES = 64 * 2**20
_ROOM_TO_DELETE_BYTES = 2 * 2**20


class Environment:
    """One LMDB environment. Every method blocks; no two calls may overlap (`lock=False`: see `index.py`).

    It closes `file`, which may be one without a name (it is reached through /proc/self/fd). `map_bytes`: the most
    address space that the map may take. `tables`: their names; they are made if they were not there.

    Attributes:
        map_start: the address at which the map begins; None: it could not be found out.
        damage: LMDB's error about damaged pages, or about the loss of its map: after it, changes fail as long as the
            file is used. The index sets it too.

    Raises:
        lmdb.Error, DamagedBytesError: the file is damaged, or the map cannot be made.
        OSError: the system refuses. In all cases `file` is closed.
    """

    def __init__(self, file: io.FileIO, map_bytes: int, tables: Sequence[bytes]) -> None:
        self.damage: lmdb.Error | None = None
        self.file = file
        self.inode = inode_of(file.fileno())
        self._most_map_bytes = map_bytes
        try:
            first_bytes = max(_FIRST_MAP_BYTES, 2 * round_up(os.fstat(file.fileno()).st_size))
            self._lmdb = lmdb.open(
                f"/proc/self/fd/{file.fileno()}",
                map_size=min(first_bytes, map_bytes),
                subdir=False,
                lock=False,
                sync=False,
                readahead=True,
                mode=0o600,
                max_dbs=len(tables),
            )
        except BaseException:
            file.close()
            raise
        try:
            self.begin = self._lmdb.begin
            self._cover_pages()
            self.tables = [self._lmdb.open_db(name) for name in tables]
            self.map_start = self._keep_from_children()
            for descriptor in self.descriptors():
                os.set_inheritable(descriptor, False)  # LMDB leaves its first one open across exec
        except BaseException:
            self.close()
            raise

    @property
    def map_bytes(self) -> int:
        return int(self._lmdb.info()["map_size"])

    def try_to_write(self) -> None:
        """Commit an empty change, which takes pages from the list of free ones. If it raises, nothing changed."""
        with self.begin(write=True) as transaction:
            transaction.put(b"format", _FORMAT)

    def grow(self, *, frees: bool) -> bool:
        """Make the map longer; False: it has room for all of the budget already. `frees`: the change only deletes; it
        may take the last addresses, which other changes leave free. lmdb.Error: the process has no addresses for it;
        the map is as it was. OSError: it has grown, and forked children will have it too."""
        map_bytes = self.map_bytes
        if map_bytes >= self._most_map_bytes:
            return False
        for more_bytes in (map_bytes, MAP_SPARE_BYTES, *([_ROOM_TO_DELETE_BYTES] if frees else [])):
            longer_bytes = min(map_bytes + more_bytes, self._most_map_bytes)
            # LMDB unmaps its map before it asks for the longer one, and has none if that is refused.
            if has_addresses_for(longer_bytes - map_bytes if frees else longer_bytes):
                self._lengthen_map(longer_bytes)
                return True
        needed = f"the index needs {MAP_SPARE_BYTES} more bytes of addresses than the process may have"
        raise lmdb.MapFullError(f"{needed}; raise `ulimit -v`")

    def descriptors(self) -> list[int]:
        return descriptors_of({self.inode})

    def close(self) -> None:
        self._lmdb.close()
        self.file.close()

    def _cover_pages(self) -> None:
        """Make the file as long as the pages it claims: a page of zeros is an error, a page beyond the end a SIGBUS."""
        page_bytes = self._lmdb.stat()["psize"]
        claimed_bytes = (self._lmdb.info()["last_pgno"] + 1) * page_bytes
        if claimed_bytes > self._most_map_bytes:
            raise DamagedBytesError(f"at most {self._most_map_bytes} bytes", f"{claimed_bytes}")
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

    def _lengthen_map(self, map_bytes: int) -> None:
        try:
            self._lmdb.set_mapsize(map_bytes)
        except lmdb.Error as error:  # others took the addresses meanwhile: LMDB would read unmapped ones
            self.damage = error
            self._lmdb.close()
            raise
        self.map_start = self._keep_from_children()
