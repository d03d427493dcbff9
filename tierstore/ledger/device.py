"""Copies between an accelerator and host memory: which begin, which the stream has to wait for, when memory is free.

NOTE [Stream order] in `tierstore/residency/device.py` says why.

NOTE [Asked seldom]
To ask whether a copy is over takes three calls of the driver. Where the host is ahead of the device, the answer is no,
and nothing depends on it: beyond the windows the stream is made to wait, which costs one call if the copy is over. So
only the oldest copy each way is asked for, and while one is not over the next calls of the store do not ask. They do as
a scope begins and ends, as backward begins, after a wait, where the slab has no room, and on the store's own thread
(`ask_anew`). There a lost device is noticed at the latest. Memory that copies have released is used a little later, but
still within the windows."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from .device_window import DeviceWindow
from .record import R, RuledRecord
from .state import State

NUM_SPARED = 16
"""Calls of the store, and packs, that do not ask whether copies are over."""
_MOST_COMPARED = 64
"""Copies back; with a retained graph and small tensors there may be thousands."""


class CopyOut(NamedTuple):
    """A copy from the device, queued: the device memory that it keeps, in pieces, its size, and the end of the copy.

    The end is on the stream of its direction; `end.query()` tells, without blocking, whether it is over."""

    memory: Sequence[Any]
    nbytes: int
    end: Any


class CopyBack(NamedTuple):
    """A copy to the device, queued: the memory that is copied to, in pieces, and the end of the copy."""

    memory: Sequence[Any]
    end: Any


R_contra = TypeVar("R_contra", bound=RuledRecord, contravariant=True)


class DeviceMemory(Protocol[R_contra]):
    """Device memory and the streams, as the rules see them. No call blocks the host."""

    def copy_out(self, record: R_contra) -> CopyOut: ...

    def copy_back(self, record: R_contra, *, must: bool) -> CopyBack | None:
        """Queue the copy from the record's slot to the device, and give the record that memory.

        None: the device has no room, and nothing was changed. With `must` its error is raised instead."""

    def wait_where_packed(self, record: R_contra, end: Any) -> None: ...

    def share(self, record: R_contra, copy: CopyOut) -> None: ...

    def drop_bytes(self, record: R_contra) -> None:
        """Drop the record's bytes on the device. Tensors in use keep theirs."""

    def asked_on(self, device: Any) -> Any:
        """The stream on which a record of that device is asked for now."""

    def wait_where_asked(self, record: R_contra, stream: Any, end: Any) -> None:
        """Have the stream, on which the record was asked for, wait for the copy back."""


class _Flight(NamedTuple, Generic[R]):
    record: R
    copy: CopyOut


class _Reload(Generic[R]):
    """A copy back, under way or over.

    `memory`: the target; None once one of `streams` waits for the copy, since the record's own tensor then keeps it."""

    __slots__ = ("end", "memory", "nbytes", "record", "streams")

    def __init__(self, record: R, copy: CopyBack) -> None:
        self.record = record
        self.nbytes = record.nbytes
        self.memory: object | None = copy.memory
        self.end = copy.end
        self.streams: list[Any] = []


class DeviceRules(Generic[R]):
    """The records with bytes on accelerators. Guarded by the store's lock; no call blocks the host.

    Attributes:
        window: how much may stay, be on its way out, and be copied back ahead.
        too_large: keys of groups for which the device had no room as a whole.
        flights, busy: copies that are not known to be over: those that still hold device memory, and the others.
    """

    def __init__(self, memory: DeviceMemory[R], window: DeviceWindow[R]) -> None:
        self._memory = memory
        self.window = window
        self.too_large: set[int] = set()
        self.flights: deque[_Flight[R]] = deque()
        self._reloaded: OrderedDict[int, _Reload[R]] = OrderedDict()
        self._asked_last = 0  # key of the record that was handed over last; it may be in use right now
        self._num_ahead = 0  # those in `_reloaded` that nobody has asked for yet
        self.busy: deque[tuple[Any, Callable[[], None]]] = deque()
        self._may_ask = True
        self._num_spared = 0  # calls from now on that do not ask

    @property
    def held_bytes(self) -> int:
        return self.window.resident.used_bytes + self.window.in_flight.used_bytes

    def hold(self, record: R) -> None:
        """The store is the record's sole owner now: it stays on the device until it is chosen to leave."""
        record.move(State.DEVICE)
        if self.window.hold(record):
            self.bound_flight()  # room that was lent to copies is needed now

    def offload(self, record: R) -> None:
        self.window.leave(record)
        copy = self._memory.copy_out(record)
        record.move(State.OFFLOADING)
        self.flights.append(_Flight(record, copy))
        self.window.in_flight.used_bytes += copy.nbytes
        self.bound_flight()

    def bound_flight(self) -> None:
        """Have copies out release their memory, if they hold more than there is room for."""
        while self.window.flies_too_much() and len(self.flights) > 1:
            self._land_early()

    def _land_early(self) -> None:
        """Have the stream that packed wait for the oldest copy out, and release its device memory."""
        flight = self.flights.popleft()
        self._memory.wait_where_packed(flight.record, flight.copy.end)
        self._land(flight)
        self.busy.append((flight.copy.end, partial(_arrive, flight.record)))

    def has_finished(self) -> bool:
        """Whether a copy is over that is not known to be: see NOTE [Asked seldom]."""
        if self._num_spared or not self._may_ask:
            self._num_spared -= 1
            return False
        flights, busy = self.flights, self.busy
        is_over = bool((flights and flights[0].copy.end.query()) or (busy and busy[0][0].query()))
        self._num_spared = 0 if is_over else NUM_SPARED
        return is_over

    def count_spared(self, num_packs: int) -> None:
        """So many packs will not even take the lock."""
        self._num_spared = max(0, self._num_spared - num_packs)

    def ask_anew(self) -> None:
        """The next call asks: see NOTE [Asked seldom]."""
        self._num_spared = 0

    def poll(self, *, seldom: bool = False) -> None:
        """Release the memory of copies that are over. (The event of a device cannot be awaited, so it is polled.)

        `seldom`: see NOTE [Asked seldom]."""
        if not self._may_ask:
            return
        if seldom and self._num_spared:
            self._num_spared -= 1
            return
        flights, busy = self.flights, self.busy
        if flights and flights[0].copy.end.query():
            _ask_ahead([flight.copy.end for flight in flights])
            while flights and flights[0].copy.end.query():
                flight = flights.popleft()
                self._land(flight)
                _arrive(flight.record)
        if busy and busy[0][0].query():
            _ask_ahead([end for end, _ in busy])
            while busy and busy[0][0].query():
                busy.popleft()[1]()
        self._num_spared = NUM_SPARED if flights or busy else 0

    def _land(self, flight: _Flight[R]) -> None:
        self.window.in_flight.used_bytes -= flight.copy.nbytes
        record = flight.record
        self._memory.share(record, flight.copy)
        if record.has_device_bytes and record.key not in self._reloaded:
            self._memory.drop_bytes(record)

    def reload(self, record: R, *, must: bool = False, next_rank: Callable[[R], float] | None = None) -> bool:
        """Begin to copy the record's slot back to the device. Call `hand_over` before the bytes are used.

        False: the device has no room. With `must`, its error is raised instead.
        `next_rank`: when backward asks for a record next. Beyond the window, what it needs last is forgotten, but not
        what was handed over last; of many records only the oldest are compared. None: not known, and the oldest is
        forgotten."""
        copy = self._memory.copy_back(record, must=must)
        if copy is None:
            return False
        self._reloaded[record.key] = _Reload(record, copy)
        self.window.reloaded.used_bytes += record.nbytes
        self._num_ahead += 1
        while self.window.reloads_too_much() and len(self._reloaded) > 2:  # one in use, and the next
            oldest = [reload.record for reload in islice(self._reloaded.values(), _MOST_COMPARED)]
            others = [other for other in oldest if other is not record and other.key != self._asked_last]
            self._drop_copy(oldest[0] if next_rank is None else max(others, key=next_rank))
        return True

    def hand_over(self, record: R) -> None:
        """Order this thread's stream: work that is queued on it from now on finds the record's bytes on the device."""
        self._asked_last = record.key
        stream = self._memory.asked_on(record.device)
        reload = self._reloaded.get(record.key)
        if reload is None or record() is None:
            return
        self._reloaded.move_to_end(record.key)  # a copy ahead does not take its place
        if stream in reload.streams:
            return
        self._memory.wait_where_asked(record, stream, reload.end)
        self._note_awaited(reload)
        reload.streams.append(stream)

    def hand_over_again(self, record: R) -> bool:
        """The same for one more tensor in the record's bytes. False: call `hand_over`."""
        stream, key = self._memory.asked_on(record.device), record.key
        if stream not in self._reloaded[key].streams if key in self._reloaded else not record.has_device_bytes:
            return False
        self._asked_last = key
        return True

    def _note_awaited(self, reload: _Reload[R]) -> None:
        self._num_ahead -= reload.memory is not None
        reload.memory = None

    def make_room(self) -> None:
        """Release the device memory of all copies, out and back. Tensors in use keep theirs.

        A block goes back to its own stream. That stream is made to wait for the copy, so its next user comes after it.
        """
        while self.flights:
            self._land_early()
        for reload in list(self._reloaded.values()):
            if reload.memory is not None:
                self._memory.wait_where_packed(reload.record, reload.end)
                self._note_awaited(reload)
            self._drop_copy(reload.record)

    def has_room_to_reload(self, nbytes: int, is_needed_first: Callable[[R], bool] | None = None) -> bool:
        """Whether `nbytes` more may be copied back before they are asked for.

        `is_needed_first`: whether backward uses a record, or asks for it before these bytes; None: not known. Such
        records are not to be forgotten for them. One may be there even if both together are too large."""
        if self.window.fits_reload(nbytes):
            return True
        if self._num_ahead:
            return False
        num_needed = forgettable_bytes = 0
        for reload in self._reloaded.values():
            record = reload.record
            if record.key == self._asked_last or (is_needed_first is not None and is_needed_first(record)):
                num_needed += 1
            else:
                forgettable_bytes += reload.nbytes
                if self.window.fits_reload(nbytes - forgettable_bytes):
                    return True
        return num_needed <= 1

    def _drop_copy(self, record: R) -> None:
        self.unload(record)
        self._memory.drop_bytes(record)

    def unload(self, record: R) -> None:
        if self.too_large:
            self.too_large.discard(record.key)
        reload = self._reloaded.pop(record.key, None)
        if reload is not None:
            self.window.reloaded.used_bytes -= reload.nbytes
            if reload.memory is not None:  # no stream waits for the copy: it is kept until that is over
                self._num_ahead -= 1
                self.when_copied(reload.end, partial(_drop, reload.memory))

    def remove(self, record: R) -> None:
        self.window.leave(record)
        self.unload(record)

    def when_copied(self, end: Any, then: Callable[[], None]) -> None:
        """Call `then` once the copy is over: at once if that is known, otherwise in a later `poll`."""
        if self._may_ask and not self.busy and end.query():
            then()
        else:
            self.busy.append((end, then))

    def stop_asking(self) -> None:
        """Query no event any more: the store is closed, and a failed device raises. The engine waits for the copies."""
        self._may_ask = False

    def under_way(self) -> Sequence[Any]:
        return [flight.copy.end for flight in self.flights] + [end for end, _ in self.busy]

    def finish(self) -> None:
        """Release everything: all copies are over, or the device has failed and they never will be."""
        while self.flights:
            self.window.in_flight.used_bytes -= self.flights.popleft().copy.nbytes
        while self.busy:
            self.busy.popleft()[1]()


def _ask_ahead(ends: Sequence[Any]) -> None:
    """The oldest is over. Copies one way end in order: one that is over tells it of those before."""
    number = len(ends) - 1
    while number > 1 and not ends[number].query():
        number //= 2


def _arrive(record: RuledRecord) -> None:
    if record.state is State.OFFLOADING:
        record.move(State.HOST)


def _drop(memory: object) -> None:
    """Does nothing. The reference passed in was the last one, so the memory is freed."""
