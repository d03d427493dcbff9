"""The rules of `tierstore/device.py` for one accelerator, in virtual time.

Methods have the same names as there and do the same in the same order, for one device and one stream. The store's own
`DeviceWindow` decides what stays on the device.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import NamedTuple

from ..device_window import FLIGHT_BYTES, RELOAD_BYTES, DeviceWindow
from ..handle import State
from .copies import Copies, Copy
from .record import SimulatedRecord

__all__ = ["SimulatedDevice"]


class _Flight(NamedTuple):
    record: SimulatedRecord
    copy: Copy


class _Reload:
    """See `tierstore.device._Reload`. `is_awaited`: the stream waits for it."""

    __slots__ = ("copy", "is_awaited", "nbytes", "record")

    def __init__(self, record: SimulatedRecord, copy: Copy) -> None:
        self.record = record
        self.nbytes = record.nbytes
        self.copy = copy
        self.is_awaited = False


class SimulatedDevice:
    """The records on the accelerator. Methods as `DeviceTier`'s.

    Args:
        copies: the copy engine.
        device_bytes, flight_bytes, reload_bytes: how much may stay, be on its way out, and be copied back ahead.

    Attributes:
        peak_bytes: the most that only the store holds at once: kept, on its way out, and copied back.
    """

    def __init__(
        self,
        copies: Copies,
        device_bytes: int = 0,
        flight_bytes: int = FLIGHT_BYTES,
        reload_bytes: int = RELOAD_BYTES,
    ) -> None:
        self.peak_bytes = 0
        self._copies = copies
        self._window = DeviceWindow[SimulatedRecord](device_bytes, flight_bytes, reload_bytes)
        self._flights: deque[_Flight] = deque()
        self._reloaded: OrderedDict[int, _Reload] = OrderedDict()
        self._num_ahead = 0
        self._busy: deque[tuple[Copy, SimulatedRecord | None]] = deque()  # copies and the records they bring

    @property
    def held_bytes(self) -> int:
        """See `DeviceTier`."""
        return self._window.resident.used_bytes + self._window.in_flight.used_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes on the device that only the store holds now."""
        return self.held_bytes + self._window.reloaded.used_bytes

    @property
    def is_busy(self) -> bool:
        """See `DeviceTier`."""
        return bool(self._flights or self._busy)

    def hold(self, record: SimulatedRecord) -> None:
        """See `DeviceTier`."""
        record.move(State.DEVICE)
        if self._window.hold(record):
            self._bound_flight()
        self._note_peak()

    def surplus(self) -> SimulatedRecord | None:
        """See `DeviceTier`."""
        return self._window.surplus()

    def leave(self, record: SimulatedRecord) -> None:
        """See `DeviceTier`."""
        self._window.leave(record)

    def offload(self, record: SimulatedRecord) -> None:
        """See `DeviceTier`."""
        self.leave(record)
        record.ready = Copy(record.nbytes)
        self._copies.copy_out(record.ready)
        record.move(State.OFFLOADING)
        self._flights.append(_Flight(record, record.ready))
        self._window.in_flight.charge(record.nbytes)
        self._note_peak()
        self._bound_flight()

    def _bound_flight(self) -> None:
        self.poll()
        while self._window.flies_too_much() and len(self._flights) > 1:
            flight = self._flights.popleft()
            self._copies.wait(flight.copy)
            self._land(flight)
            self._busy.append((flight.copy, flight.record))

    def poll(self) -> None:
        """See `DeviceTier`."""
        while self._flights and self._flights[0].copy.is_over:
            flight = self._flights.popleft()
            self._land(flight)
            _arrive(flight.record)
        while self._busy and self._busy[0][0].is_over:
            _arrive(self._busy.popleft()[1])

    def _land(self, flight: _Flight) -> None:
        self._window.in_flight.discharge(flight.copy.nbytes)
        if flight.record.key not in self._reloaded:
            flight.record.has_device_bytes = False

    def reload(self, record: SimulatedRecord) -> None:
        """See `DeviceTier`."""
        record.ready = Copy(record.nbytes, record.ready)
        self._copies.copy_in(record.ready)
        record.has_device_bytes = True
        self._reloaded[record.key] = _Reload(record, record.ready)
        self._window.reloaded.charge(record.nbytes)
        self._note_peak()
        self._num_ahead += 1
        while self._window.reloads_too_much() and len(self._reloaded) > 2:
            self.forget(next(iter(self._reloaded.values())).record)

    def hand_over(self, record: SimulatedRecord) -> None:
        """See `DeviceTier`."""
        reload = self._reloaded.get(record.key)
        if reload is None:
            return
        self._reloaded.move_to_end(record.key)
        if not reload.is_awaited:
            self._copies.wait(reload.copy)
            self._num_ahead -= 1
            reload.is_awaited = True

    def has_room_to_reload(self, nbytes: int) -> bool:
        """See `DeviceTier`."""
        return self._window.fits_reload(nbytes) or not self._num_ahead

    def forget(self, record: SimulatedRecord) -> None:
        """Drop the record's bytes from the device. See `DeviceTier.unload`."""
        record.has_device_bytes = False
        reload = self._reloaded.pop(record.key, None)
        if reload is not None:
            self._window.reloaded.discharge(reload.nbytes)
            if not reload.is_awaited:
                self._num_ahead -= 1
                self.free_when_copied(reload.copy)

    def release(self, record: SimulatedRecord) -> None:
        """See `DeviceTier`."""
        self.leave(record)
        self.forget(record)

    def free_when_copied(self, copy: Copy) -> None:
        """Keep the copy's source or target in use until the copy is over. See `DeviceTier.when_copied`."""
        if not copy.is_over:
            self._busy.append((copy, None))

    def begin_peak(self) -> None:
        """A step begins: count its peak from here."""
        self.peak_bytes = self.used_bytes

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)


def _arrive(record: SimulatedRecord | None) -> None:
    if record is not None and record.state is State.OFFLOADING:
        record.move(State.HOST)
