"""Copy engines for tests: one that needs no accelerator, and one that fails as a plan says, around any other."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Any, Literal

import torch

from ..tensors.copies import Copies, Marker
from .faults import Drawn, Faults
from .plan import Operation

_LONGEST_WAIT_SECONDS = 60.0

Way = Literal["out", "in"]
Tensors = Sequence[torch.Tensor]


class _Copied(threading.Event):
    query = threading.Event.is_set

    def synchronize(self) -> None:
        if not self.wait(_LONGEST_WAIT_SECONDS):
            raise TimeoutError("a simulated copy was never done: its engine has ended")


class _Mark(_Copied):
    def __init__(self) -> None:
        super().__init__()
        self.seconds = time.perf_counter()
        self.set()


class SimulatedCopies:
    """A copy engine (`Copies`) without an accelerator: every tensor counts as on a device, and copies run on a thread.

    The "device" is CPU memory on which torch computes at once. Only the copies are asynchronous; they run one after the
    other. To make later work of a stream come after a copy, the host itself has to wait: so `wait`, `synchronize` and
    `end` block, the other methods do not. A context manager; `end` stops the thread.

    `room_bytes`: "device" memory for tensors that are copied back; a copy that does not fit raises
    `torch.OutOfMemoryError`. None: no limit. `num_out`, `num_in`, `num_refused`: copies queued so far, and those
    refused. A subclass may make copies without the thread, with a `_copy` of its own."""

    def __init__(self, room_bytes: int | None = None) -> None:
        self.num_out = self.num_in = self.num_refused = 0
        self._room_bytes = room_bytes
        self._targets: dict[weakref.ref[torch.UntypedStorage], int] = {}  # their sizes in bytes
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._starting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="simulated-copies", daemon=True)

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        return torch.device(tensor.device.type, tensor.device.index or 0)

    def current_stream(self, device: torch.device) -> Any:
        return f"compute on {device}"

    def copy_out_many(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], stream: Any) -> Marker:
        self.num_out += len(sources)
        return self._copy("out", sources, targets, stream, None)

    def copy_in_many(
        self, sources: Sequence[torch.Tensor], device: torch.device, stream: Any, ready: Marker | None
    ) -> tuple[Sequence[torch.Tensor], Marker]:
        """Until the copies have run, the targets hold garbage."""
        if self._room_bytes is not None:
            self._take_room(sum(source.nbytes for source in sources), self._room_bytes)
        self.num_in += len(sources)
        targets = [torch.full((source.nbytes,), 0xEE, dtype=torch.uint8, device=device) for source in sources]
        for target, storage in zip(targets, map(torch.Tensor.untyped_storage, targets), strict=True):
            self._targets[weakref.ref(storage, self._targets.pop)] = target.nbytes
        return targets, self._copy("in", sources, targets, stream, ready)

    def _take_room(self, nbytes: int, room_bytes: int) -> None:
        if self._taken_bytes() + nbytes > room_bytes:
            self.num_refused += 1
            raise torch.OutOfMemoryError(f"a simulated device of {room_bytes} bytes has no room for {nbytes}")

    def _taken_bytes(self) -> int:
        return sum(list(self._targets.values()))

    def wait(self, stream: Any, marker: Marker) -> None:
        marker.synchronize()

    def share(self, memory: Iterable[torch.Tensor], stream: Any) -> None:
        pass  # work on a stream is done at once

    def mark(self, stream: Any) -> Marker:
        return _Mark()

    def seconds_between(self, earlier: Marker, later: Marker) -> float:
        if not isinstance(earlier, _Mark) or not isinstance(later, _Mark):
            raise TypeError("these are no marks of a simulated stream")
        return later.seconds - earlier.seconds

    def spare_bytes(self, device: torch.device) -> int | None:
        return None

    def synchronize(self) -> None:
        """Block until all queued copies are done. Raises TimeoutError: they are not within a minute."""
        done = _Copied()
        self._put(done.set)
        done.synchronize()

    def end(self) -> None:
        """Do the queued copies, then end the thread. Idempotent; blocks."""
        self._put(None)
        self._thread.join()

    def __enter__(self) -> SimulatedCopies:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _copy(self, way: Way, sources: Tensors, targets: Tensors, stream: Any, ready: Any) -> Marker:
        """Queue copies that are over together. They come after what is queued on `stream`, and after `ready`."""
        if ready is not None:
            self._put(ready.synchronize)
        copied, tensors = _Copied(), list(zip(targets, sources, strict=True))

        def copy() -> None:
            while tensors:
                to, what = tensors.pop()
                to.copy_(what)
                del to, what  # before `copied` is set: the next copy may need this memory
            copied.set()

        self._put(copy)
        return copied

    def _put(self, work: Callable[[], None] | None) -> None:
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()
        self._queue.put(work)

    def _run(self) -> None:
        with torch.no_grad():
            while (work := self._queue.get()) is not None:
                work()
                del work  # so that an idle thread keeps no memory alive


class FaultyCopies:
    """Injects faults into another copy engine. It never changes the bytes copied or the order of work on a stream.

    `Latency`, `Bandwidth` and `Late` delay only the event that the host sees: it comes at its time or, for `Late`, once
    later copies are queued or somebody waits. `Fails` raises RuntimeError before any copy, as an accelerator does."""

    def __init__(self, copies: Copies, faults: Faults) -> None:
        self._copies, self._faults, self._num_copies = copies, faults, 0
        self.device_of = copies.device_of
        self.current_stream = copies.current_stream
        self.share = copies.share
        self.mark = copies.mark
        self.seconds_between = copies.seconds_between
        self.spare_bytes = copies.spare_bytes

    def copy_out_many(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], stream: Any) -> Marker:
        drawn = self._begin("offload", sources)
        return self._delayed(self._copies.copy_out_many(sources, targets, stream), drawn)

    def copy_in_many(
        self, sources: Sequence[torch.Tensor], device: torch.device, stream: Any, ready: Marker | None
    ) -> tuple[Sequence[torch.Tensor], Marker]:
        drawn = self._begin("reload", sources)
        targets, copied = self._copies.copy_in_many(sources, device, stream, None if ready is None else _real(ready))
        return targets, self._delayed(copied, drawn)

    def wait(self, stream: Any, marker: Marker) -> None:
        self._copies.wait(stream, _real(marker))

    def _begin(self, operation: Operation, sources: Sequence[torch.Tensor]) -> Drawn:
        drawn = self._faults.draw(operation, sum(source.numel() for source in sources))
        if drawn.error is not None:
            raise RuntimeError(f"{operation}: {os.strerror(drawn.error)} (injected)")
        self._num_copies += 1
        return drawn

    def _delayed(self, marker: Marker, drawn: Drawn) -> Marker:
        late_seconds = drawn.delay_seconds + drawn.least_seconds
        if not late_seconds and not drawn.num_others:
            return marker
        there_at, last = time.monotonic() + late_seconds, self._num_copies + drawn.num_others
        return _LateMarker(marker, there_at, lambda: self._num_copies >= last)


class _LateMarker:
    def __init__(self, real: Marker, there_at: float, has_company: Callable[[], bool]) -> None:
        self.real = real
        self._there_at = there_at
        self._has_company = has_company
        self._was_waited_for = False

    def query(self) -> bool:
        if self._was_waited_for:
            return True
        return time.monotonic() >= self._there_at and self._has_company() and self.real.query()

    def synchronize(self) -> None:
        time.sleep(max(0.0, self._there_at - time.monotonic()))
        self.real.synchronize()
        self._was_waited_for = True


def _real(marker: Marker) -> Marker:
    return marker.real if isinstance(marker, _LateMarker) else marker
