"""The copy engine: the seam between the device tier and the accelerator, in streams and events.

What waits for what is decided by those who call it: NOTE [Stream order] in `device.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from .capture import beside_captures, is_capturing
from .threads import is_thread_of_store

__all__ = ["AcceleratorCopies", "Copies", "Marker"]

_RESERVED_SHARE = 20
"""Of a device's memory, one part in so many is not called spare: fragments, libraries' workspaces."""

_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 50e-6, 1e-3
"""Between two looks at an event that is waited for; each pause is twice the one before."""


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
        """Copy host bytes, valid from `ready` on, to new device bytes (uint8, shape [n]) of `stream`.

        They are there once the marker is; no stream waits for it yet.
        """

    def wait(self, stream: Any, marker: Marker) -> None:
        """Let later work on `stream` come after the marker."""

    def share(self, memory: torch.Tensor, stream: Any) -> None:
        """Whoever is given the memory after it is freed comes after what is queued on `stream` by then."""

    def mark(self, stream: Any) -> Marker | None:
        """A point in the stream's work, of which the time is kept; None: it cannot be (a graph is being captured)."""

    def seconds_between(self, earlier: Marker, later: Marker) -> float:
        """From one mark to another, both of which are over."""

    def spare_bytes(self, device: torch.device) -> int | None:
        """Memory of the device that was never in use so far, with a reserve for fragments; None: not known."""


def _stay_on(device: torch.device) -> None:
    """Have a thread of the store's own stay on the device that it is about to touch.

    A thread that never chose a device has the first one as its current one. To record, await or destroy an event,
    PyTorch goes to the event's device and back (c10/cuda/impl/CUDAGuardImpl.h), and coming back opens a context:
    hundreds of MiB on a device that this process may not use. What such a thread drops it has touched before.
    """
    if device.index is not None and is_thread_of_store() and torch.accelerator.current_device_index() != device.index:
        torch.accelerator.set_device_index(device.index)


@contextmanager
def _asking(device: torch.device) -> Iterator[None]:
    """Ask the driver about something of the device: from there, and to nobody's harm."""
    _stay_on(device)
    with torch.accelerator.device_index(device.index), beside_captures(device):
        yield


class _Point:
    """An event of an accelerator, for any thread. A `Marker`."""

    __slots__ = ("device", "event")

    def __init__(self, event: torch.Event, device: torch.device) -> None:
        self.event = event
        self.device = device

    def query(self) -> bool:
        """See `Marker`. While this thread captures a graph, which would forbid to ask: not yet."""
        return not is_capturing(self.device) and self._is_over()

    def synchronize(self) -> None:
        """See `Marker`.

        It looks now and then. `cudaEventSynchronize` keeps a core busy for as long as it waits, unless the event was
        made a blocking one, and `torch.Event` makes none: it takes `blocking` and ignores it (torch/csrc/Event.cpp).
        """
        pause_seconds = _SHORTEST_PAUSE_SECONDS
        while not self._is_over():
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)

    def _is_over(self) -> bool:
        with _asking(self.device):
            return self.event.query()


def _point(marker: Marker) -> _Point:
    if not isinstance(marker, _Point):
        raise TypeError(f"{marker!r} is no event of this copy engine")
    return marker


class AcceleratorCopies:
    """The copy engine of whatever `torch.accelerator` drives: one stream each way for each device.

    A `torch.Stream` that is entered keeps what to restore in itself, so it cannot be entered twice at once
    (pytorch#176560): these belong to this object alone, `current_stream` gives a fresh one each time, and the store's
    lock is held in every call.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, str], torch.Stream] = {}

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        """See `Copies`."""
        return None if tensor.is_cpu else tensor.device

    def current_stream(self, device: torch.device) -> torch.Stream:
        """See `Copies`."""
        return torch.accelerator.current_stream(device)

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, stream: torch.Stream) -> _Point:
        """See `Copies`."""
        _stay_on(source.device)
        copying = self._stream(source.device, "out")
        copying.wait_event(stream.record_event())
        with copying:
            target.copy_(source, non_blocking=True)
            return _Point(copying.record_event(), source.device)

    def copy_in(
        self, source: torch.Tensor, device: torch.device, stream: torch.Stream, ready: Marker | None
    ) -> tuple[torch.Tensor, _Point]:
        """See `Copies`.

        Raises:
            RuntimeError: while this thread captures a graph: replayed, it would copy what the slot holds by then.
        """
        if is_capturing(device):
            raise RuntimeError(
                "a backward that is captured as a graph asks for a tensor that its forward has offloaded: "
                "capture the forward too, or run it inside tierstore.keep_resident()"
            )
        _stay_on(device)
        with stream:
            target = torch.empty(source.numel(), dtype=torch.uint8, device=device)
            allocated = stream.record_event()
        copying = self._stream(device, "in")
        copying.wait_event(allocated)
        if ready is not None:
            copying.wait_event(_point(ready).event)
        with copying:
            target.copy_(source, non_blocking=True)
            return target, _Point(copying.record_event(), device)

    def wait(self, stream: torch.Stream, marker: Marker) -> None:
        """See `Copies`."""
        point = _point(marker)
        _stay_on(point.device)
        stream.wait_event(point.event)

    def share(self, memory: torch.Tensor, stream: torch.Stream) -> None:
        """See `Copies`."""
        memory.record_stream(stream)

    def mark(self, stream: torch.Stream) -> _Point | None:
        """See `Copies`."""
        if is_capturing(stream.device):
            return None
        event = torch.Event(stream.device, enable_timing=True)
        return _Point(stream.record_event(event), stream.device)

    def seconds_between(self, earlier: Marker, later: Marker) -> float:
        """See `Copies`."""
        return _point(earlier).event.elapsed_time(_point(later).event) / 1000

    def spare_bytes(self, device: torch.device) -> int | None:
        """See `Copies`; what PyTorch has reserved and never used counts, since the peak was last reset."""
        if device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
        return max(0, free + unused - total // _RESERVED_SHARE)

    def _stream(self, device: torch.device, direction: str) -> torch.Stream:
        key = (device, direction)
        if key not in self._streams:
            self._streams[key] = torch.Stream(device)
        return self._streams[key]
