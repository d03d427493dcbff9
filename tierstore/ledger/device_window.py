"""Which records stay on accelerators, which are being copied, and which leaves next. Pure: records in, records out, no
bytes; the store's lock guards it.

The record that is needed last leaves first. A record that the plan sends away leaves as soon as the store is its sole
owner. Beyond `device_bytes`, the record that was saved first leaves.

NOTE [Room of device_bytes]
The tensors that were saved last stay. So `device_bytes` is unused early in forward and late in backward. Its free room
is lent to copies: out in forward, which produces bytes faster than the link carries them, and back in backward. So
the link is busy all the time, and compute waits only if the link cannot carry everything. With windows of a fixed size
the link was idle while forward made the tensors that stay, and while backward used them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic

from .plan import PlannedTier
from .record import R
from .windows import NUM_GROUPS, Window

FLIGHT_BYTES = 256 * 2**20
"""Device memory that tensors being copied out may hold, besides what `device_bytes` leaves unused. Beyond that the
compute stream waits."""
RELOAD_BYTES = 256 * 2**20
"""Bytes that are copied back ahead of backward, and kept for other views of the same storage, besides what
`device_bytes` leaves unused. One larger tensor may be copied even so, while another is in use."""


class DeviceWindow(Generic[R]):
    """The records that are solely owned and stay on a device, and the number of bytes that are being copied.

    Attributes:
        resident: bytes that stay, those of tracked tensors included. Its limit is the `device_bytes` of the last scope.
        in_flight: bytes being copied out. `reloaded`: bytes that were copied back. Both may exceed their limit by
            the room that `resident` leaves: NOTE [Room of device_bytes].
        group_bytes: the longest group that these windows allow.
    """

    def __init__(self, resident: Window, flight_bytes: int, reload_bytes: int) -> None:
        self.resident = resident
        self.in_flight = Window(flight_bytes)
        self.reloaded = Window(reload_bytes)
        self.keep(self.resident.limit_bytes)
        self._resident: OrderedDict[int, tuple[R, int]] = OrderedDict()  # with its bytes; saved first, first
        self._leaving: OrderedDict[int, R] = OrderedDict()  # those of `_resident` that the plan sends away

    def keep(self, limit_bytes: int) -> None:
        """Set how many bytes may stay."""
        self.resident.limit_bytes = limit_bytes
        flight_bytes = self.in_flight.limit_bytes
        self.group_bytes = min(limit_bytes or flight_bytes, flight_bytes) // NUM_GROUPS

    def fits(self, nbytes: int) -> bool:
        """Whether `nbytes` more may stay, so that nothing has to leave for them."""
        resident, reloaded = self.resident, self.reloaded
        room = resident.limit_bytes - resident.used_bytes - resident.granted_bytes - nbytes  # as `_room`: packs ask
        return room >= 0 and (reloaded.used_bytes <= reloaded.limit_bytes or room >= _lent(reloaded))

    def hold(self, record: R) -> bool:
        """Count the record as staying. False: the plan sends it away at once."""
        self._resident[record.key] = record, record.nbytes
        self.resident.used_bytes += record.nbytes
        if record.planned in (PlannedTier.HOST, PlannedTier.DISK):
            self._leaving[record.key] = record
            return False
        return True

    def surplus(self) -> R | None:
        """The record that has to leave next: by the plan, or, if too much stays, the one saved first; None: none."""
        while self._leaving:
            key, record = next(iter(self._leaving.items()))
            if record.planned in (PlannedTier.HOST, PlannedTier.DISK):
                return record
            del self._leaving[key]  # backward has begun: the record need not leave any more
        if self._resident and self._room() < _lent(self.reloaded):
            return next(iter(self._resident.values()))[0]
        return None

    def leave(self, record: R) -> None:
        if record.key in self._resident:
            self.resident.used_bytes -= self._resident.pop(record.key)[1]
            self._leaving.pop(record.key, None)

    def flies_too_much(self) -> bool:
        lent = self.in_flight.used_bytes - self.in_flight.limit_bytes
        return lent > 0 and self._room() < lent + _lent(self.reloaded)

    def reloads_too_much(self) -> bool:
        lent = self.reloaded.used_bytes - self.reloaded.limit_bytes
        return lent > 0 and self._room() < lent + _lent(self.in_flight)

    def fits_reload(self, nbytes: int) -> bool:
        lent = self.reloaded.used_bytes + nbytes - self.reloaded.limit_bytes
        return lent <= 0 or self._room() >= lent + _lent(self.in_flight)

    def unlent_bytes(self) -> int:
        """Bytes that may stay but do not, and that no copy was lent."""
        return self._room() - _lent(self.in_flight) - _lent(self.reloaded)

    def _room(self) -> int:
        """Bytes that may stay but do not, so they can be lent; negative: too much stays."""
        resident = self.resident
        return resident.limit_bytes - resident.used_bytes - resident.granted_bytes


def _lent(window: Window) -> int:
    """Bytes that the window uses beyond its own limit."""
    return max(0, window.used_bytes - window.limit_bytes)
