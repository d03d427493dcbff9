"""The device tier: saved tensors on an accelerator, and their copies to and from slots of host memory.

NOTE [Stream order]
The allocator of an accelerator gives a freed block at once to the next request on the block's own stream. It does not
know of work on other streams unless it is told (`Copies.share`). The rules below follow; the host never blocks.

- *Copy out*: it waits for an event of the stream that packed the tensor, so its bytes are written.
- *Release of the block*: only when the copy out is over, or the stream that packed has been made to wait for it. The
  block may belong to another stream (where its tensor was computed), and further streams may have been given it. So the
  allocator is told of every stream that has packed or unpacked on that device. With one stream this changes nothing;
  with several, the block is used again only after the work that they have queued.
- *Target of a reload*: it is allocated on the record's own stream, and the copy in waits for an event recorded *after*
  the allocation, because a kernel queued there just before may still use the block.
- *Wait for the copy in*: the stream that asks for the tensor waits when it asks, not when the copy is queued. Otherwise
  no kernel would run beside the copies for later ones. The block is held here until a stream waits. If the block
  belongs to another stream, the allocator is told of the one that asks.
- *Slots*: a slot is used again only when the last copy from or to it is over; the slab is unpinned when all are over.

The store cannot see a stream that uses a saved tensor but never saves or asks for one. Without a store the graph would
keep the block for it until backward; here the user has to call `record_stream`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch

from ..ledger.device import CopyBack, CopyOut, DeviceRules
from ..ledger.device_window import FLIGHT_BYTES, RELOAD_BYTES, DeviceWindow
from ..ledger.groups import DEVICE_ALIGNMENT_BYTES
from ..ledger.windows import Window
from ..tensors.capture import is_capturing
from ..tensors.copies import Copies, Marker
from ..tensors.layout import Layout, in_dtype, span_of
from ..tensors.slab import Slot
from .graph_times import GraphTimes
from .handle import Record
from .outstanding import OutstandingViews
from .ownership import unclaim


class DeviceTier(DeviceRules[Record]):
    """The saved tensors on accelerators: the rules over real copies. Guarded by the store's lock.

    `note_copy` is told of the slot of each copy; it returns False if later copies will be faster. `resident` counts the
    bytes that stay."""

    def __init__(
        self,
        copies: Copies,
        outstanding_views: OutstandingViews,
        note_copy: Callable[[Slot], bool],
        resident: Window,
        flight_bytes: int = FLIGHT_BYTES,
        reload_bytes: int = RELOAD_BYTES,
    ) -> None:
        self.streams = Streams(copies, outstanding_views, note_copy)
        super().__init__(self.streams, DeviceWindow[Record](resident, flight_bytes, reload_bytes))

    def keep(self, limit_bytes: int) -> None:
        """Set how many bytes may stay. Times that are being taken are spoilt: they began under another limit."""
        self.streams.spoil_times()
        self.window.keep(limit_bytes)


class Streams:
    """A `DeviceMemory` of real streams.

    Attributes:
        awaits_backward: whether the times of a forward are being taken. Without the lock, it may be out of date.
    """

    def __init__(self, copies: Copies, outstanding_views: OutstandingViews, note_copy: Callable[[Slot], bool]) -> None:
        self._copies = copies
        self.device_of, self.current_stream = copies.device_of, copies.current_stream
        self.awaits_backward = False
        self._outstanding_views = outstanding_views
        self._note_copy = note_copy
        self._streams: defaultdict[torch.device, set[Any]] = defaultdict(set)  # that packed or unpacked there
        self._times: GraphTimes | None = None
        self._empty: dict[torch.device, torch.Tensor] = {}

    def empty_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._empty:
            with torch.inference_mode(False):  # it is kept
                self._empty[device] = torch.empty(0, dtype=torch.uint8, device=device)
        return self._empty[device]

    def note_current(self, device: torch.device) -> Any:
        """The stream that this thread works on there. It is one of those that pack or unpack."""
        stream, known = self._copies.current_stream(device), self._streams[device]
        if stream not in known:
            known.add(stream)
        return stream

    def knows_current(self, device: torch.device) -> bool:
        """Whether that stream was noted before. Any thread, without the lock."""
        return self._copies.current_stream(device) in self._streams[device]

    def gather(self, storages: Mapping[int, torch.Tensor], device: torch.device, stream: Any) -> torch.Tensor | None:
        """The bytes of the storages, of each of which a tensor is given, in new memory of the device, each from its
        first byte on.

        Their own memory may be freed afterwards. None: this thread does not work on `stream`, which packed them, or
        captures a graph, or the device has no room. Returns uint8, shape [n]; what is between the storages is zero."""
        if self._copies.current_stream(device) != stream or is_capturing(device):
            return None
        parts = bytes_of(storages.values())
        try:
            gathered = torch.cat(list(_padded(parts, storages)))
        except torch.OutOfMemoryError:
            return None
        for known in self._streams[device]:
            self._copies.share(parts, known)
        return gathered

    def spare_bytes(self, device: torch.device) -> int | None:
        """As `Copies.spare_bytes`. Any thread, without the lock."""
        return self._copies.spare_bytes(device)

    # --- times --------------------------------------------------------------------------------------------------

    def time_graph(self, device: torch.device, staying_bytes: int, *, is_marked: bool) -> GraphTimes:
        self.spoil_times()
        stream = self.note_current(device)
        self._times = GraphTimes(self._copies, device, stream, staying_bytes, is_marked=is_marked)
        self.awaits_backward = is_marked
        return self._times

    def spoil_times(self) -> None:
        self.awaits_backward = False
        if (times := self._open_times()) is not None:
            times.spoil()

    def _open_times(self) -> GraphTimes | None:
        if self._times is not None and not self._times.is_open:
            self._times = None
        return self._times

    # --- `DeviceMemory` -----------------------------------------------------------------------------------------

    def copy_out(self, record: Record) -> CopyOut:
        handle, slot, span = record(), record.slot, record.span
        if handle is None or slot is None or span is None:
            raise RuntimeError(f"handle {record.key}: offloaded after its release, or without a slot")
        first, end = span
        if handle.parts:
            memory, nbytes = list(handle.parts.values()), end - first
            sources = memory
        else:
            memory = bytes_of((handle.source,))
            (whole,), nbytes = memory, memory[0].numel()
            sources = memory if end - first == nbytes else [whole[first:end]]  # most are whole; a slice takes a while
        record.ready = self._copies.copy_out_many(sources, _pieces_of(slot, record), record.stream)
        if self._times is not None and (times := self._open_times()) is not None:
            times.copies_out(end - first)
        self._note(slot)
        return CopyOut(memory, nbytes, record.ready)

    def copy_back(self, record: Record, *, must: bool) -> CopyBack | None:
        handle, slot, device = record(), record.slot, _device_of(record)
        if handle is None or slot is None:
            raise RuntimeError(f"handle {record.key}: copied back after its release, or without a slot")
        try:
            memory, copied = self._copies.copy_in_many(_pieces_of(slot, record), device, record.stream, record.ready)
        except torch.OutOfMemoryError as error:
            self._note_refusal(record.nbytes)
            if not must:
                return None  # do not keep the error: its frames would hold on to tensors
            _say_where(error, record.nbytes)
            raise
        dtype = record.layout.dtype
        if record.ranges:
            are_whole = not sum([(end - first) % dtype.itemsize for first, end in record.ranges])
            parts = map(torch.Tensor.view, memory, repeat(dtype)) if are_whole else memory  # most views are of it
            handle.parts = {first: part for (first, _), part in zip(record.ranges, parts, strict=True)}
        else:
            handle.source.data = in_dtype(memory[0], dtype)
        record.ready = copied
        record.claims = []
        if self._times is not None and (times := self._open_times()) is not None:
            times.copies_in(record.nbytes)
        self._note(slot)
        return CopyBack(memory, copied)

    def copy_part_back(self, record: Record, layout: Layout) -> tuple[int, torch.Tensor]:
        """Copy only what a tensor of that layout needs, for this thread's stream, which waits for the copy.

        Returns the first byte, and the bytes: uint8, shape [n]. Raises torch.OutOfMemoryError."""
        slot, device = record.slot, _device_of(record)
        if slot is None:
            raise RuntimeError(f"handle {record.key}: copied back without a slot")
        first, end = span_of((layout,), record.nbytes)
        first -= first % DEVICE_ALIGNMENT_BYTES
        stream = self.note_current(device)
        try:
            part = slot.as_plain_tensor()[first:end]
            (target,), record.ready = self._copies.copy_in_many((part,), device, stream, record.ready)
        except torch.OutOfMemoryError as error:
            self._note_refusal(end - first)
            _say_where(error, end - first)
            raise
        if (times := self._open_times()) is not None:
            times.copies_in(end - first)
        self._wait(stream, record.ready)
        return first, target

    def _note_refusal(self, nbytes: int) -> None:
        if (times := self._open_times()) is not None:
            times.refused(nbytes)

    def _note(self, slot: Slot) -> None:
        if not self._note_copy(slot):
            self.spoil_times()  # later steps are faster

    def wait_where_packed(self, record: Record, end: Marker) -> None:
        self._wait(record.stream, end)

    def _wait(self, stream: Any, marker: Marker) -> None:
        times = None if self._times is None else self._open_times()
        if times is None:
            self._copies.wait(stream, marker)
        else:
            times.waits(stream, partial(self._copies.wait, stream, marker))

    def share(self, record: Record, copy: CopyOut) -> None:
        for stream in self._streams[_device_of(record)]:
            self._copies.share(copy.memory, stream)

    def drop_bytes(self, record: Record) -> None:
        source = record.source
        unclaim(record)
        self._outstanding_views.drop_unused(record)
        if record.ranges:
            record.drop_parts()
        if record.span is not None:
            record.first_byte = record.span[0]  # not before: until now the source is over the whole storage
        if source is not None:
            source.data = self.empty_on(source.device)

    def asked_on(self, device: torch.device) -> Any:
        stream = self._copies.current_stream(device)
        if stream not in self._streams[device]:
            self._streams[device].add(stream)
        if self._times is not None and (times := self._open_times()) is not None:
            times.asked_for(stream)
        self.awaits_backward = False
        return stream

    def wait_where_asked(self, record: Record, stream: Any, end: Marker) -> None:
        self._wait(stream, end)
        handle = record()
        if stream != record.stream and handle is not None:
            self._copies.share(handle.parts.values() or (handle.source,), stream)


def _say_where(error: torch.OutOfMemoryError, nbytes: int) -> None:
    error.add_note(f"tierstore: {nbytes} bytes that backward asks for are in host memory still")


def _device_of(record: Record) -> torch.device:
    if record.device is None:
        raise RuntimeError(f"handle {record.key} is in host memory")
    return record.device


def _pieces_of(slot: Slot, record: Record) -> list[torch.Tensor]:
    """The record's slot; of a batch, where the bytes of each storage lie in it."""
    memory = slot.as_plain_tensor()
    return [memory[first:end] for first, end in record.ranges] if record.ranges else [memory]


def bytes_of(tensors: Collection[torch.Tensor]) -> list[torch.Tensor]:
    """The whole storage of each as uint8, shape [n], on their device; for reading, not for autograd."""
    empty = torch.empty(0, dtype=torch.uint8, device=next(iter(tensors)).device)
    targets = map(torch.Tensor.new_empty, repeat(empty, len(tensors)), repeat(0))
    return list(map(torch.Tensor.set_, targets, map(torch.Tensor.untyped_storage, tensors)))


def _padded(parts: Sequence[torch.Tensor], first_bytes: Iterable[int]) -> Iterator[torch.Tensor]:
    """The parts, with zeros before those that begin later than the one before ends."""
    end = 0
    for part, first_byte in zip(parts, first_bytes, strict=True):
        if first_byte > end:
            yield part.new_zeros(first_byte - end)
        yield part
        end = first_byte + part.numel()
