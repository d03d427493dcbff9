"""One simulated accelerator with one stream, in virtual time. The rules of `rules/device.py` decide what is copied."""

from __future__ import annotations

from ..rules.device import CopyBack, CopyOut, DeviceRules
from ..rules.device_window import FLIGHT_BYTES, RELOAD_BYTES, DeviceWindow
from .copies import Copy, VirtualCopies
from .record import SimulatedRecord

__all__ = ["SimulatedDevice"]


class SimulatedDevice(DeviceRules[SimulatedRecord]):
    """The records on the accelerator.

    Args:
        copies: the copy engine.
        device_bytes, flight_bytes, reload_bytes: how much may stay, be on its way out, and be copied back ahead.
    """

    def __init__(
        self,
        copies: VirtualCopies,
        device_bytes: int = 0,
        flight_bytes: int = FLIGHT_BYTES,
        reload_bytes: int = RELOAD_BYTES,
    ) -> None:
        window = DeviceWindow[SimulatedRecord](device_bytes, flight_bytes, reload_bytes)
        super().__init__(_Stream(copies), window)


class _Stream:
    """A `DeviceMemory` with one stream, on which everything is packed and asked for."""

    def __init__(self, copies: VirtualCopies) -> None:
        self._copies = copies

    def copy_out(self, record: SimulatedRecord) -> CopyOut:
        record.ready = Copy(record.nbytes)
        self._copies.copy_out(record.ready)
        return CopyOut(record, record.nbytes, record.ready)

    def copy_back(self, record: SimulatedRecord, *, must: bool) -> CopyBack:
        """See `DeviceMemory`. There is always room."""
        record.ready = Copy(record.nbytes, record.ready)
        self._copies.copy_in(record.ready)
        record.has_device_bytes = True
        return CopyBack(record, record.ready)

    def wait_where_packed(self, record: SimulatedRecord, end: Copy) -> None:
        self._copies.wait(end)

    def wait_where_asked(self, record: SimulatedRecord, stream: None, end: Copy) -> None:
        self._copies.wait(end)

    def asked_on(self, record: SimulatedRecord) -> None: ...

    def share(self, record: SimulatedRecord, copy: CopyOut) -> None:
        """See `DeviceMemory`. There is one stream."""

    def forget(self, record: SimulatedRecord) -> None:
        record.has_device_bytes = False
