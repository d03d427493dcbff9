"""Real memory for the rules: saved tensors, slots of the slab, and the handles that refer to them. A `Memory`.

NOTE [Who owns the bytes]
A saved CPU tensor is not copied: its record keeps a detached alias (`source`). Restored bytes lie in a slot of the
slab, and the alias is pointed at them (`source.data = ...`). So one tensor serves a record for its whole life: it
refers to the bytes, wherever they are, and shares its version counter with the saved tensor and with every tensor that
was handed out. `source._version != version` is autograd's own test for in-place changes.
When the bytes leave memory, the alias is pointed at an empty storage. A tensor over the slot that was handed out may
still be in use then: the slot is *outstanding* until the storage over it dies.
Device memory of an accelerator is handled likewise; the slot then holds a copy that nobody else ever sees.

A handle that dies takes its alias along, and its record goes into the queue `Books.released`. When the storage over a
slot dies, the slot goes into a queue of `slots.py`; when a log dies, its remains go into a queue of
`ledger/tracked.py`."""

from __future__ import annotations

from functools import partial
from math import prod

import torch

from ..tensors.layout import memory_at, span_of
from ..tensors.slots import Slots
from ..tensors.torch_names import storage_address
from .device import DeviceTier
from .handle import Record
from .outstanding import OutstandingViews
from .ownership import claim, is_sole_owner
from .registration import Registration
from .transfers import BytesToWrite

_PAGE_BYTES = 4096
_BLOCK_BYTES = 512
"""Alignment of blocks in the allocators of accelerators (torch's for CUDA). A tensor comes back at the same address
modulo this: alignment takes part in the choice of a kernel, and so in the order of its additions."""


class StoreMemory:
    """Makes, moves and frees what records are in: slots, blocks of a device, views that were handed out.

    The `Memory` that the ledger decides about. Guarded by the store's lock.
    """

    def __init__(
        self, registration: Registration, slots: Slots, devices: DeviceTier, outstanding_views: OutstandingViews
    ) -> None:
        self._registration = registration
        self._tracked = registration.tracked
        self._slots = slots
        self.pages = slots.slab
        self._devices = devices
        self._outstanding_views = outstanding_views
        self._empty = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.register_settled = registration.register_all
        self.trim = slots.trim
        self.take_back = slots.take_back
        self.outstanding_bytes = slots.outstanding_bytes
        tracked, holders = registration.tracked, outstanding_views.holders
        self.unaccounted = tracked.ended, tracked.on_device.dead, slots.returned, holders

    has_sole_owner = staticmethod(is_sole_owner)

    # --- slots --------------------------------------------------------------------------------------------------

    def prepare_offload(self, record: Record) -> None:
        source = record.source
        if source is None:
            raise RuntimeError(f"handle {record.key}: offloaded after its release")
        first, end = _cut_span(record, source)
        record.nbytes = end - first
        self.has_room_for_read(record)
        record.slot = self.pages.allocate(record.nbytes)

    def has_room_for_read(self, record: Record) -> bool:
        """Where it has none, copies that are over give theirs back: NOTE [Asked seldom] in `ledger/device.py`."""
        slab = self._slots.slab
        if slab.pinned_for is None:  # a mapping of its own is as good as a slot in the region
            return True
        if slab.has_room(record.nbytes, record.phase):
            return True
        self._devices.poll()
        return slab.has_room(record.nbytes, record.phase)

    def prepare_read(self, record: Record) -> None:
        record.slot = self.pages.allocate(record.nbytes, record.phase)

    def attach(self, record: Record) -> bool:
        handle, slot = record(), record.slot
        if handle is None or slot is None:
            return False
        if record.device is None:
            handle.source.data = base = self._slots.hand_out(slot, record.layout.dtype)
            record.address = slot.address
            claim(record, base.untyped_storage())
        return True

    def free(self, record: Record) -> None:
        slot, record.slot = record.slot, None
        if slot is None:
            return
        if record.ready is not None:
            self._devices.when_copied(record.ready, partial(self._slots.free, slot))
        else:
            self._slots.free_when_unused(slot)

    # --- jobs ---------------------------------------------------------------------------------------------------

    @staticmethod
    def begin_write(record: Record) -> BytesToWrite | None:
        handle = record()
        if handle is None:
            return None
        source = handle.source
        if record.slot is not None:
            record.held, memory = record.slot, record.slot.memory
        else:
            first, end = _cut_span(record, source)
            record.held = source.untyped_storage()  # handle and alias may go while the job runs
            memory = memory_at(storage_address(source) + first, end - first)
        return BytesToWrite(memory, record.kind, record.ready)

    @staticmethod
    def begin_read(record: Record) -> memoryview:
        if record.slot is None:
            raise RuntimeError(f"handle {record.key}: it is read without a slot")
        record.held = record.slot
        return record.slot.memory

    @staticmethod
    def has_moved(record: Record) -> bool:
        """A reference to a storage does not keep its memory in place.

        `share_memory_`, a queue of `torch.multiprocessing` and `UntypedStorage.resize_` replace it."""
        held, handle = record.held, record()
        if handle is None or not isinstance(held, torch.UntypedStorage):
            return False
        return storage_address(handle.source) != record.address or held.nbytes() != record.nbytes

    # --- tensors ------------------------------------------------------------------------------------------------

    def empty_tensors(self, record: Record) -> None:
        handle = record()
        if record.span is not None:
            record.first_byte = record.span[0]
        record.claims = None
        if handle is None:
            return
        if handle.views:
            self._outstanding_views.drop_unused(record)
        if record.ranges:
            record.drop_parts()
        handle.source.data = self._empty if record.device is None else self._devices.streams.empty_on(record.device)

    # --- what has died ------------------------------------------------------------------------------------------

    def catch_up(self) -> bool:
        if self._outstanding_views.holders:
            self._outstanding_views.take_back()
        if has_ended := bool(self._tracked.ended or self._tracked.on_device.dead):
            self._tracked.drop_ended()
        if not self._slots.returned:
            return has_ended
        self._slots.take_back()
        return True

    def give_up(self) -> None:
        self._outstanding_views.drop_all()
        self._tracked.give_up()
        for tracked in self._tracked.living():
            tracked.close()


def _cut_span(record: Record, source: torch.Tensor) -> tuple[int, int]:
    """Decide which bytes of the storage are stored; after this no other view can join the record."""
    if record.span is None:
        storage_bytes, layout = source.untyped_storage().nbytes(), record.layout
        if layout.offset == 0 and prod(layout.size) * layout.dtype.itemsize == storage_bytes:
            first, end = 0, storage_bytes  # as a rule: the same as below, but at once
        else:
            first, end = span_of((layout, *record.joined), storage_bytes)
        if record.device is None:
            record.phase = (storage_address(source) + first) % _PAGE_BYTES
        else:
            first -= first % _BLOCK_BYTES
        record.span = first, end
        record.joined = ()
    return record.span
