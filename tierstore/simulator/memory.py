"""Memory without bytes, for the rules: who holds a storage, and which records have a slot."""

from __future__ import annotations

from collections import deque

from ..rules.ledger import Ledger
from ..rules.windows import HostWindows
from .device import SimulatedDevice
from .record import GraphLog, SimulatedRecord

__all__ = ["SimulatedBooking", "SimulatedMemory", "SimulatedNoted", "is_sole_owner"]


def is_sole_owner(record: SimulatedRecord) -> bool:
    """Whether only records hold its storage."""
    return record.log.is_sole_owner(record)


class SimulatedNoted:
    """See `NotedTensors`.

    Args:
        windows: the windows of host memory; part of the noted bytes may be charged there.

    Attributes:
        num_bytes: noted bytes, dead tensors included until their log ends.
        ended: logs of graphs that are gone.
    """

    def __init__(self, windows: HostWindows) -> None:
        self._windows = windows
        self.num_bytes = 0
        self.ended: deque[GraphLog] = deque()

    def add(self, nbytes: int) -> None:
        """Note a tensor."""
        self.num_bytes += nbytes

    def remove(self, nbytes: int) -> None:
        """A tensor is not just noted any more."""
        self.num_bytes -= nbytes
        self._windows.keep_noted(self.num_bytes)

    def drop_ended(self) -> None:
        """What was only noted in a log that has ended is not counted any more, and what was seen is learned."""
        while self.ended:
            log = self.ended.popleft()
            self.remove(sum(log.saved[index].nbytes for index in log.noted))
            log.end()


class SimulatedBooking:
    """See `Booking`. One graph at a time packs.

    Args:
        ledger: receives the records that are booked.
        noted: see above.

    Attributes:
        noted: as above.
    """

    def __init__(self, ledger: Ledger[SimulatedRecord], noted: SimulatedNoted) -> None:
        self.noted = noted
        self._ledger = ledger
        self._log: GraphLog | None = None  # that packs now

    def begin_graph(self, log: GraphLog) -> None:
        """From now on, that graph packs."""
        self._log = log

    def note(self, log: GraphLog, index: int) -> None:
        """Note tensor `index` of the log. See `NotedTensors.add`."""
        if not log.noted:
            self.noted.drop_ended()
        log.note(index)
        self.noted.add(log.saved[index].nbytes)
        self._ledger.counters.packed_tensors += 1

    def join_if_booked(self, log: GraphLog, index: int) -> None:
        if log.unread_record_of(index) is not None:
            self._book(log, index)

    def join(self, log: GraphLog, index: int) -> SimulatedRecord | None:
        """The record that a tensor on the device, just packed, is a view of; None: of none."""
        record = log.unread_record_of(index)
        if record is not None:
            self._ledger.counters.packed_tensors += 1
        return record

    def register(self, log: GraphLog, index: int) -> SimulatedRecord:
        """Make the record of a tensor on the device."""
        record = log.make_record(index)
        self._ledger.register(record)
        return record

    def book_settled(self) -> None:
        """Make records of all that may be read."""
        if self._log is not None:
            for index in self._log.settled():
                self._book(self._log, index)

    def survey(self, log: GraphLog) -> None:
        """See `Booking`: what others hold is booked, so that it is known to be."""
        for index in log.settled():
            if index not in log.let_go and (log.is_held(index) or log.has_record_in_place(index)):
                self._book(log, index)

    def _book(self, log: GraphLog, index: int) -> None:
        log.take_out(index)
        self.noted.remove(log.saved[index].nbytes)
        if index in log.let_go:
            return
        record = log.unread_record_of(index)
        if record is not None:
            record.users.add(index)
            log.come_in(index, record)
            return
        record = log.make_record(index)
        log.place(index, record)
        self._ledger.records[record.key] = record
        self._ledger.pending.settle((record,))
        log.come_in(index, record)


class SimulatedMemory:
    """A `Memory`.

    Args:
        booking: makes records of noted tensors.
        device: the records on the accelerator, whose copies may still use a slot.
    """

    cached_bytes = 0

    def __init__(self, booking: SimulatedBooking, device: SimulatedDevice) -> None:
        self._noted = booking.noted
        self._device = device
        self._has_returned = False
        self.book_settled = booking.book_settled

    @staticmethod
    def is_ours(record: SimulatedRecord) -> bool:
        return not record.is_in_place or is_sole_owner(record)

    def trim(self, *, is_for_read: bool = False) -> None: ...

    # --- slots --------------------------------------------------------------------------------------------------

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

    # --- jobs ---------------------------------------------------------------------------------------------------

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

    # --- tensors ------------------------------------------------------------------------------------------------

    def disown(self, record: SimulatedRecord) -> None: ...

    def forget(self, record: SimulatedRecord) -> None:
        record.has_device_bytes = False

    def let_go(self, record: SimulatedRecord) -> None:
        record.is_in_place = record.has_device_bytes = False

    # --- what has died ------------------------------------------------------------------------------------------

    def give_back_lent(self) -> None:
        """Somebody lets go of memory that was lent."""
        self._has_returned = True

    def take_back(self) -> None:
        self._has_returned = False

    def has_changed(self) -> bool:
        return bool(self._noted.ended or self._has_returned)

    def catch_up(self) -> None:
        self._noted.drop_ended()
        self.take_back()

    def give_up(self) -> None: ...
