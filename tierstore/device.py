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
keep the block for it until backward; here the user has to call `record_stream`.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from .copies import Copies, Marker
from .coverage import GraphTimes
from .device_window import FLIGHT_BYTES, RELOAD_BYTES, DeviceWindow
from .handle import Record, State
from .lent import LentViews
from .ownership import unclaim
from .slab import Slot

__all__ = ["DeviceTier"]


class _Flight(NamedTuple):
    """A copy out under way."""

    record: Record
    memory: torch.Tensor  # the whole storage, uint8
    done: Marker


class _Reload:
    """A copy in, under way or over.

    Attributes:
        record, nbytes: the record that is copied, and its size.
        copied: the end of the copy.
        memory: the target; None once a stream waits for the copy, since the record's own alias then keeps the block.
        streams: the streams that wait for the copy.
    """

    __slots__ = ("copied", "memory", "nbytes", "record", "streams")

    def __init__(self, record: Record, memory: torch.Tensor, copied: Marker) -> None:
        self.record = record
        self.nbytes = record.nbytes
        self.copied = copied
        self.memory: torch.Tensor | None = memory
        self.streams: list[Any] = []


class DeviceTier:
    """The books of saved tensors on accelerators. Guarded by the store's lock; no call blocks the host.

    Args:
        copies: the copy engine.
        flight_bytes: see `FLIGHT_BYTES`.
        reload_bytes: see `RELOAD_BYTES`.
        lent_views: the store's; None: new ones.
    """

    def __init__(
        self,
        copies: Copies,
        flight_bytes: int = FLIGHT_BYTES,
        reload_bytes: int = RELOAD_BYTES,
        lent_views: LentViews | None = None,
    ) -> None:
        self._copies = copies
        self._lent_views = LentViews() if lent_views is None else lent_views
        self.device_of = copies.device_of
        self._window = DeviceWindow[Record](0, flight_bytes, reload_bytes)
        self.resident = self._window.resident
        self._flights: deque[_Flight] = deque()
        self._reloaded: OrderedDict[int, _Reload] = OrderedDict()
        self._num_ahead = 0  # those in `_reloaded` that nobody has asked for yet
        self._busy: deque[tuple[Marker, Callable[[], None]]] = deque()
        self._streams: defaultdict[torch.device, set[Any]] = defaultdict(set)  # that packed or unpacked there
        self._may_ask = True
        self._times: GraphTimes | None = None

    @property
    def held_bytes(self) -> int:
        """Device memory of records that are ours alone and of copies out under way."""
        return self.resident.used_bytes + self._window.in_flight.used_bytes

    @property
    def is_busy(self) -> bool:
        """Whether `poll` may find a copy that is over."""
        return bool(self._flights or self._busy)

    def note_stream(self, record: Record) -> None:
        """Remember the stream that packs the record."""
        record.stream = self._current_stream(record)

    def _current_stream(self, record: Record) -> Any:
        device = _device_of(record)
        stream = self._copies.current_stream(device)
        self._streams[device].add(stream)
        return stream

    def keep(self, limit_bytes: int) -> None:
        """Set how many bytes may stay. Times that are being taken are spoilt: they began under another limit."""
        self.spoil_times()
        self.resident.limit_bytes = limit_bytes

    def spoil_times(self) -> None:
        """Ignore the times that are being taken."""
        if (times := self._open_times()) is not None:
            times.spoil()

    def time_graph(self, record: Record) -> GraphTimes:
        """Begin to take the times of the graph whose first pack is this record."""
        if (others := self._open_times()) is not None:
            others.spoil()
        self._times = GraphTimes(self._copies, _device_of(record), record.stream, self.resident.limit_bytes or 0)
        return self._times

    def _open_times(self) -> GraphTimes | None:
        if self._times is not None and not self._times.is_open:
            self._times = None
        return self._times

    def _wait(self, stream: Any, marker: Marker) -> None:
        times = self._open_times()
        if times is None:
            self._copies.wait(stream, marker)
        else:
            times.waits(stream, partial(self._copies.wait, stream, marker))

    def hold(self, record: Record) -> None:
        """The record is ours alone now, and stays on the device until it is chosen to leave."""
        record.move(State.DEVICE)
        if self._window.hold(record):
            self._bound_flight()  # room that was lent to copies is needed now

    def surplus(self) -> Record | None:
        """The record that has to leave the device next; None: there is none. See `DeviceWindow`."""
        return self._window.surplus()

    def leave(self, record: Record) -> None:
        """The record is not resident any more."""
        self._window.leave(record)

    def offload(self, record: Record, source: torch.Tensor, slot: Slot, first: int, end: int) -> None:
        """Begin to copy bytes [first, end) of the source's storage to the slot."""
        self.leave(record)
        memory = _bytes_of(source)
        done = self._copies.copy_out(memory[first:end], slot.as_plain_tensor(), record.stream)
        record.move(State.OFFLOADING)
        record.ready = done
        self._flights.append(_Flight(record, memory, done))
        self._window.in_flight.charge(len(memory))
        if (times := self._open_times()) is not None:
            times.copies_out(end - first)
        self._bound_flight()

    def _bound_flight(self) -> None:
        self.poll()
        while self._window.flies_too_much() and len(self._flights) > 1:
            self._land_early()

    def _land_early(self) -> None:
        """Have the stream that packed wait for the oldest copy out, and release its device memory."""
        flight = self._flights.popleft()
        self._wait(flight.record.stream, flight.done)
        self._land(flight)
        self._busy.append((flight.done, partial(_arrive, flight.record)))

    def poll(self) -> None:
        """Release the memory of copies that are over. (The event of a device cannot be awaited, so it is polled.)"""
        if not self._may_ask:
            return
        while self._flights and self._flights[0].done.query():
            flight = self._flights.popleft()
            self._land(flight)
            _arrive(flight.record)
        while self._busy and self._busy[0][0].query():
            self._busy.popleft()[1]()

    def _land(self, flight: _Flight) -> None:
        self._window.in_flight.discharge(len(flight.memory))
        record = flight.record
        for stream in self._streams[_device_of(record)]:
            self._copies.share(flight.memory, stream)
        if record.claims is not None and record.key not in self._reloaded:
            self._forget_device_bytes(record)

    def _forget_device_bytes(self, record: Record) -> None:
        source = record.source
        unclaim(record)
        self._lent_views.let_go(record)
        if source is not None:
            source.data = torch.empty(0, dtype=torch.uint8, device=source.device)

    def has_bytes(self, record: Record) -> bool:
        """Whether the record's source carries its bytes on the device."""
        return record.claims is not None

    def reload(self, record: Record, source: torch.Tensor, slot: Slot) -> None:
        """Begin to copy the slot back to the device. Call `hand_over` before the source's bytes are used.

        Raises:
            torch.OutOfMemoryError: the device has no room; nothing was changed.
        """
        target, copied = self._copies.copy_in(slot.as_plain_tensor(), _device_of(record), record.stream, record.ready)
        source.data = target
        record.ready = copied
        record.claims = []
        self._reloaded[record.key] = _Reload(record, target, copied)
        self._window.reloaded.charge(record.nbytes)
        if (times := self._open_times()) is not None:
            times.copies_in(record.nbytes)
        self._num_ahead += 1
        while self._window.reloads_too_much() and len(self._reloaded) > 2:  # one in use, and the next
            self._forget_device_bytes(self.unload(next(iter(self._reloaded.values())).record))

    def hand_over(self, record: Record) -> None:
        """Order this thread's stream: work that is queued on it from now on finds the record's bytes on the device."""
        current, source = self._current_stream(record), record.source
        if (times := self._open_times()) is not None:
            times.asked_for(current)
        reload = self._reloaded.get(record.key)
        if reload is None or source is None:
            return
        self._reloaded.move_to_end(record.key)  # a reload ahead does not take its place
        if current in reload.streams:
            return
        self._wait(current, reload.copied)
        if current != record.stream:
            self._copies.share(source, current)
        self._num_ahead -= reload.memory is not None
        reload.memory = None
        reload.streams.append(current)

    def make_room(self) -> None:
        """Release the device memory of all copies, out and back. Tensors in use keep theirs. Does not block.

        A block goes back to its own stream. That stream is made to wait for the copy, so its next user comes after it.
        """
        while self._flights:
            self._land_early()
        for reload in list(self._reloaded.values()):
            if reload.memory is not None:
                self._wait(reload.record.stream, reload.copied)
                self._num_ahead, reload.memory = self._num_ahead - 1, None
            self._forget_device_bytes(self.unload(reload.record))

    def has_room_to_reload(self, nbytes: int) -> bool:
        """Whether `nbytes` more may be copied back before they are asked for."""
        return self._window.fits_reload(nbytes) or not self._num_ahead

    def unload(self, record: Record) -> Record:
        """Stop counting the record's device copy; returns the record."""
        reload = self._reloaded.pop(record.key, None)
        if reload is not None:
            self._window.reloaded.discharge(reload.nbytes)
            if reload.memory is not None:  # no stream waits for the copy: the block is kept until it is over
                self._num_ahead -= 1
                self.when_copied(reload.copied, partial(_drop, reload.memory))
        return record

    def release(self, record: Record) -> None:
        """The record is gone: forget it."""
        self.leave(record)
        self.unload(record)

    def when_copied(self, ready: Marker, then: Callable[[], None]) -> None:
        """Call `then` once the copy is over: at once if it is already, otherwise in a later `poll`."""
        if self._may_ask and ready.query():
            then()
        else:
            self._busy.append((ready, then))

    def stop_asking(self) -> None:
        """Query no event any more: the store is closed, and a failed device raises. The engine waits for the copies."""
        self._may_ask = False

    def under_way(self) -> Sequence[Marker]:
        """The ends of all copies that may still run."""
        return [flight.done for flight in self._flights] + [ready for ready, _ in self._busy]

    def finish(self) -> None:
        """Release everything: all copies are over, or the device has failed and they never will be."""
        while self._flights:
            self._window.in_flight.discharge(len(self._flights.popleft().memory))
        while self._busy:
            self._busy.popleft()[1]()


def _device_of(record: Record) -> torch.device:
    if record.device is None:
        raise RuntimeError(f"handle {record.key} is in host memory")
    return record.device


def _arrive(record: Record) -> None:
    if record.state is State.OFFLOADING:
        record.move(State.HOST)


def _drop(memory: torch.Tensor) -> None:
    """Does nothing. The reference passed in was the last one, so the memory is freed."""


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's whole storage as uint8, shape [n], on its device; for reading, not for autograd."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
