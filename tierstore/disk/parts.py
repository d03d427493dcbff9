"""The parts of a record that lies on several drives: their bytes, their receipts, and how they are freed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from ..errors import CorruptDataError, StorageIOError
from .drive import QueuedDrive
from .tier import Loaded, Stored

__all__ = ["Part", "Parts", "free", "is_sound", "length_of", "loaded", "pieces", "results_of", "stored"]

_T = TypeVar("_T")


class Part(NamedTuple):
    """One drive's share of a record, or all of it. `key`: under which the drive has it."""

    drive: QueuedDrive
    key: int
    num_bytes: int


Parts = tuple[Part, ...]
"""All parts of a record, in the order of their bytes; each is on another drive."""


def length_of(parts: Parts) -> int:
    """The record's length."""
    return sum(part.num_bytes for part in parts)


def pieces(parts: Parts, memory: memoryview) -> Iterator[tuple[Part, memoryview]]:
    """Each part, and its bytes of the record."""
    start = 0
    for part in parts:
        yield part, memory[start : start + part.num_bytes]
        start += part.num_bytes


async def free(parts: Iterable[Part]) -> None:
    """Discard parts, of one or many records, on all their drives at once."""
    by_drive: dict[QueuedDrive, list[int]] = {}
    for part in parts:
        by_drive.setdefault(part.drive, []).append(part.key)
    await asyncio.gather(*(drive.discard(keys) for drive, keys in by_drive.items()))


async def is_sound(part: Part) -> bool:
    """Whether its bytes are not damaged, as far as they can be read."""
    try:
        await part.drive.read(part.key, memoryview(bytearray(part.num_bytes)))
    except (CorruptDataError, MemoryError, OverflowError):  # the latter two: the length is damaged
        return False
    except StorageIOError:
        pass  # it may be asked for again
    return True


def results_of(outcomes: Sequence[_T | BaseException]) -> list[_T]:
    """The results of calls that all have ended.

    Raises:
        What the first of them raised; CorruptDataError before all others, because it says that the record is lost.
    """
    errors = [each for each in outcomes if isinstance(each, BaseException)]
    if errors:
        raise next((each for each in errors if isinstance(each, CorruptDataError)), errors[0])
    return [each for each in outcomes if not isinstance(each, BaseException)]


def stored(receipts: Sequence[Stored]) -> Stored:
    """The receipt of a record, from those of its parts. Its codec is that of the part which takes most room."""
    return Stored(
        sum(receipt.stored_bytes for receipt in receipts),
        max(receipts, key=lambda receipt: receipt.stored_bytes).codec,
        receipts[0].kind,
        checksum=None,
        drive_seconds=_longest(receipt.drive_seconds for receipt in receipts),
        cpu_seconds=sum(receipt.cpu_seconds or 0.0 for receipt in receipts),
    )


def loaded(receipts: Sequence[Loaded]) -> Loaded:
    """The receipt of a read, from those of the parts."""
    return Loaded(
        sum(receipt.read_bytes for receipt in receipts),
        drive_seconds=_longest(receipt.drive_seconds for receipt in receipts),
        cpu_seconds=sum(receipt.cpu_seconds or 0.0 for receipt in receipts),
    )


def _longest(seconds: Iterable[float | None]) -> float | None:
    """The drives work at the same time, so their times do not add up."""
    return max((each for each in seconds if each is not None), default=None)
