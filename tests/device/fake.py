"""The device of tests that need no accelerator: CPU memory, and a copy engine that copies as late as a real one may.

It has no thread, so a run can be repeated. What differs from test to test is when a copy is said to be over:

- `FakeDevice`: when something waits for it, or when that is asked for the third time;
- `TimedDevice` (`timed.py`): at its time, which is virtual;
- `SteppedDevice` (`tests/ledger/stepped_store.py`): when a script says so.

`happens_before.py` judges the order of streams: there the real copy engine runs over streams that keep clocks.
"""

import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import torch

from tierstore.tensors.copies import Marker
from tierstore.testing import SimulatedCopies
from tierstore.testing.copies import Tensors, Way

__all__ = ["Copy", "FakeDevice", "SeenDevice", "name_of"]

_NUM_QUERIES = 3


class FakeDevice(SimulatedCopies):
    """Copies are made in order, each when it is over, or when a stream is to wait for it.

    A block of the device may be dropped once something has waited for its copy. One that is dropped earlier could
    belong to somebody else when it is read or written, so it is counted.

    Attributes:
        queued: copies that are not made yet.
        num_dead: blocks that were dropped before their copy. `synchronize` finds them.
    """

    def __init__(self, room_bytes: int | None = None) -> None:
        super().__init__(room_bytes)
        self.num_dead = 0
        self.lock = threading.RLock()  # the store's I/O threads wait for copies, too
        self.queued: deque[Copy] = deque()

    def _copy(self, way: Way, sources: Tensors, targets: Tensors, stream: Any, ready: Any) -> Marker:
        return Copy(self, way, sources, targets)

    def synchronize(self) -> None:
        with self.lock:
            if self.queued:
                self.queued[-1].make()
        assert self.num_dead == 0, "no block is used again before its copy is over"

    end = synchronize


class Copy:
    """Tensors on their way together, and the `Marker` of their end. It keeps host memory alive, and no block.

    It is over when it is made; a subclass may say so later."""

    def __init__(self, device: FakeDevice, way: Way = "out", sources: Tensors = (), targets: Tensors = ()) -> None:
        self._device = device
        self._way = way
        self._num_queries = 0
        blocks, on_host = (sources, targets) if way == "out" else (targets, sources)
        self._moves = [
            (weakref.ref(block.untyped_storage()), block.storage_offset(), memory)
            for block, memory in zip(blocks, on_host, strict=True)
        ]
        if self._moves:
            with device.lock:
                device.queued.append(self)

    def query(self) -> bool:
        self._num_queries += 1
        if self._num_queries >= _NUM_QUERIES:
            self.make()
        return not self._moves

    def synchronize(self) -> None:
        self.make()

    def make(self) -> None:
        """And what was queued before it."""
        with self._device.lock:
            while self._moves:
                self._device.queued.popleft()._move()

    def _move(self) -> None:
        for find_storage, offset, memory in self._moves:
            storage = find_storage()
            if storage is None:
                self._device.num_dead += 1
                continue
            block = torch.empty(0, dtype=torch.uint8).set_(storage, offset, memory.shape)
            source, target = (block, memory) if self._way == "out" else (memory, block)
            target.copy_(source)
        self._moves.clear()


class SeenDevice(FakeDevice):
    """Tells what is copied, and from which stream.

    Matrices of one column are on a second device, those of two in host memory. Streams are as on a real accelerator: a
    new object each time, whose comparisons are torch's.

    Attributes:
        now: the number of the current stream.
        out: how many tensors were copied out, each time.
        copied_from: bytes, by device and stream.
        shared: the bytes of each block that was shared, and the number of the stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.out: list[int] = []
        self.copied_from: Counter[tuple[int, int]] = Counter()
        self.shared: list[tuple[int, int]] = []

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        num_columns = tensor.shape[1] if tensor.dim() == 2 else 0
        return None if num_columns == 2 else torch.device("cpu", int(num_columns == 1))

    def current_stream(self, device: torch.device) -> Any:
        return torch.Stream(stream_id=self.now, device_index=device.index, device_type=1)

    def share(self, memory: Iterable[torch.Tensor], stream: Any) -> None:
        self.shared += [(each.nbytes, stream.stream_id) for each in memory]

    def _copy(self, way: Way, sources: Tensors, targets: Tensors, stream: Any, ready: Any) -> Marker:
        if way == "out":
            self.out.append(len(sources))
            self.copied_from[name_of(stream)] += sum(source.nbytes for source in sources)
        return super()._copy(way, sources, targets, stream, ready)


def name_of(stream: Any) -> tuple[int, int]:
    """Its device and its number."""
    return stream.device_index, stream.stream_id
