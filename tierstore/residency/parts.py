"""What a store keeps its tensors with, put together from below. The store's lock guards all of it."""

from __future__ import annotations

from typing import NamedTuple

from ..rules.ledger import Ledger
from ..rules.rules import Rules
from ..rules.windows import HostWindows
from .booking import Booking
from .copies import AcceleratorCopies, Copies
from .device import DeviceTier
from .handle import Record
from .lent import LentViews
from .memory import StoreMemory
from .noted import NotedTensors
from .ownership import is_sole_owner
from .slots import Slots
from .transfers import DiskSubmissions

__all__ = ["Parts", "make_parts"]


class Parts(NamedTuple):
    """All of it is guarded by the store's lock; each class says what it is."""

    noted: NotedTensors
    ledger: Ledger[Record]
    lent_views: LentViews
    slots: Slots
    booking: Booking
    devices: DeviceTier
    memory: StoreMemory
    rules: Rules[Record]


def make_parts(
    engine: DiskSubmissions, *, host_bytes: int, staging_bytes: int, staging_grows: bool, copies: Copies | None
) -> Parts:
    """Put the parts of one store together. `copies`: None: whatever `torch.accelerator` drives."""
    windows = HostWindows(host_bytes, staging_bytes, grows=staging_grows)
    noted = NotedTensors(windows)
    ledger = Ledger[Record](windows, noted, is_sole_owner)
    lent_views = LentViews()
    slots = Slots(windows, host_bytes + staging_bytes, ledger.uncharged_bytes, counters=ledger.counters)
    booking = Booking(ledger, noted, lent_views)
    devices = DeviceTier(copies or AcceleratorCopies(), lent_views=lent_views, note_copy=slots.note_copy)
    memory = StoreMemory(booking, slots, devices, lent_views)
    rules = Rules[Record](ledger, memory, devices, engine, engine.disk_budget_bytes)
    return Parts(noted, ledger, lent_views, slots, booking, devices, memory, rules)
