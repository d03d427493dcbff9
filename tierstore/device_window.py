"""What stays on accelerators, what is on its way, and what leaves next. Pure: records in, records out, no bytes; the
store's lock guards it.

What is needed last leaves first: what the plan sends away, as soon as it is ours; beyond `device_bytes`, what was saved
first.

NOTE [Room of device_bytes]
What was saved last stays, so early in forward nothing does yet, and late in backward nothing does any more. Until then
the room of `device_bytes` is lent to copies: out in forward, which makes faster than a link carries, and back in
backward. The link is busy all of the time then, and compute waits only if it cannot carry everything. With windows of
a fixed size it had nothing to do while forward made what stays, and while backward used it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

from .host import Window
from .plan import Place

__all__ = ["FLIGHT_BYTES", "RELOAD_BYTES", "DeviceWindow", "OnDevice"]

FLIGHT_BYTES = 256 * 2**20
"""Saved tensors that are being copied out may hold so much device memory, and what `device_bytes` leaves unused; the
compute stream waits beyond it."""
RELOAD_BYTES = 256 * 2**20
"""So much, and what `device_bytes` leaves unused, is copied back ahead of backward, and kept for other views of the
same storage; one tensor that is larger may be on its way, too, while another is in use."""


class OnDevice(Protocol):
    """What is on an accelerator: a `Record`, or a simulated one. Attributes as `Record`'s."""

    key: int
    nbytes: int
    place: Place | None


R = TypeVar("R", bound=OnDevice)


class DeviceWindow(Generic[R]):
    """The records that are ours alone, on a device, and not chosen to leave it; and the bytes of those on their way.

    Args:
        limit_bytes: that may stay.
        flight_bytes, reload_bytes: see `FLIGHT_BYTES`, `RELOAD_BYTES`.

    Attributes:
        resident: the books of those that stay; their limit is the last scope's `device_bytes`.
        in_flight, reloaded: of what is being copied out, and has been copied back; their limits are what they have
            beside what they are lent.
    """

    def __init__(
        self, limit_bytes: int = 0, flight_bytes: int = FLIGHT_BYTES, reload_bytes: int = RELOAD_BYTES
    ) -> None:
        self.resident = Window(limit_bytes)
        self.in_flight = Window(flight_bytes)
        self.reloaded = Window(reload_bytes)
        self._resident: OrderedDict[int, tuple[R, int]] = OrderedDict()  # with bytes; saved first, first
        self._leaving: OrderedDict[int, R] = OrderedDict()  # those of them that the plan sends away

    def hold(self, record: R) -> bool:
        """The record stays until it is chosen to leave; whether it was not chosen at once."""
        self._resident[record.key] = record, record.nbytes
        self.resident.charge(record.nbytes)
        if record.place in (Place.HOST, Place.DISK):
            self._leaving[record.key] = record
            return False
        return True

    def surplus(self) -> R | None:
        """What has to leave next: by the plan, or, if the limit is exceeded, what was saved first."""
        while self._leaving:
            key, record = next(iter(self._leaving.items()))
            if record.place in (Place.HOST, Place.DISK):
                return record
            del self._leaving[key]  # backward has begun: it need not leave any more
        if self._resident and self._room() < _lent(self.reloaded):
            return next(iter(self._resident.values()))[0]
        return None

    def leave(self, record: R) -> None:
        """The record is not here any more, if it was."""
        _, nbytes = self._resident.pop(record.key, (record, 0))
        self._leaving.pop(record.key, None)
        self.resident.discharge(nbytes)

    def flies_too_much(self) -> bool:
        """Whether less has to be on its way out."""
        lent = _lent(self.in_flight)
        return lent > 0 and self._room() < lent + _lent(self.reloaded)

    def reloads_too_much(self) -> bool:
        """Whether less has to be back."""
        lent = _lent(self.reloaded)
        return lent > 0 and self._room() < lent + _lent(self.in_flight)

    def fits_reload(self, nbytes: int) -> bool:
        """Whether so much more may be copied back."""
        lent = _lent(self.reloaded, nbytes)
        return not lent or self._room() >= lent + _lent(self.in_flight)

    def _room(self) -> int:
        """What may stay and does not, so that it can be lent; negative: too much stays."""
        return (self.resident.limit_bytes or 0) - self.resident.used_bytes


def _lent(window: Window, nbytes: int = 0) -> int:
    """What the window uses beyond its own limit, with so many bytes more."""
    return max(0, window.used_bytes + nbytes - (window.limit_bytes or 0))
