"""The index in LMDB: where every record lies, and the small records themselves. Blocking calls.

Three tables: `locations` (key → `Location`, msgpack), `values` (key → encoded bytes, for records without an extent) and
`leases` (number → bytes, whose meaning is the owner's). With `lock=False` a write transaction of LMDB may reuse pages
that a reader still uses (lmdb.h, MDB_NOLOCK), so calls must not overlap; the owner of an index makes one at a time."""

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

from .codec.family import DamagedBytesError
from .environment import Environment
from .free_pages import give_back_free_pages
from .linux import address_of, open_unnamed
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

    from .environment import Transaction


_LARGE_VALUE_BYTES = 64 * 2**10
_ROOM_FOR_A_COMMIT_BYTES = 2**20
_MOST_TRIES = 8  # of a commit that finds the drive full though it shows room: others fill and free it meanwhile
_KEY_BYTES = 8


class Index:
    """Three tables in one LMDB environment. Every method blocks; no two calls may overlap.

    It closes `file`, from which large values are read where they lie. `map_bytes`, and what it raises: see
    `Environment`.

    Attributes:
        map_bytes: the length of the map.
        allocated_bytes: the space that it takes on disk, as of the last `apply` or the opening.
        damage: LMDB's error about damaged pages: after it, changes fail as long as the file is used.
    """

    def __init__(self, file: io.FileIO, map_bytes: int) -> None:
        self.damage: lmdb.Error | None = None
        self._lmdb = Environment(file, map_bytes)
        self.file, self.inode, self.map_bytes = file, self._lmdb.inode, self._lmdb.map_bytes
        self.begin, self.try_to_write, self.close = self._lmdb.begin, self._lmdb.try_to_write, self._lmdb.close
        self.descriptors = self._lmdb.descriptors
        self._note_allocated()

    @classmethod
    def without_name(cls, directory: Path, map_bytes: int) -> Index:
        return cls(io.FileIO(open_unnamed(directory), "r+"), map_bytes)

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
                locations = {key: decoder.decode(packed) for key, packed in _pairs(transaction, self._lmdb.locations)}
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise DamagedBytesError("locations", str(error)) from error
            leases = dict(_pairs(transaction, self._lmdb.leases))
        with self.begin(buffers=True) as looking:
            self._check_values(looking, locations)
        return locations, leases

    def give_back_free_pages(self) -> None:
        """Give the space of deleted entries and values back to the drive, if its file system can make holes."""
        try:
            give_back_free_pages(self.file.fileno())
        finally:
            self._note_allocated()

    def _note_allocated(self) -> None:
        self.allocated_bytes = os.fstat(self.file.fileno()).st_blocks * 512

    def _check_values(self, looking: Transaction, locations: dict[int, Location]) -> None:
        """Each value must be its record's, and each record must have its own; notes where large ones lie. Reads none: a
        cursor of a transaction with buffers only tells where each lies."""
        lengths = {key: location.encoded_bytes for key, location in locations.items() if location.segment is None}
        for key, value in _pairs(looking, self._lmdb.values):
            if len(value) != (expected := lengths.pop(key, None)):
                raise DamagedBytesError(f"{expected} bytes of record {key}", f"{len(value)}")
            if len(value) >= _LARGE_VALUE_BYTES and self._lmdb.map_start is not None:
                offset = address_of(memoryview(value)) - self._lmdb.map_start
                locations[key] = msgspec.structs.replace(locations[key], offset=offset)
        if lengths:
            raise DamagedBytesError(f"values of the records {sorted(lengths)[:10]}", "none")

    def _outcome_of_fetch(self, fetch: Fetch) -> Outcome:
        try:
            with self.begin(buffers=True) as transaction:
                value = transaction.get(_key(fetch.key), db=self._lmdb.values)
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
                transaction.put(_key(key), msgspec.msgpack.encode(location), db=self._lmdb.locations)
                if value is not None:
                    transaction.put(_key(key), value, db=self._lmdb.values)
            case Delete(key):
                transaction.delete(_key(key), db=self._lmdb.locations)
                transaction.delete(_key(key), db=self._lmdb.values)
            case PutLease(number, bytes(blob)):
                transaction.put(_key(number), blob, db=self._lmdb.leases)
            case PutLease(number):
                transaction.delete(_key(number), db=self._lmdb.leases)

    def _find_large_values(self, operations: Sequence[Operation], outcomes: list[Outcome]) -> None:
        if self._lmdb.map_start is None:
            return
        for place, operation in enumerate(operations):
            if not isinstance(operation, Put) or outcomes[place].error is not None:
                continue
            if operation.value is not None and len(operation.value) >= _LARGE_VALUE_BYTES:
                with self.begin(buffers=True) as transaction:
                    address = address_of(memoryview(transaction.get(_key(operation.key), b"", db=self._lmdb.values)))
                outcomes[place] = Outcome(value_offset=address - self._lmdb.map_start)


def may_be_short_write(error: Exception) -> bool:
    """Whether LMDB's error may mean that the drive took only a part of a write: it says EIO then, the first sign of a
    file system that fills up. The index is not damaged by that."""
    return getattr(error, "code", None) == errno.EIO


def _tells_of_damage(error: Exception) -> TypeGuard[lmdb.Error]:
    """Whether it is an error of LMDB's own, with a number below zero (lmdb.h), and not about room."""
    says_room = isinstance(error, (lmdb.MapFullError, lmdb.TxnFullError, lmdb.DbsFullError))
    return isinstance(error, lmdb.Error) and not says_room and getattr(error, "code", 0) < 0


def _pairs(transaction: Transaction, table: _Database) -> Iterator[tuple[int, Any]]:
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
