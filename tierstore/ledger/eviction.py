"""Which record leaves host memory next. Pure: keys in, keys out, no bytes, no clock.

The record that is needed last leaves first (farthest next use). Unless the order of use is known, that is the one that
forward saved first. A record that is on disk already costs nothing to drop."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from typing import Generic

from .plan import PlannedTier
from .record import R, RuledRecord

_KEY_BITS = 64
_KEY_MASK = (1 << _KEY_BITS) - 1


def _rank_of(record: RuledRecord) -> int:
    """Priority, then key, as one number: a pair would be one more object per record for the garbage collector."""
    return record.priority << _KEY_BITS | record.key


class EvictionOrder(Generic[R]):
    """The records that may leave, in the order in which they should. Operations take O(log n) at most, amortised.

    They may leave by being written (*dirty*) or, once on disk, by being dropped (*clean*, and *used* once they were
    asked for). Each `next_` gives the first of its kind, or None. The store becomes the sole owner of records in
    another order than they were saved in; their priority tells when they are needed."""

    def __init__(self) -> None:
        self._dirty: dict[int, R] = {}  # in memory only
        self._ranks: list[int] = []  # a heap of the ranks of `_dirty`, and of some that have left
        self.leaving: OrderedDict[int, R] = OrderedDict()  # those of `_dirty` that the plan sends to disk
        self._asked: OrderedDict[int, R] = OrderedDict()  # in memory only, asked for on their way out
        self._clean: OrderedDict[int, R] = OrderedDict()  # on disk too, needed last first
        self._used: OrderedDict[int, R] = OrderedDict()  # on disk too, and asked for already

    @property
    def queues(self) -> dict[str, Mapping[int, R]]:
        """All that is in it, by kind and key, for `validation.py`: `leaving` has some of `dirty`."""
        return {
            "dirty": self._dirty,
            "leaving": self.leaving,
            "asked": self._asked,
            "clean": self._clean,
            "used": self._used,
        }

    def add_dirty(self, record: R) -> None:
        self._dirty[record.key] = record
        heappush(self._ranks, record.priority << _KEY_BITS | record.key)  # as `_rank_of`, without its call
        if record.planned is PlannedTier.DISK:
            self.leaving[record.key] = record
        if len(self._ranks) > 2 * len(self._dirty) + 64:
            self._ranks = sorted(_rank_of(dirty) for dirty in self._dirty.values())

    def add_asked(self, record: R) -> None:
        """The record was on its way out and stays after all: it is needed soon, so it leaves last."""
        self._asked[record.key] = record

    def add_clean(self, record: R) -> None:
        """The record was restored; records are restored in the order in which they are needed."""
        self._clean[record.key] = record
        self._clean.move_to_end(record.key, last=False)

    def add_next(self, record: R) -> None:
        """The record is in use, and will be asked for again before any other: of the clean ones it leaves last."""
        if record.key not in self._used:
            self._clean.setdefault(record.key, record)

    def use(self, record: R) -> None:
        """The record was asked for, so records that are still to be asked for have a higher priority."""
        self._clean.pop(record.key, None)
        self._used[record.key] = record
        self._used.move_to_end(record.key)

    def want_again(self, record: R) -> None:
        """The record will be asked for again, if it was already."""
        if self._used.pop(record.key, None) is not None:
            self.add_clean(record)

    def is_clean(self, record: R) -> bool:
        return record.key in self._clean

    def remove(self, record: R) -> None:
        for queue in (self._dirty, self.leaving, self._asked, self._clean, self._used):
            if record.key in queue:
                del queue[record.key]

    def next_used(self) -> R | None:
        return next(iter(self._used.values()), None)

    def first_used(self, is_free: Callable[[R], bool]) -> R | None:
        return next(filter(is_free, self._used.values()), None)

    def next_clean(self) -> R | None:
        return self.next_used() or next(iter(self._clean.values()), None)

    def next_dirty(self, *, may_be_asked: bool = True) -> R | None:
        while self._ranks:
            if (record := self._dirty.get(self._ranks[0] & _KEY_MASK)) is not None:
                return record
            heappop(self._ranks)
        return next(iter(self._asked.values()), None) if may_be_asked else None

    def next_leaving(self) -> R | None:
        while self.leaving:
            key, record = next(iter(self.leaving.items()))
            if record.planned is PlannedTier.DISK:
                return record
            del self.leaving[key]  # backward has begun: the record need not leave any more
        return None
