"""The operations of an index, and their outcomes. Plain values."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .location import Location

__all__ = ["Delete", "DeleteLease", "Entries", "Fetch", "Operation", "Outcome", "Put", "PutLease"]


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
    """Enter a lease, or replace it."""

    number: int
    blob: bytes


class DeleteLease(NamedTuple):
    """Remove a lease."""

    number: int


Operation = Put | Delete | Fetch | PutLease | DeleteLease


class Outcome(NamedTuple):
    """The outcome of an operation.

    Attributes:
        error: None if it succeeded; otherwise nothing of it was done.
        value_offset: where a large value that was put lies in the index's file, for good (LMDB does not move overflow
            pages). Reads from there run at the disk's speed; through cold pages of the map they ran at 0.04-0.5 GB/s.
    """

    error: Exception | None = None
    value_offset: int | None = None


class Entries(NamedTuple):
    """All entries of an index.

    Attributes:
        locations: key -> where the record lies.
        leases: number -> bytes.
        unreadable: keys whose location makes no sense, whose value is missing or of another length, or that have a
            value and no location.
    """

    locations: dict[int, Location]
    leases: dict[int, bytes]
    unreadable: list[int]
