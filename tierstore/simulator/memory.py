"""Memory without bytes, for the rules: who holds a storage, what is booked when, and which records have a slot."""

from __future__ import annotations

from collections import deque
from itertools import chain

from ..ledger.books import Books
from ..ledger.groups import Group, Grouping
from ..ledger.windows import HostWindows
from .record import GraphLog, SimulatedRecord


class SimulatedMemory:
    """A `Memory`, with the noted tensors and their booking. One graph at a time packs. Methods as `NotedTensors`',
    `Booking`'s and `StoreMemory`'s.

    Attributes:
        num_bytes: noted bytes, dead tensors included until their log ends.
        ended: logs of graphs that are gone.
        log: of the graph that packs now.
    """

    cached_bytes = 0

    @property
    def pages(self) -> SimulatedMemory:
        return self

    def __init__(self, windows: HostWindows) -> None:
        self.num_bytes = 0
        self.ended: deque[GraphLog] = deque()
        self.log: GraphLog | None = None
        self.books = Books[SimulatedRecord](windows, self, lambda record: record.log.is_sole_owner(record))
        self._has_returned = False

    # --- noted tensors and their booking ------------------------------------------------------------------------------

    def note(self, log: GraphLog, index: int) -> int:
        if not log.noted:
            self._drop_ended()
        new_bytes = log.note(index)
        self.num_bytes += new_bytes
        self.books.counters.packed_tensors += 1
        return new_bytes

    def join_if_booked(self, log: GraphLog, index: int) -> None:
        if log.unread_record_of(index) is not None:
            self._book(log, index)

    def book_settled(self) -> None:
        log = self.log
        if log is None or not self.num_bytes:
            return
        windows = self.books.windows
        grouping = Grouping[list[int]](windows.group_bytes, windows.member_bytes)
        by_storage: dict[int, list[int]] = {}
        for index in log.settled():
            if index in log.let_go:
                self._book(log, index)
            else:
                by_storage.setdefault(log.root_of(index), []).append(index)
        for indices in by_storage.values():
            self._sort_in(log, indices, grouping)
        for group in grouping.rest():
            self._book_group(log, group)
        log.num_sorted = len(log.records)

    def _sort_in(self, log: GraphLog, indices: list[int], grouping: Grouping[list[int]]) -> None:
        saved = log.saved[indices[0]]
        is_small = 0 < saved.nbytes <= grouping.largest_bytes
        if is_small and log.may_join(indices):
            group = grouping.add(indices, saved.nbytes, (saved.kind, log.place_of(indices[0])))
            if group is not None:
                self._book_group(log, group)
        elif not (is_small and log.may_join_later(indices)):
            for index in indices:
                self._book(log, index)

    def _book_group(self, log: GraphLog, group: Group[list[int]]) -> None:
        members = list(chain.from_iterable(group.parts))
        if len(group.parts) == 1:
            for index in members:
                self._book(log, index)
            return
        record = log.make_record(members[-1])
        record.become_group(members, group.nbytes)
        if log.plan is not None:
            log.plan.place_group(record, members, log.first_key)
        self.books.records[record.key] = record
        self.books.pending.settle((record,))
        for index in members:
            self._remove(log.take_out(index))
            log.come_in(index, record)

    def survey(self, log: GraphLog) -> None:
        """What others hold is booked, so that it is known to be."""
        for index in log.settled():
            if index not in log.let_go and (log.is_held(index) or log.has_record_in_place(index)):
                self._book(log, index)

    def _book(self, log: GraphLog, index: int) -> None:
        self._remove(log.take_out(index))
        if index in log.let_go:
            return
        record = log.unread_record_of(index)
        if record is not None:
            record.users.add(index)
        else:
            record = log.make_record(index)
            log.place(index, record)
            self.books.records[record.key] = record
            self.books.pending.settle((record,))
        log.come_in(index, record)

    def _remove(self, nbytes: int) -> None:
        self.num_bytes -= nbytes
        self.books.windows.keep_noted(self.num_bytes)

    def _drop_ended(self) -> None:
        while self.ended:
            log = self.ended.popleft()
            self._remove(sum(log.saved[root].nbytes for root in log.num_noted))
            log.end()

    # --- slots and jobs -----------------------------------------------------------------------------------------------

    @staticmethod
    def is_ours(record: SimulatedRecord) -> bool:
        return not record.is_in_place or record.log.is_sole_owner(record)

    @staticmethod
    def prepare_read(record: SimulatedRecord) -> None:
        record.slot = record

    @staticmethod
    def put_back(record: SimulatedRecord) -> bool:
        return True

    @staticmethod
    def free(record: SimulatedRecord) -> None:
        record.slot = None

    @staticmethod
    def begin_write(record: SimulatedRecord) -> int:
        record.is_read, record.held = True, record
        return record.nbytes

    @staticmethod
    def begin_read(record: SimulatedRecord) -> None:
        record.held = record

    @staticmethod
    def end_job(record: SimulatedRecord) -> None:
        record.held = None

    @staticmethod
    def has_moved(record: SimulatedRecord) -> bool:
        return False

    def let_go(self, record: SimulatedRecord) -> None:
        record.is_in_place = False

    # --- what has died ------------------------------------------------------------------------------------------------

    def give_back_lent(self) -> None:
        self._has_returned = True

    def take_back(self) -> None:
        self._has_returned = False

    def has_changed(self) -> bool:
        return bool(self.ended or self._has_returned)

    def catch_up(self) -> None:
        self._drop_ended()
        self.take_back()

    def _nothing(self, *_: object, **__: object) -> None:
        """There are no bytes that anything had to be done with."""

    trim = prepare_offload = disown = forget = give_up = _nothing
