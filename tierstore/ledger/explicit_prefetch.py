"""Records named explicitly, to `TierStore.prefetch`, and the order in which they are fetched as room becomes free.
Pure.

A list is treated like the lookahead of a backward (`lookahead.py`): records that were handed over leave first, and the
list goes on in their room. A later list comes after the unfetched rest of earlier ones; a record in both keeps its
place. So successive lists, and lists that overlap (the next six before each `get`), come in the order of naming.

A backward that looks ahead goes first. While it waits for room, nothing is fetched explicitly. Records fetched
explicitly make way for it, and are fetched again later. Records that make way for a pack are not fetched again:
otherwise lists that nobody asks for any more would take the room of one pack after the other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic

from .lookahead import PrefetchDepth
from .record import R


class ExplicitPrefetch(Generic[R]):
    """Records that were named and not asked for since. Keeps no bytes alive: a record does not hold its bytes. Only
    those can be forgotten, or come back, for which it `is_used`: any was ever named.

    `peek`, `advance` and `depth` (always far) are like `Lookahead`'s. Every operation takes constant time, except
    `last_fetched`."""

    def __init__(self) -> None:
        self.depth = PrefetchDepth()
        self.is_used = False
        self.waiting: OrderedDict[int, R] = OrderedDict()  # to be fetched, in this order
        self._fetched: dict[int, R] = {}  # dealt with, in this order

    def name(self, record: R) -> None:
        self.is_used = True
        if record.key not in self.waiting:
            self._fetched.pop(record.key, None)
            self.waiting[record.key] = record

    def peek(self) -> R | None:
        return next(iter(self.waiting.values()), None)

    def advance(self, fetched_bytes: int) -> None:
        key, record = self.waiting.popitem(last=False)
        self._fetched[key] = record

    def come_back_for(self, record: R) -> None:
        """Make the record the next to fetch, if it was fetched: it has made way for another one."""
        if self._fetched.pop(record.key, None) is not None:
            self.waiting[record.key] = record
            self.waiting.move_to_end(record.key, last=False)

    def remove_fetched(self, record: R) -> None:
        self._fetched.pop(record.key, None)

    def remove(self, record: R) -> bool:
        was_waiting = self.waiting.pop(record.key, None) is not None
        return self._fetched.pop(record.key, None) is not None or was_waiting

    def last_fetched(self, is_meant: Callable[[R], bool]) -> R | None:
        return next(filter(is_meant, reversed(self._fetched.values())), None)

    def has_fetched(self, record: R) -> bool:
        return record.key in self._fetched

    def clear(self) -> None:
        self.waiting.clear()
        self._fetched.clear()
