"""The copy engine: the seam between the device tier and the accelerator, in streams and events.

Its callers decide the order of waits: NOTE [Stream order] in `device.py`."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import torch

from ..base.threads import is_thread_of_store
from .capture import beside_captures, current_stream, is_capturing
from .pinning import is_one_piece, pieces

_RESERVED_SHARE = 20
"""One part in twenty of a device's memory is never called spare: it is left to fragments and libraries' workspaces."""

_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 50e-6, 1e-3
"""Pauses between two queries of an event that is waited for; each pause is twice the one before."""


class Marker(Protocol):
    """A point in a stream's work (an event). `query`: whether that work is done, without blocking."""

    def query(self) -> bool: ...

    def synchronize(self) -> None:
        """Blocks the calling thread until it is done, without the GIL."""


class Copies(Protocol):
    """The copy engine: the seam between the device tier and the accelerator. No call blocks the host.

    Device bytes and host bytes are uint8, shape [n]."""

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        """The accelerator whose memory the tensor is in; None: host memory."""

    def current_stream(self, device: torch.device) -> Any: ...

    def copy_out_many(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], stream: Any) -> Marker:
        """Copy each, all of one device, once `stream` has done what is queued on it. They are over together."""

    def copy_in_many(
        self, sources: Sequence[torch.Tensor], device: torch.device, stream: Any, ready: Marker | None
    ) -> tuple[Sequence[torch.Tensor], Marker]:
        """Copy host bytes, valid from `ready` on, to new device bytes allocated on `stream`, each to its own.

        All have arrived when the returned marker is over; no stream waits for it yet. Raises torch.OutOfMemoryError:
        nothing was queued. RuntimeError: this thread captures a graph, whose replay would copy what the slot then
        holds."""

    def wait(self, stream: Any, marker: Marker) -> None: ...

    def share(self, memory: Iterable[torch.Tensor], stream: Any) -> None:
        """After each is freed, its memory's next user waits for the work that is queued on `stream` by then."""

    def mark(self, stream: Any) -> Marker | None:
        """A point in the stream's work with a time; None: a graph is being captured, which forbids it."""

    def seconds_between(self, earlier: Marker, later: Marker) -> float: ...

    def spare_bytes(self, device: torch.device) -> int | None:
        """Bytes of device memory that were never in use so far, less a reserve for fragments; None: not known."""


def _stay_on(device: torch.device) -> None:
    """Make `device` the current one for good, if this is a store's own thread.

    The current device of a new thread is the first one. To record, await or destroy an event, PyTorch switches to the
    event's device and back (c10/cuda/impl/CUDAGuardImpl.h). Switching back opens a context on the first device:
    hundreds of MiB on a device that this process may not use. Events that such a thread drops are of devices it used.
    """
    if device.index is not None and is_thread_of_store() and torch.accelerator.current_device_index() != device.index:
        torch.accelerator.set_device_index(device.index)


@contextmanager
def _asking(device: torch.device) -> Iterator[None]:
    """Inside, the driver may be asked about the device: it is the current one, and no capture is broken."""
    _stay_on(device)
    with torch.accelerator.device_index(device.index), beside_captures(device):
        yield


_nobody: Callable[[object], None] = deque[object](maxlen=0).append


class _Way:
    """A stream whose points come one after the other.

    Attributes:
        num_points: that were recorded in it. `num_over`: so many, or more, are over.
    """

    __slots__ = ("num_over", "num_points")

    def __init__(self) -> None:
        self.num_points = self.num_over = 0


class _Point:
    """An event of an accelerator, for any thread. A `Marker`.

    `way`: the stream, if a point that is over tells of those before it. `take_back`: gets the event when nobody needs
    it any more; it must be a function of C."""

    __slots__ = ("_number", "_way", "device", "event", "give_back")

    def __init__(
        self,
        event: torch.Event,
        device: torch.device,
        way: _Way | None = None,
        take_back: Callable[[torch.Event], None] = _nobody,
    ) -> None:
        self.event = event
        self.device = device
        self._way = _Way() if way is None else way
        self._way.num_points = self._number = self._way.num_points + 1
        self.give_back = partial(take_back, event)

    # Python calls what this gives as the point dies; no line of Python runs: see NOTE [No finalizers] in `remains.py`.
    __del__ = property(attrgetter("give_back"))

    def query(self) -> bool:
        """False while this thread captures a graph, since a capture forbids the query."""
        return self._number <= self._way.num_over or (not is_capturing(self.device) and self._is_over())

    def synchronize(self) -> None:
        """Polls with growing pauses: `cudaEventSynchronize` keeps a core busy unless the event was made with
        `blocking`.

        `torch.Event` accepts that argument and ignores it (torch/csrc/Event.cpp)."""
        pause_seconds = _SHORTEST_PAUSE_SECONDS
        while not self._is_over():
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)

    def _is_over(self) -> bool:
        index = self.device.index
        if index is None or torch.accelerator.current_device_index() == index:  # nearly always
            with beside_captures(self.device):
                is_over = self.event.query()
        else:
            with _asking(self.device):
                is_over = self.event.query()
        if is_over:
            self._way.num_over = max(self._way.num_over, self._number)
        return is_over


def _point(marker: Marker) -> _Point:
    if not isinstance(marker, _Point):
        raise TypeError(f"{marker!r} is no event of this copy engine")
    return marker


def queue_copies(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], on_host: Sequence[torch.Tensor]
) -> None:
    """Queue copies of bytes on the current stream, cut where pieces of host memory meet: see `pinning.py`.

    `on_host`: the ones of them that are in host memory, in the order of their addresses."""
    first, last = on_host[0].data_ptr(), on_host[-1]
    is_whole = is_one_piece(first, last.data_ptr() + last.numel() - first)
    for target, source, host in zip(targets, sources, on_host, strict=True):
        if is_whole:
            target.copy_(source, non_blocking=True)
            continue
        address = host.data_ptr()
        for start, stop in pieces(address, host.numel()):
            piece = slice(start - address, stop - address)
            target[piece].copy_(source[piece], non_blocking=True)


class AcceleratorCopies:
    """The copy engine of whatever `torch.accelerator` drives: one stream each way for each device.

    A `torch.Stream` that is entered stores in itself what to restore, so it cannot be entered twice at once
    (pytorch#176560). Therefore these streams belong to this object alone, `current_stream` returns a new object each
    time, and the store's lock is held in every call."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, str], torch.Stream] = {}
        self._ways: defaultdict[tuple[torch.device, str], _Way] = defaultdict(_Way)
        # Events are used again, since to make and to destroy one are two calls of the driver:
        self._free: defaultdict[torch.device, list[torch.Event]] = defaultdict(list)
        self._fences: dict[torch.device, torch.Event] = {}

    current_stream = staticmethod(current_stream)

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        return None if tensor.is_cpu else tensor.device

    def copy_out_many(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], stream: torch.Stream
    ) -> _Point:
        device = sources[0].device
        _stay_on(device)
        copying = self._stream(device, "out")
        copying.wait_event(self._fence(stream, device))
        with copying:
            queue_copies(targets, sources, targets)
            return self._end(copying, device, "out")

    def copy_in_many(
        self, sources: Sequence[torch.Tensor], device: torch.device, stream: torch.Stream, ready: Marker | None
    ) -> tuple[Sequence[torch.Tensor], _Point]:
        if is_capturing(device):
            raise RuntimeError(
                "a backward that is captured as a graph asks for a tensor that its forward has offloaded: "
                "capture the forward too, or run it inside tierstore.keep_resident()"
            )
        _stay_on(device)
        with stream:
            targets = [torch.empty(source.numel(), dtype=torch.uint8, device=device) for source in sources]
            allocated = self._fence(stream, device)
        copying = self._stream(device, "in")
        copying.wait_event(allocated)
        if ready is not None:
            copying.wait_event(_point(ready).event)
        with copying:
            queue_copies(targets, sources, sources)
            return targets, self._end(copying, device, "in")

    def wait(self, stream: torch.Stream, marker: Marker) -> None:
        point = _point(marker)
        _stay_on(point.device)
        stream.wait_event(point.event)

    def share(self, memory: Iterable[torch.Tensor], stream: torch.Stream) -> None:
        for each in memory:
            each.record_stream(stream)

    def mark(self, stream: torch.Stream) -> _Point | None:
        if is_capturing(stream.device):
            return None
        event = torch.Event(stream.device, enable_timing=True)
        return _Point(stream.record_event(event), stream.device)

    def seconds_between(self, earlier: Marker, later: Marker) -> float:
        return _point(earlier).event.elapsed_time(_point(later).event) / 1000

    def spare_bytes(self, device: torch.device) -> int | None:
        """Includes memory that PyTorch has reserved and not used since its peak was last reset, and nothing beyond the
        process's share (`torch.cuda.set_per_process_memory_fraction`)."""
        if device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(device)
        try:
            limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
            reserved = torch.cuda.memory_reserved(device)
            unused = reserved - torch.cuda.max_memory_allocated(device)
        except RuntimeError:  # a `CUDAPluggableAllocator` keeps no such figures
            return None
        return max(0, min(free, limit - reserved) + unused - limit // _RESERVED_SHARE)

    def _fence(self, stream: torch.Stream, device: torch.device) -> torch.Event:
        """The point of the stream that it has come to. To be waited for at once: the next fence is the same event, and
        a wait is for what was recorded last when it was queued (CUDA Runtime API, cudaStreamWaitEvent)."""
        if device in self._fences:
            return stream.record_event(self._fences[device])
        fence = self._fences[device] = stream.record_event()
        return fence

    def _end(self, copying: torch.Stream, device: torch.device, direction: str) -> _Point:
        free = self._free[device]
        event = copying.record_event(free.pop()) if free else copying.record_event()
        return _Point(event, device, self._ways[device, direction], free.append)

    def drop_events(self) -> None:
        """Those that nobody needs, on the devices that they belong to: see `_stay_on`."""
        for device in {*self._free, *self._fences}:
            _stay_on(device)
            self._fences.pop(device, None)
            self._free[device].clear()

    def _stream(self, device: torch.device, direction: str) -> torch.Stream:
        key = (device, direction)
        if key not in self._streams:
            self._streams[key] = torch.Stream(device)
        return self._streams[key]
