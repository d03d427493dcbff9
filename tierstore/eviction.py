"""Which record leaves host memory next. Pure: keys in, keys out, no bytes, no clock.

Backward needs last what forward saved first, so what was saved first leaves first (farthest next use). What is on
disk already costs nothing to drop and goes before anything that would have to be written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from .handle import Record

__all__ = ["EvictionOrder"]


class EvictionOrder:
    """The records that may leave, in the order in which they should. Every operation takes constant time."""

    def __init__(self) -> None:
        self._dirty: OrderedDict[int, Record] = OrderedDict()  # in memory only, oldest first
        self._clean: OrderedDict[int, Record] = OrderedDict()  # on disk too, needed last first
        self._used: OrderedDict[int, Record] = OrderedDict()  # on disk too, and asked for already

    def add_dirty(self, record: Record) -> None:
        """The record is in memory only; it was saved after every record that is here already."""
        self._dirty[record.key] = record

    def add_dirty_again(self, record: Record) -> None:
        """The record was on its way out and stays after all: it is needed soon, so it leaves last."""
        self._dirty[record.key] = record
        self._dirty.move_to_end(record.key)

    def add_failed(self, record: Record) -> None:
        """The record could not be written: it is still the first to go."""
        self._dirty[record.key] = record
        self._dirty.move_to_end(record.key, last=False)

    def add_clean(self, record: Record) -> None:
        """The record was restored; records are restored in the order in which they are needed."""
        self._clean[record.key] = record
        self._clean.move_to_end(record.key, last=False)

    def use(self, record: Record) -> None:
        """The record was asked for: whatever is still to be asked for is worth more."""
        self._clean.pop(record.key, None)
        self._used[record.key] = record

    def remove(self, record: Record) -> None:
        """The record may not leave any more, or has left."""
        key = record.key
        if self._dirty.pop(key, None) is None and self._used.pop(key, None) is None:
            self._clean.pop(key, None)

    def next_clean(self) -> Record | None:
        """What to drop next of what is on disk already; None where there is nothing."""
        for queue in (self._used, self._clean):
            if queue:
                return next(iter(queue.values()))
        return None

    def next_dirty(self) -> Record | None:
        """What to write next; None where there is nothing."""
        return next(iter(self._dirty.values()), None)

    def __iter__(self) -> Iterator[Record]:
        yield from self._used.values()
        yield from self._clean.values()
        yield from self._dirty.values()

    def __len__(self) -> int:
        return len(self._used) + len(self._clean) + len(self._dirty)
