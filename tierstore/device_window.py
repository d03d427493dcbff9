"""What stays on accelerators, and which of it leaves next. Pure: records in, records out, no bytes; the store's lock
guards it.

What is needed last leaves first: what the plan sends away, as soon as it is ours; beyond `device_bytes`, what was saved
first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

from .host import Window
from .plan import Place

__all__ = ["FLIGHT_BYTES", "RELOAD_BYTES", "DeviceWindow", "OnDevice"]

FLIGHT_BYTES = 256 * 2**20
"""Saved tensors that are being copied out may hold so much device memory; the compute stream waits beyond it."""
RELOAD_BYTES = 256 * 2**20
"""So much is copied back ahead of backward, and kept for other views of the same storage; one tensor that is larger may
be on its way, too, while another is in use."""


class OnDevice(Protocol):
    """What is on an accelerator: a `Record`, or a simulated one. Attributes as `Record`'s."""

    key: int
    nbytes: int
    place: Place | None


R = TypeVar("R", bound=OnDevice)


class DeviceWindow(Generic[R]):
    """The records that are ours alone, on a device, and not chosen to leave it.

    Args:
        limit_bytes: that may stay.

    Attributes:
        bytes: the books; their limit is the last scope's `device_bytes`.
    """

    def __init__(self, limit_bytes: int = 0) -> None:
        self.bytes = Window(limit_bytes)
        self._resident: OrderedDict[int, tuple[R, int]] = OrderedDict()  # with bytes; saved first, first
        self._leaving: OrderedDict[int, R] = OrderedDict()  # those of them that the plan sends away

    def hold(self, record: R) -> None:
        """The record stays until it is chosen to leave."""
        self._resident[record.key] = record, record.nbytes
        self.bytes.charge(record.nbytes)
        if record.place in (Place.HOST, Place.DISK):
            self._leaving[record.key] = record

    def surplus(self) -> R | None:
        """What has to leave next: by the plan, or, if the limit is exceeded, what was saved first."""
        while self._leaving:
            key, record = next(iter(self._leaving.items()))
            if record.place in (Place.HOST, Place.DISK):
                return record
            del self._leaving[key]  # backward has begun: it need not leave any more
        if self.bytes.fits(0):
            return None
        return next(iter(self._resident.values()))[0]

    def leave(self, record: R) -> None:
        """The record is not here any more, if it was."""
        _, nbytes = self._resident.pop(record.key, (record, 0))
        self._leaving.pop(record.key, None)
        self.bytes.discharge(nbytes)
