"""The device tier: saved tensors on an accelerator, and their copies to and from slots of host memory.

NOTE [Stream order]
An accelerator's allocator hands a freed block to the next request on the stream that it belongs to at once; it knows
nothing of work on other streams unless it is told (`Copies.share`). So (each line is one of the waits below):

- the copy out waits for an event of the stream that packed the tensor: its bytes are written by then;
- the block is let go only when the copy out is over, or when the stream that packed has been made to wait for it. The
  block may belong to yet another stream (its tensor was computed there), and others may have been given it meanwhile.
  So the allocator is told of every stream that has packed or unpacked on that device: in a program of one stream that
  changes nothing, else the block is used again only behind what they have queued. The host never blocks;
- the target of a reload is allocated on the record's own stream, and the copy in waits for an event recorded *after*
  that: the block may have been in use by a kernel queued there just before;
- whoever asks waits for the copy in, on its own stream, when it asks and not when the copy is queued: else no kernel
  would run beside the copies for later ones. Until somebody has, the block is held here;
- if that is not the stream that the block belongs to, the allocator is told of it;
- a slot is used again only when the last copy from or to it is over; the slab is unpinned when all of them are.

What cannot be seen is a stream that uses a saved tensor and itself never saves nor asks for anything: without a store
the graph would keep the block for it until backward. Its user has to call `record_stream`.
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
        record, nbytes: what is copied.
        copied: when it is over.
        memory: where to; None once a stream waits for it, and the record's own alias is enough.
        streams: those that wait for it.
    """

    __slots__ = ("copied", "memory", "nbytes", "record", "streams")

    def __init__(self, record: Record, memory: torch.Tensor, copied: Marker) -> None:
        self.record = record
        self.nbytes = record.nbytes
        self.copied = copied
        self.memory: torch.Tensor | None = memory
        self.streams: list[Any] = []


class DeviceTier:
    """The books of what is on accelerators. Guarded by the store's lock; nothing here waits.

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
        self._num_ahead = 0  # of those, nobody has asked for yet
        self._busy: deque[tuple[Marker, Callable[[], None]]] = deque()
        self._streams: defaultdict[torch.device, set[Any]] = defaultdict(set)  # that packed or unpacked
        self._may_ask = True
        self._times: GraphTimes | None = None

    @property
    def held_bytes(self) -> int:
        """Device memory held by records that are ours alone."""
        return self.resident.used_bytes + self._window.in_flight.used_bytes

    @property
    def is_busy(self) -> bool:
        """Whether `poll` may find something."""
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
        """From now on so much may stay. What is being timed has run under another limit: that tells nothing."""
        self.spoil_times()
        self.resident.limit_bytes = limit_bytes

    def spoil_times(self) -> None:
        """What is being timed tells nothing."""
        if (times := self._open_times()) is not None:
            times.spoil()

    def time_graph(self, record: Record) -> GraphTimes:
        """Take the times of the graph whose first pack the record is."""
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
            self._bound_flight()  # what was lent of its room is needed now

    def surplus(self) -> Record | None:
        """What has to leave the device next. See `DeviceWindow`."""
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
        """Have the stream that packed wait for the oldest copy out, and let go of its memory."""
        flight = self._flights.popleft()
        self._wait(flight.record.stream, flight.done)
        self._land(flight)
        self._busy.append((flight.done, partial(_arrive, flight.record)))

    def poll(self) -> None:
        """Let go of what copies have finished with. (An event of a device cannot be awaited: it is looked at.)"""
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
        """Begin to copy the slot back. Whoever is to use the source's bytes has to `hand_over` first.

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
        while self._window.reloads_too_much() and len(self._reloaded) > 2:  # in use, and the next
            self._forget_device_bytes(self.unload(next(iter(self._reloaded.values())).record))

    def hand_over(self, record: Record) -> None:
        """Whatever this thread queues on its stream from now on finds the record's bytes on the device."""
        current, source = self._current_stream(record), record.source
        if (times := self._open_times()) is not None:
            times.asked_for(current)
        reload = self._reloaded.get(record.key)
        if reload is None or source is None:
            return
        self._reloaded.move_to_end(record.key)  # what is reloaded ahead now does not take its place
        if current in reload.streams:
            return
        self._wait(current, reload.copied)
        if current != record.stream:
            self._copies.share(source, current)
        self._num_ahead -= reload.memory is not None
        reload.memory = None
        reload.streams.append(current)

    def make_room(self) -> None:
        """Let go of all that is on its way, and of what was copied back: whoever uses that holds it. Does not block.

        A block goes back to its own stream, which is made to wait for the copy: whatever is put there comes after it.
        """
        while self._flights:
            self._land_early()
        for reload in list(self._reloaded.values()):
            if reload.memory is not None:
                self._wait(reload.record.stream, reload.copied)
                self._num_ahead, reload.memory = self._num_ahead - 1, None
            self._forget_device_bytes(self.unload(reload.record))

    def has_room_to_reload(self, nbytes: int) -> bool:
        """Whether so much more may be copied back before it is asked for."""
        return self._window.fits_reload(nbytes) or not self._num_ahead

    def unload(self, record: Record) -> Record:
        """The record's device copy is not counted any more."""
        reload = self._reloaded.pop(record.key, None)
        if reload is not None:
            self._window.reloaded.discharge(reload.nbytes)
            if reload.memory is not None:  # no stream waits for it: nobody may be given the block before it is over
                self._num_ahead -= 1
                self.when_copied(reload.copied, partial(_drop, reload.memory))
        return record

    def release(self, record: Record) -> None:
        """The record is gone."""
        self.leave(record)
        self.unload(record)

    def when_copied(self, ready: Marker, then: Callable[[], None]) -> None:
        """Call `then` once the copy is over: at once if it is, else at some later `poll`."""
        if self._may_ask and ready.query():
            then()
        else:
            self._busy.append((ready, then))

    def stop_asking(self) -> None:
        """The store is closed: the engine waits for what is under way, even where asking a failed device raises."""
        self._may_ask = False

    def under_way(self) -> Sequence[Marker]:
        """The ends of all copies that may not be over."""
        return [flight.done for flight in self._flights] + [ready for ready, _ in self._busy]

    def finish(self) -> None:
        """All of those are over, or will never be: the device has failed."""
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
    """Nothing: the caller's reference was the last one."""


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's whole storage as uint8, shape [n], on its device; for reading, not for autograd."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
