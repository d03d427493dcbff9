"""The index in LMDB: where every record lies, and the small records themselves. Blocking calls.

Three tables: `locations` (key → `Location`, msgpack), `values` (key → encoded bytes, for records without an extent) and
`leases` (number → bytes, whose meaning is the owner's). With `lock=False` a write transaction of LMDB may reuse pages
that a reader still uses (lmdb.h, MDB_NOLOCK), so calls must not overlap; the owner of an index makes one at a time.

LMDB's map takes only addresses, and at most an eighth of those that the process can have (`ulimit -v`). Forked children
do not get it. `writemap` is never used: on a full disk it ends the process with SIGBUS. With `sync=False` a commit
survives the process: its pages go to the page cache, the one that makes it valid last. It does not survive a power
loss."""

from __future__ import annotations

import errno
import io
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import lmdb
import msgspec

from .allocator import round_up
from .codec.family import DamagedBytesError
from .forking import descriptors_of, inode_of
from .linux import address_of, dont_fork, has_addresses_for, mapping_around, open_unnamed
from .location import Location


class Put(NamedTuple):
    """Enter a record; with its bytes if they live here."""

    key: int
    location: Location
    value: bytes | memoryview | None


class Delete(NamedTuple):
    """Remove a record, and its bytes if they live here."""

    key: int


class Fetch(NamedTuple):
    """Hand the record's bytes to `receive`, which must be done with them when it returns."""

    key: int
    receive: Callable[[memoryview], None]


class PutLease(NamedTuple):
    """Enter a lease, or replace it; None: remove it."""

    number: int
    blob: bytes | None


Operation = Put | Delete | Fetch | PutLease


class Outcome(NamedTuple):
    """`error`: if not None, nothing of the operation was done. `value_offset`: where a large value that was put lies in
    the index's file, for good. Reads from there run at the disk's speed; through cold pages of the map they ran at
    0.04-0.5 GB/s."""

    error: Exception | None = None
    value_offset: int | None = None


if TYPE_CHECKING:
    from lmdb import _Database

    _Transaction = lmdb.Transaction[Any]


_FORMAT = b"tierstore 1"
_LEAST_MAP_BYTES = 64 * 2**20
_SHARE_OF_ADDRESSES = 8
_LARGE_VALUE_BYTES = 64 * 2**10
_ROOM_FOR_A_COMMIT_BYTES = 2**20
_MOST_TRIES = 8  # of a commit that finds the drive full though it shows room: others fill and free it meanwhile
_KEY_BYTES = 8


class Index:
    """Three tables in one LMDB environment. Every method blocks; no two calls may overlap.

    It closes `file`, from which large values are read where they lie, and which may have no name (LMDB reaches it
    through /proc/self/fd). `map_bytes`: the length of the map, if the process can have so many addresses.

    Attributes:
        map_bytes: the length of the map.
        allocated_bytes: the space that it takes on disk, as of the last `apply` or the opening.
        map_start: the address at which the map begins; None: it could not be found out.
        damage: LMDB's error about damaged pages: after it, changes fail as long as the file is used.

    Raises:
        lmdb.Error, DamagedBytesError: the file is damaged, or the map cannot be made.
        OSError: the system refuses. In all cases `file` is closed.
    """

    def __init__(self, file: io.FileIO, map_bytes: int) -> None:
        self.damage: lmdb.Error | None = None
        self.file = file
        self.inode = inode_of(file.fileno())
        self.map_bytes = map_bytes
        least_bytes = max(_LEAST_MAP_BYTES, 2 * round_up(os.fstat(file.fileno()).st_size))
        while self.map_bytes > least_bytes and not has_addresses_for(_SHARE_OF_ADDRESSES * self.map_bytes):
            self.map_bytes = max(least_bytes, round_up(self.map_bytes // 2))
        try:
            self._lmdb = lmdb.open(
                f"/proc/self/fd/{file.fileno()}",
                map_size=self.map_bytes,
                subdir=False,
                lock=False,
                sync=False,
                readahead=True,
                mode=0o600,
                max_dbs=3,
            )
        except BaseException:
            file.close()
            raise
        try:
            self.begin = self._lmdb.begin
            self._cover_pages(map_bytes)
            tables = (b"locations", b"values", b"leases")
            self._locations, self._values, self._leases = map(self._lmdb.open_db, tables)
            self.map_start = self._keep_from_children()
            for descriptor in self.descriptors():
                os.set_inheritable(descriptor, False)  # LMDB leaves its first one open across exec
            self._note_allocated()
        except BaseException:
            self.close()
            raise

    @classmethod
    def without_name(cls, directory: Path, map_bytes: int) -> Index:
        return cls(io.FileIO(open_unnamed(directory), "r+"), map_bytes)

    def descriptors(self) -> list[int]:
        return descriptors_of({self.inode})

    def close(self) -> None:
        self._lmdb.close()
        self.file.close()

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Do all operations: fetches first, then every change in one transaction, or each alone if that fails."""
        outcomes = [Outcome()] * len(operations)
        changes = []
        for place, operation in enumerate(operations):
            if isinstance(operation, Fetch):
                outcomes[place] = self._outcome_of_fetch(operation)
            else:
                changes.append(place)
        if changes and self._commit([operations[place] for place in changes]) is not None:
            for place in changes:
                outcomes[place] = Outcome(self._change_alone(operations[place]))
        self._find_large_values(operations, outcomes)
        self._note_allocated()
        return outcomes

    def entries(self) -> tuple[dict[int, Location], dict[int, bytes]]:
        """Read all locations and leases of an index that an earlier process has left. DamagedBytesError, lmdb.Error:
        some are missing, or out of order, or make no sense. Damage of some kinds ends the process instead (SIGSEGV,
        SIGBUS)."""
        decoder = msgspec.msgpack.Decoder(Location)
        with self.begin() as transaction:
            try:
                locations = {key: decoder.decode(packed) for key, packed in _pairs(transaction, self._locations)}
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise DamagedBytesError("locations", str(error)) from error
            leases = dict(_pairs(transaction, self._leases))
        with self.begin(buffers=True) as looking:
            self._check_values(looking, locations)
        return locations, leases

    def try_to_write(self) -> None:
        """Commit an empty change, which takes pages from the list of free ones. If it raises, nothing changed."""
        with self.begin(write=True) as transaction:
            transaction.put(b"format", _FORMAT)

    def _cover_pages(self, most_bytes: int) -> None:
        """Make the file as long as the pages it claims: a page of zeros is an error, a page beyond the end a SIGBUS."""
        claimed_bytes = (self._lmdb.info()["last_pgno"] + 1) * self._lmdb.stat()["psize"]
        if claimed_bytes > most_bytes:
            raise DamagedBytesError(f"at most {most_bytes} bytes", f"{claimed_bytes}")
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

    def _note_allocated(self) -> None:
        self.allocated_bytes = os.fstat(self.file.fileno()).st_blocks * 512

    def _check_values(self, looking: _Transaction, locations: dict[int, Location]) -> None:
        """Each value must be its record's, and each record must have its own; notes where large ones lie. Reads none: a
        cursor of a transaction with buffers only tells where each lies."""
        lengths = {key: location.encoded_bytes for key, location in locations.items() if location.segment is None}
        for key, value in _pairs(looking, self._values):
            if len(value) != (expected := lengths.pop(key, None)):
                raise DamagedBytesError(f"{expected} bytes of record {key}", f"{len(value)}")
            if len(value) >= _LARGE_VALUE_BYTES and self.map_start is not None:
                offset = address_of(memoryview(value)) - self.map_start
                locations[key] = msgspec.structs.replace(locations[key], offset=offset)
        if lengths:
            raise DamagedBytesError(f"values of the records {sorted(lengths)[:10]}", "none")

    def _outcome_of_fetch(self, fetch: Fetch) -> Outcome:
        try:
            with self.begin(db=self._values, buffers=True) as transaction:
                value = transaction.get(_key(fetch.key))
                if value is None:
                    raise DamagedBytesError("a value in the index", "none")
                fetch.receive(value)
        except Exception as error:  # noqa: BLE001  (it is the outcome: raised again where the operation came from)
            return Outcome(error)
        return Outcome()

    def _change_alone(self, operation: Operation) -> Exception | None:
        """Do a change; returns why it failed. If the drive seems full but shows room, it is tried again."""
        value = operation.value if isinstance(operation, Put) else None
        needed_bytes = len(value or b"") + _ROOM_FOR_A_COMMIT_BYTES
        for _ in range(_MOST_TRIES):
            error = self._commit([operation])
            if error is None or not (may_be_short_write(error) or getattr(error, "code", None) == errno.ENOSPC):
                break
            status = os.fstatvfs(self.file.fileno())
            if status.f_bavail * status.f_frsize <= needed_bytes:
                full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                full.__cause__ = error
                return full
        return error

    def _commit(self, operations: Sequence[Operation]) -> Exception | None:
        """In one transaction; returns why none of the operations was done, or None."""
        try:
            with self.begin(write=True) as transaction:
                for operation in operations:
                    self._do(transaction, operation)
        except (lmdb.Error, OSError) as error:
            if _tells_of_damage(error):
                self.damage = error
            return error
        return None

    def _do(self, transaction: lmdb.Transaction, operation: Operation) -> None:
        match operation:
            case Put(key, location, value):
                transaction.put(_key(key), msgspec.msgpack.encode(location), db=self._locations)
                if value is not None:
                    transaction.put(_key(key), value, db=self._values)
            case Delete(key):
                transaction.delete(_key(key), db=self._locations)
                transaction.delete(_key(key), db=self._values)
            case PutLease(number, bytes(blob)):
                transaction.put(_key(number), blob, db=self._leases)
            case PutLease(number):
                transaction.delete(_key(number), db=self._leases)

    def _find_large_values(self, operations: Sequence[Operation], outcomes: list[Outcome]) -> None:
        if self.map_start is None:
            return
        for place, operation in enumerate(operations):
            if not isinstance(operation, Put) or outcomes[place].error is not None:
                continue
            if operation.value is not None and len(operation.value) >= _LARGE_VALUE_BYTES:
                with self.begin(db=self._values, buffers=True) as transaction:
                    address = address_of(memoryview(transaction.get(_key(operation.key), b"")))
                outcomes[place] = Outcome(value_offset=address - self.map_start)


def may_be_short_write(error: Exception) -> bool:
    """Whether LMDB's error may mean that the drive took only a part of a write: it says EIO then, the first sign of a
    file system that fills up. The index is not damaged by that."""
    return getattr(error, "code", None) == errno.EIO


def _tells_of_damage(error: Exception) -> TypeGuard[lmdb.Error]:
    """Whether it is an error of LMDB's own, with a number below zero (lmdb.h), and not about room."""
    says_room = isinstance(error, (lmdb.MapFullError, lmdb.TxnFullError, lmdb.DbsFullError))
    return isinstance(error, lmdb.Error) and not says_room and getattr(error, "code", 0) < 0


def _pairs(transaction: _Transaction, table: _Database) -> Iterator[tuple[int, Any]]:
    """All pairs of a table, in order. The transaction decides whether values are copied or handed out in place."""
    last = b""
    num_found = 0
    for packed, value in transaction.cursor(table):
        key = bytes(packed)
        if len(key) != _KEY_BYTES or key <= last:  # a damaged tree may lead in circles
            raise DamagedBytesError("keys of eight bytes in order", f"{key.hex()} after {last.hex()}")
        last = key
        num_found += 1
        yield int.from_bytes(key, "big"), value
    if num_found != (num_expected := transaction.stat(table)["entries"]):
        raise DamagedBytesError(f"{num_expected} entries", f"{num_found}")


def _key(number: int) -> bytes:
    return struct.pack(">Q", number)  # big-endian: the order of keys is the order of their making
