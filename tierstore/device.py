"""The device tier: saved tensors on an accelerator, and their copies to and from slots of host memory.

NOTE [Stream order]
An accelerator's allocator hands a freed block to the next request on the same stream at once; it knows nothing of
copies on other streams. So (each line is one of the waits below):

- the copy out waits for an event of the stream that packed the tensor: its bytes are written by then;
- the block is let go only when the copy out is over, or when the compute stream itself has been made to wait for it;
  then whatever reuses the block comes after. The host never blocks;
- the target of a reload is allocated on the record's own stream, and the copy in waits for an event recorded *after*
  that: the block may have been in use by a kernel queued there just before;
- the compute stream waits for the copy in;
- a slot is used again only when the last copy from or to it is over.

Where tensors are packed on more than one stream, a block may belong to a stream that we do not know. Then references
are held until the copies are over; the bound on what is in flight is kept on average only.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from .handle import Record, State
from .host import Window
from .ownership import unclaim
from .plan import Place
from .slab import Slot

__all__ = ["AcceleratorCopies", "Copies", "DeviceTier", "Marker"]

FLIGHT_BYTES = 256 * 2**20
"""Saved tensors that are being copied out may hold so much device memory; the compute stream waits beyond it."""
RELOAD_BYTES = 256 * 2**20
"""So much is copied back ahead of backward, and kept for other views of the same storage."""


class Marker(Protocol):
    """A point in a stream's work (an event)."""

    def query(self) -> bool:
        """Whether the work up to it is done. Does not block."""

    def synchronize(self) -> None:
        """Wait until it is. Blocks the calling thread, without the GIL."""


class Copies(Protocol):
    """The copy engine: the seam between the device tier and the accelerator. No call blocks the host."""

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        """The accelerator whose memory the tensor is in; None: host memory."""

    def current_stream(self, device: torch.device) -> Any:
        """The stream that this thread queues work on."""

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, stream: Any) -> Marker:
        """Copy device bytes to host bytes (both uint8, shape [n]) once `stream` has done what is queued on it."""

    def copy_in(
        self, source: torch.Tensor, device: torch.device, stream: Any, ready: Marker | None
    ) -> tuple[torch.Tensor, Marker]:
        """Copy host bytes, valid from `ready` on, to new device bytes; later work on `stream` comes after the copy."""

    def wait(self, stream: Any, marker: Marker) -> None:
        """Let later work on `stream` come after the marker."""


class AcceleratorCopies:
    """The copy engine of whatever `torch.accelerator` drives: one stream each way for each device."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, str], torch.Stream] = {}

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        """See `Copies`."""
        return None if tensor.is_cpu else tensor.device

    def current_stream(self, device: torch.device) -> torch.Stream:
        """See `Copies`."""
        return torch.accelerator.current_stream(device)

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, stream: torch.Stream) -> torch.Event:
        """See `Copies`."""
        copying = self._stream(source.device, "out")
        copying.wait_event(stream.record_event())
        with copying:
            target.copy_(source, non_blocking=True)
            return copying.record_event()

    def copy_in(
        self, source: torch.Tensor, device: torch.device, stream: torch.Stream, ready: Marker | None
    ) -> tuple[torch.Tensor, torch.Event]:
        """See `Copies`."""
        with stream:
            target = torch.empty(source.numel(), dtype=torch.uint8, device=device)
            allocated = stream.record_event()
        copying = self._stream(device, "in")
        copying.wait_event(allocated)
        if isinstance(ready, torch.Event):
            copying.wait_event(ready)
        with copying:
            target.copy_(source, non_blocking=True)
            copied = copying.record_event()
        return target, copied

    def wait(self, stream: torch.Stream, marker: Marker) -> None:
        """See `Copies`."""
        stream.wait_event(marker)  # type: ignore[arg-type]

    def _stream(self, device: torch.device, direction: str) -> torch.Stream:
        key = (device, direction)
        if key not in self._streams:
            self._streams[key] = torch.Stream(device)
        return self._streams[key]


class _Flight(NamedTuple):
    """A copy out under way."""

    record: Record
    storage: torch.UntypedStorage  # keeps the device memory
    nbytes: int
    done: Marker


class DeviceTier:
    """The books of what is on accelerators. Guarded by the store's lock; nothing here waits.

    Args:
        copies: the copy engine.
        flight_bytes: see `FLIGHT_BYTES`.
        reload_bytes: see `RELOAD_BYTES`.
    """

    def __init__(self, copies: Copies, flight_bytes: int = FLIGHT_BYTES, reload_bytes: int = RELOAD_BYTES) -> None:
        self._copies = copies
        self.device_of = copies.device_of
        self._flight_bytes = flight_bytes
        self._reload_bytes = reload_bytes
        self.resident = Window(0)  # ours alone, not chosen to leave; the limit is the last scope's `device_bytes`
        self._resident: OrderedDict[int, tuple[Record, int]] = OrderedDict()  # with bytes; saved first, first
        self._leaving: OrderedDict[int, Record] = OrderedDict()  # those of them that the plan sends away
        self._flights: deque[_Flight] = deque()
        self._in_flight = Window(flight_bytes)
        self._reloaded: OrderedDict[int, tuple[Record, int]] = OrderedDict()
        self._reloaded_bytes = 0
        self._busy: deque[tuple[Marker, Callable[[], None]]] = deque()
        self._streams_seen: set[Any] = set()

    @property
    def held_bytes(self) -> int:
        """Device memory held by records that are ours alone."""
        return self.resident.used_bytes + self._in_flight.used_bytes

    @property
    def is_busy(self) -> bool:
        """Whether `poll` may find something."""
        return bool(self._flights or self._busy)

    def note_stream(self, record: Record) -> None:
        """Remember the stream that packs the record."""
        record.stream = self._copies.current_stream(_device_of(record))
        self._streams_seen.add(record.stream)

    def hold(self, record: Record) -> None:
        """The record is ours alone now, and stays on the device until it is chosen to leave."""
        record.move(State.DEVICE)
        self._resident[record.key] = record, record.nbytes
        self.resident.charge(record.nbytes)
        if record.place in (Place.HOST, Place.DISK):
            self._leaving[record.key] = record

    def surplus(self) -> Record | None:
        """What has to leave the device next: by the plan, or, if `device_bytes` is exceeded, what was saved first."""
        while self._leaving:
            key, record = next(iter(self._leaving.items()))
            if record.place in (Place.HOST, Place.DISK):
                return record
            del self._leaving[key]  # backward has begun: it need not leave any more
        if self.resident.fits(0):
            return None
        return next(iter(self._resident.values()))[0]

    def leave(self, record: Record) -> None:
        """The record is not resident any more."""
        _, nbytes = self._resident.pop(record.key, (record, 0))
        self._leaving.pop(record.key, None)
        self.resident.discharge(nbytes)

    def offload(self, record: Record, source: torch.Tensor, slot: Slot, first: int, end: int) -> None:
        """Begin to copy bytes [first, end) of the source's storage to the slot."""
        self.leave(record)
        storage = source.untyped_storage()
        done = self._copies.copy_out(_bytes_of(source)[first:end], slot.as_plain_tensor(), record.stream)
        record.move(State.OFFLOADING)
        record.ready = done
        self._flights.append(_Flight(record, storage, storage.nbytes(), done))
        self._in_flight.charge(storage.nbytes())
        self._bound_flight(record.stream)

    def _bound_flight(self, stream: Any) -> None:
        self.poll()
        if len(self._streams_seen) > 1:
            return
        while not self._in_flight.fits(0) and len(self._flights) > 1:
            flight = self._flights.popleft()
            self._copies.wait(stream, flight.done)
            self._land(flight)
            self._busy.append((flight.done, lambda record=flight.record: _arrive(record)))  # type: ignore[misc]

    def poll(self) -> None:
        """Let go of what copies have finished with. (An event of a device cannot be awaited: it is looked at.)"""
        while self._flights and self._flights[0].done.query():
            flight = self._flights.popleft()
            self._land(flight)
            _arrive(flight.record)
        while self._busy and self._busy[0][0].query():
            self._busy.popleft()[1]()

    def _land(self, flight: _Flight) -> None:
        self._in_flight.discharge(flight.nbytes)
        record = flight.record
        if record.claims is not None and record.key not in self._reloaded:
            self._forget_device_bytes(record)

    def _forget_device_bytes(self, record: Record) -> None:
        source = record.source
        unclaim(record)
        record.views = {}
        if source is not None:
            source.data = torch.empty(0, dtype=torch.uint8, device=source.device)

    def has_bytes(self, record: Record) -> bool:
        """Whether the record's source carries its bytes on the device."""
        return record.claims is not None

    def reload(self, record: Record, source: torch.Tensor, slot: Slot) -> None:
        """Begin to copy the slot back; the source carries the bytes for work that is queued from now on."""
        target, copied = self._copies.copy_in(slot.as_plain_tensor(), _device_of(record), record.stream, record.ready)
        self._copies.wait(record.stream, copied)
        current = self._copies.current_stream(_device_of(record))
        if current != record.stream:
            self._copies.wait(current, copied)
        source.data = target
        record.ready = copied
        record.claims = []
        self._reloaded[record.key] = (record, record.nbytes)
        self._reloaded_bytes += record.nbytes
        while self._reloaded_bytes > self._reload_bytes and len(self._reloaded) > 1:
            self._forget_device_bytes(self.unload(next(iter(self._reloaded.values()))[0]))

    def has_room_to_reload(self, nbytes: int) -> bool:
        """Whether so much more may be copied back before it is asked for."""
        return self._reloaded_bytes + nbytes <= self._reload_bytes

    def unload(self, record: Record) -> Record:
        """The record's device copy is not counted any more."""
        _, nbytes = self._reloaded.pop(record.key, (record, 0))
        self._reloaded_bytes -= nbytes
        return record

    def release(self, record: Record) -> None:
        """The record is gone."""
        self.leave(record)
        self.unload(record)

    def when_copied(self, ready: Marker, then: Callable[[], None]) -> None:
        """Call `then` once the copy is over: at once if it is, else at some later `poll`."""
        if ready.query():
            then()
        else:
            self._busy.append((ready, then))


def _device_of(record: Record) -> torch.device:
    if record.device is None:
        raise RuntimeError(f"handle {record.key} is in host memory")
    return record.device


def _arrive(record: Record) -> None:
    if record.state is State.OFFLOADING:
        record.move(State.HOST)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's whole storage as uint8, shape [n], on its device; for reading, not for autograd."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
