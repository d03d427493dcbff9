"""What is to be moved: entered here by the rules, and taken by the worker when it has room. Pure.

Nothing is pushed. The worker takes what is most urgent at that moment: reads that a thread waits for, then reads ahead
of backward, then writes, each in the order in which they were entered. A job that was not taken can be withdrawn.

NOTE [Small writes wait]
By the time that there are many small records to write, most of what a small graph saves was asked for again, or is
gone. So the worker is not woken for them before they are many, or a thread waits. They stay in staging, which counts
them anyway."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple

from .record import R
from .windows import SMALL_BYTES

_MOST_SMALL_BYTES = 2**20
_MOST_SMALL = 1024


class Write(NamedTuple, Generic[R]):
    """A record to be written. `memory`: what the worker needs for it, as `Memory.begin_write` gives it."""

    record: R
    memory: Any = None


class Read(NamedTuple, Generic[R]):
    """A record to be read. `memory`: the same, of `Memory.begin_read`."""

    record: R
    memory: Any = None


class Discard(NamedTuple):
    """Keys of records to be freed on disk."""

    keys: Sequence[int]


Job = Write[R] | Read[R] | Discard


class Room(NamedTuple):
    """How many more jobs of each kind the worker can begin; one discard frees any number of records."""

    writes: int
    reads: int
    discards: int


class Jobs(Generic[R]):
    """Guarded by the store's lock.

    Attributes:
        has_news: something was entered that the worker could begin, and it has not been woken since. Where it has no
            room, it will look by itself when a job ends.
        has_progress: something was freed, has ended or was withdrawn since waiting threads were told.
        running: records that a job works on.
        num_writes, num_reads, num_discards: jobs that were entered or are running, also of records that are gone.
    """

    def __init__(self) -> None:
        self.has_news = self.has_progress = False
        self.running: set[R] = set()
        self.num_writes = self.num_reads = self.num_discards = 0
        self._free_writes = self._free_reads = self._free_discards = 1  # left of the room, when the worker looked last
        self._writes: OrderedDict[int, R] = OrderedDict()
        self._small_writes: OrderedDict[int, R] = OrderedDict()
        self._small_bytes = 0
        self._demanded_reads: OrderedDict[int, R] = OrderedDict()
        self._reads_ahead: OrderedDict[int, R] = OrderedDict()
        self._discards: list[int] = []

    @property
    def num_all(self) -> int:
        return self.num_writes + self.num_reads + self.num_discards

    def write(self, record: R) -> None:
        self.num_writes += 1
        if record.nbytes > SMALL_BYTES:
            self._writes[record.key] = record
            self.has_news |= self._free_writes > 0
            return
        self._small_writes[record.key] = record
        self._small_bytes += record.nbytes
        if self._small_bytes > _MOST_SMALL_BYTES or len(self._small_writes) >= _MOST_SMALL:
            self.hurry()

    def hurry(self) -> None:
        """Hold nothing back: a thread waits, or wants to see progress."""
        self.has_news |= bool(self._discards) and self._free_discards > 0
        if self._small_writes:
            self._writes.update(self._small_writes)
            self._small_writes.clear()
            self._small_bytes = 0
            self.has_news |= self._free_writes > 0

    def read(self, record: R, *, demanded: bool) -> None:
        self.num_reads += 1
        (self._demanded_reads if demanded else self._reads_ahead)[record.key] = record
        self.has_news |= self._free_reads > 0

    def demand(self, record: R) -> None:
        """A thread waits for a read that was entered: it overtakes the others, unless it has begun."""
        if self._reads_ahead.pop(record.key, None) is not None:
            self._demanded_reads[record.key] = record

    def discard(self, key: int) -> None:
        self.num_discards += 1
        self._discards.append(key)
        self.has_news |= self._free_discards > 0 and not self.running  # else there will be a turn soon

    def withdraw_write(self, record: R) -> None:
        """It was not begun, and need not be."""
        self.num_writes -= 1
        self.has_progress = True
        if self._writes.pop(record.key, None) is None and self._small_writes.pop(record.key, None) is not None:
            self._small_bytes -= record.nbytes

    def withdraw_read(self, record: R) -> None:
        self.num_reads -= 1
        if self._demanded_reads.pop(record.key, None) is None:
            self._reads_ahead.pop(record.key, None)

    def take(self, room: Room) -> tuple[list[R], list[R], list[int]]:
        """Take what the worker has room for: records to read, records to write, and keys to discard."""
        self.has_news = False
        reads: list[R] = []
        for waiting in (self._demanded_reads, self._reads_ahead):
            while waiting and len(reads) < room.reads:
                reads.append(waiting.popitem(last=False)[1])
        writes: list[R] = []
        while self._writes and len(writes) < room.writes:
            writes.append(self._writes.popitem(last=False)[1])
        discards: list[int] = []
        if room.discards:
            discards, self._discards = self._discards, discards
        self._free_writes, self._free_reads = room.writes - len(writes), room.reads - len(reads)
        self._free_discards = room.discards - bool(discards)
        return reads, writes, discards

    def clear(self) -> None:
        """The store is closed: nothing more is begun."""
        for waiting in (self._writes, self._small_writes, self._demanded_reads, self._reads_ahead):
            waiting.clear()
        self._small_bytes = 0
        self._discards.clear()
