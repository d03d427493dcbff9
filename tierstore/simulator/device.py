"""The simulated accelerator of one rank: a stream of copies each way. `rules/device.py` decides what is copied."""

from __future__ import annotations

from collections import deque

from ..rules.device import CopyBack, CopyOut
from .clock import Clock, Process, Resume
from .hardware import Activity
from .record import SimulatedRecord


class Copy:
    """A copy between device and host memory, queued on the stream of its direction. `ready`: a copy that has to be over
    before this one begins."""

    def __init__(self, nbytes: int, ready: Copy | None = None) -> None:
        self.nbytes = nbytes
        self.ready = ready
        self.is_over = False
        self._waiting: list[Resume] = []

    def query(self) -> bool:
        return self.is_over

    def wait(self, resume: Resume) -> None:
        if self.is_over:
            resume()
        else:
            self._waiting.append(resume)

    def end(self) -> None:
        self.is_over = True
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            resume()


class SimulatedDevice:
    """A `DeviceMemory` with one stream, on which everything is packed and asked for. There is always room.

    One process both computes and queues copies: the host does not run ahead of its device.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queues: dict[Activity, deque[Copy]] = {}
        self._awaited: list[Copy] = []

    def queue(self, direction: Activity, copy: Copy) -> None:
        if direction in self._queues:
            self._queues[direction].append(copy)
        else:
            self._queues[direction] = deque([copy])
            self._clock.begin(self._run(direction))

    def _run(self, direction: Activity) -> Process:
        queue = self._queues[direction]
        while queue:
            copy = queue.popleft()
            if copy.ready is not None:
                yield copy.ready.wait
            yield self._clock.work(direction, copy.nbytes)
            copy.end()
        del self._queues[direction]

    def wait(self, copy: Copy) -> None:
        """Make later computation come after the copy."""
        self._awaited.append(copy)

    def catch_up(self) -> Process:
        """Wait for the copies given to `wait`. The next computation begins when this ends."""
        while self._awaited:
            yield self._awaited.pop().wait

    # --- `DeviceMemory` -----------------------------------------------------------------------------------------------

    def copy_out(self, record: SimulatedRecord) -> CopyOut:
        record.ready = Copy(record.nbytes)
        self.queue(Activity.OFFLOAD, record.ready)
        return CopyOut(record, record.nbytes, record.ready)

    def copy_back(self, record: SimulatedRecord, *, must: bool) -> CopyBack:
        record.ready = Copy(record.nbytes, record.ready)
        self.queue(Activity.RELOAD, record.ready)
        record.has_device_bytes = True
        return CopyBack(record, record.ready)

    def wait_where_packed(self, record: SimulatedRecord, end: Copy) -> None:
        self.wait(end)

    def wait_where_asked(self, record: SimulatedRecord, stream: None, end: Copy) -> None:
        self.wait(end)

    def asked_on(self, record: SimulatedRecord) -> None: ...

    def share(self, record: SimulatedRecord, copy: CopyOut) -> None: ...

    def forget(self, record: SimulatedRecord) -> None:
        record.has_device_bytes = False
