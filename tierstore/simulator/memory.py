"""Memory without bytes, for the rules: who holds a storage, what is booked when, and which records have a slot."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain

from ..rules.device import DeviceRules
from ..rules.groups import DEVICE_ALIGNMENT_BYTES, Group, Grouping
from ..rules.ledger import Ledger
from ..rules.windows import NUM_MEMBERS, HostWindows
from .record import GraphLog, SimulatedRecord


def _grouping_on_device(group_bytes: int) -> Grouping[list[int]]:
    return Grouping(group_bytes, group_bytes // NUM_MEMBERS, DEVICE_ALIGNMENT_BYTES)


class SimulatedMemory:
    """A `Memory`, with the noted tensors and their booking. One graph at a time packs. Methods as `NotedTensors`',
    `Booking`'s and `StoreMemory`'s.

    Attributes:
        num_bytes: noted bytes, dead tensors included until their log ends.
        ended: logs of graphs that are gone.
        dead: tracked tensors that the graph has let go of, and that nobody has accounted for yet.
        log: of the graph that packs now.
    """

    cached_bytes = 0

    @property
    def pages(self) -> SimulatedMemory:
        return self

    def __init__(self, windows: HostWindows, device: DeviceRules[SimulatedRecord]) -> None:
        self.num_bytes = 0
        self.ended: deque[GraphLog] = deque()
        self.dead: deque[tuple[GraphLog, int]] = deque()
        self.log: GraphLog | None = None
        self.ledger = Ledger[SimulatedRecord](windows, self, lambda record: record.log.is_sole_owner(record))
        self._device = device
        self._has_returned = False

    # --- noted tensors and their booking ------------------------------------------------------------------------------

    def note(self, log: GraphLog, index: int) -> int:
        self._begin(log)
        log.note(index)
        new_bytes = log.enter_noted(index)
        self.num_bytes += new_bytes
        self.ledger.counters.packed_tensors += 1
        return new_bytes

    def _begin(self, log: GraphLog) -> None:
        if not (log.noted or log.tracked):
            self._drop_ended()

    def track(self, log: GraphLog, index: int) -> None:
        self._begin(log)
        if log.track(index):
            self._device.window.resident.used_bytes += log.saved[index].nbytes
        self.ledger.counters.packed_tensors += 1

    def book_tracked(self, log: GraphLog, group_bytes: int) -> None:
        log.leave_none()
        self._book_sorted(log, log.settled(log.tracked), _grouping_on_device(group_bytes), may_wait=False)
        if not log.tracks:
            for index in log.tracked:
                log.let_leave(index)

    def book_leaving(self, log: GraphLog, group_bytes: int, *, may_wait: bool = True) -> None:
        leaving = [index for index in log.leave_none() if index in log.tracked]
        self._book_sorted(log, log.settled(leaving), _grouping_on_device(group_bytes), may_wait=may_wait)
        for index in leaving:
            if index in log.tracked:
                log.let_leave(index)
        log.num_sorted = len(log.records)

    def join_if_booked(self, log: GraphLog, index: int) -> None:
        if log.unread_record_of(index) is not None:
            self._book(log, index)

    def join(self, log: GraphLog, index: int) -> SimulatedRecord | None:
        """The record that a tensor on the device, just packed, is a view of; None: of none."""
        record = log.unread_record_of(index)
        if record is not None:
            self.ledger.counters.packed_tensors += 1
        return record

    def book_settled(self) -> None:
        log = self.log
        if log is None or not self.num_bytes:
            return
        windows = self.ledger.windows
        self._book_sorted(log, log.settled(log.noted), Grouping(windows.group_bytes, windows.member_bytes))
        log.num_sorted = len(log.records)

    def _book_sorted(
        self, log: GraphLog, among: Iterable[int], grouping: Grouping[list[int]], *, may_wait: bool = True
    ) -> None:
        by_storage: dict[int, list[int]] = {}
        for index in among:
            if index in log.let_go:
                self._book(log, index)
            else:
                by_storage.setdefault(log.root_of(index), []).append(index)
        for indices in by_storage.values():
            self._sort_in(log, indices, grouping, may_wait=may_wait)
        for group in grouping.rest():
            self._book_group(log, group)

    def _sort_in(self, log: GraphLog, indices: list[int], grouping: Grouping[list[int]], *, may_wait: bool) -> None:
        saved = log.saved[indices[0]]
        is_small = 0 < saved.nbytes <= grouping.largest_bytes
        if is_small and log.may_join(indices):
            group = grouping.add(indices, saved.nbytes, (saved.kind, log.place_of(indices[0])))
            if group is not None:
                self._book_group(log, group)
        elif not (is_small and may_wait and log.may_join_later(indices)):
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
        self.ledger.records[record.key] = record
        self.ledger.pending.settle((record,))
        for index in members:
            self._take_out(log, index)
            log.come_in(index, record)

    def survey(self, log: GraphLog) -> None:
        """What others hold is booked, so that it is known to be."""
        for index in log.settled({**log.noted, **log.tracked}):
            if index not in log.let_go and (log.is_held(index) or log.has_record_in_place(index)):
                self._book(log, index)

    def _book(self, log: GraphLog, index: int) -> None:
        self._take_out(log, index)
        if index in log.let_go:
            return
        record = log.unread_record_of(index)
        if record is not None:
            record.users.add(index)
        else:
            record = log.make_record(index)
            log.place(index, record)
            self.ledger.records[record.key] = record
            self.ledger.pending.settle((record,))
        log.come_in(index, record)

    def _take_out(self, log: GraphLog, index: int) -> None:
        if log.saved[index].on_device:
            self._untrack(log, index)
        else:
            self._remove(log.take_out_noted(index))

    def _untrack(self, log: GraphLog, index: int) -> None:
        log.take_out(index, log.tracked)
        self._device.window.resident.used_bytes -= log.uncharge(index)

    def _remove(self, nbytes: int) -> None:
        self.num_bytes -= nbytes
        self.ledger.windows.keep_noted(self.num_bytes)

    def _drop_ended(self) -> None:
        while self.ended:
            log = self.ended.popleft()
            self._remove(sum(log.saved[root].nbytes for root in log.num_noted))
            log.end()
        while self.dead:
            log, index = self.dead.popleft()
            if index in log.tracked:
                self._untrack(log, index)

    # --- slots and jobs -----------------------------------------------------------------------------------------------

    @staticmethod
    def is_ours(record: SimulatedRecord) -> bool:
        return not record.is_in_place or record.log.is_sole_owner(record)

    def trim(self, *, is_for_read: bool = False) -> None: ...

    @staticmethod
    def prepare_offload(record: SimulatedRecord) -> None:
        record.is_in_place, record.is_read, record.slot = False, True, record

    @staticmethod
    def prepare_read(record: SimulatedRecord) -> None:
        record.slot = record

    @staticmethod
    def put_back(record: SimulatedRecord) -> bool:
        return True

    def free(self, record: SimulatedRecord) -> None:
        slot, record.slot = record.slot, None
        if slot is not None and record.ready is not None:
            self._device.when_copied(record.ready, self.trim)

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

    def disown(self, record: SimulatedRecord) -> None: ...

    def forget(self, record: SimulatedRecord) -> None:
        record.has_device_bytes = False

    def let_go(self, record: SimulatedRecord) -> None:
        record.is_in_place = record.has_device_bytes = False

    # --- what has died ------------------------------------------------------------------------------------------------

    def give_back_lent(self) -> None:
        self._has_returned = True

    def take_back(self) -> None:
        self._has_returned = False

    def has_changed(self) -> bool:
        return bool(self.ended or self.dead or self._has_returned)

    def catch_up(self) -> None:
        self._drop_ended()
        self.take_back()

    def give_up(self) -> None: ...
