"""What was named by hand, to `TierStore.prefetch`: in which order it is fetched as room is freed. Pure.

A list is treated as the lookahead of a backward is (`lookahead.py`): what was handed over leaves first, and the list
goes on into its room. A further list goes behind what is still to be fetched of earlier ones, and what both name keeps
its place: so successive lists, and lists that overlap (the next six before each `get`), come in the order of naming.

A backward that looks ahead goes first: while it waits for room nothing is fetched by hand, and what was fetched by hand
makes way for it, to be fetched again later. What makes way for a pack is not fetched again: lists that nobody asks for
any more would take the room of one pack after the other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from .lookahead import Keyed
from .reach import Reach

__all__ = ["ByHand"]

R = TypeVar("R", bound=Keyed)


class ByHand(Generic[R]):
    """Records that were named and not asked for since. None is kept alive: a record does not hold its bytes.

    `peek`, `advance` and `reach` are as `Lookahead`'s. Every operation takes constant time, but for `last_fetched`.

    Attributes:
        reach: all room that there is.
    """

    def __init__(self) -> None:
        self.reach = Reach()
        self._waiting: OrderedDict[int, R] = OrderedDict()  # to be fetched, in this order
        self._fetched: dict[int, R] = {}  # dealt with, in this order

    def name(self, record: R) -> None:
        """The record will be asked for, after all that were named before."""
        if record.key not in self._waiting:
            self._fetched.pop(record.key, None)
            self._waiting[record.key] = record

    def peek(self) -> R | None:
        """The next record to fetch; None: nothing is left."""
        return next(iter(self._waiting.values()), None)

    def advance(self, fetched_bytes: int) -> None:
        """The record that `peek` named was dealt with."""
        key, record = self._waiting.popitem(last=False)
        self._fetched[key] = record

    def come_back_for(self, record: R) -> None:
        """The record has made way for another one: if it was fetched, it is the next to fetch."""
        if self._fetched.pop(record.key, None) is not None:
            self._waiting[record.key] = record
            self._waiting.move_to_end(record.key, last=False)

    def forget_fetched(self, record: R) -> None:
        """The record has left memory: if it was fetched, it is not fetched again."""
        self._fetched.pop(record.key, None)

    def forget(self, record: R) -> bool:
        """The record was asked for, or is gone; whether it had been named."""
        was_waiting = self._waiting.pop(record.key, None) is not None
        return self._fetched.pop(record.key, None) is not None or was_waiting

    def last_fetched(self, is_meant: Callable[[R], bool]) -> R | None:
        """Of those that were fetched and are meant, the one that was named last; None where there is none."""
        return next(filter(is_meant, reversed(self._fetched.values())), None)

    def has_fetched(self, record: R) -> bool:
        """Whether the record was dealt with, and not asked for since."""
        return record.key in self._fetched

    def clear(self) -> None:
        """Forget all."""
        self._waiting.clear()
        self._fetched.clear()
