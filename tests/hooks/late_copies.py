"""A copy engine that copies as late as an accelerator may, and without a thread, so that a run can be repeated."""

import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tierstore.tensors.copies import Marker
from tierstore.testing import SimulatedCopies

__all__ = ["LateCopies", "SeenCopies", "name_of"]

_NUM_QUERIES = 3


class LateCopies(SimulatedCopies):
    """Copies are made in order, each when a stream or the host waits for it, or when its event is asked for thrice.

    A block of the device may be dropped once something has waited for its copy. One that is dropped earlier could
    belong to somebody else when it is read or written, so it is counted.

    Attributes:
        num_dead: copies whose block was dropped too early. They are not made.
    """

    def __init__(self, room_bytes: int | None = None) -> None:
        super().__init__(room_bytes)
        super().end()
        self.num_dead = 0
        self.lock = threading.RLock()  # the store's I/O threads wait for copies, too
        self.stream: deque[_LateCopy] = deque()

    def copy_out_many(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], stream: Any) -> Marker:
        self.num_out += len(sources)
        return [_LateCopy(self, _Block(source), target) for source, target in zip(sources, targets, strict=True)][-1]

    def _copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Marker:  # type: ignore[override]
        """Called by `copy_in_many`. (Which is not written anew here: the store takes an error for one of an accelerator
        only if no function outside of its package and torch's has part in it.)"""
        return [_LateCopy(self, source, _Block(target)) for source, target in zip(sources, targets, strict=True)][-1]

    def synchronize(self) -> None:
        with self.lock:
            while self.stream:
                self.stream.popleft().make()

    end = synchronize

    def __exit__(self, *_: object) -> None:
        self.end()
        assert self.num_dead == 0, "no block is used again before its copy is over"


class SeenCopies(LateCopies):
    """Tells what is copied, and from which stream.

    Matrices of one column are on a second device, those of two in host memory. Streams are as on a real accelerator: a
    new object each time, whose comparisons are torch's.

    Attributes:
        now: the number of the current stream.
        out: how many tensors were copied out, each time.
        copied_from: bytes, by device and stream.
        shared: the bytes of each block that was shared, and the number of the stream.
    """

    def __init__(self, room_bytes: int | None = None) -> None:
        super().__init__(room_bytes)
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

    def copy_out_many(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], stream: Any) -> Marker:
        self.out.append(len(sources))
        self.copied_from[name_of(stream)] += sum(source.nbytes for source in sources)
        return super().copy_out_many(sources, targets, stream)


def name_of(stream: Any) -> tuple[int, int]:
    """Its device and its number."""
    return stream.device_index, stream.stream_id


class _Block:
    """Bytes of the device, which this does not keep alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._offset, self._size = tensor.storage_offset(), tensor.shape

    def tensor(self) -> torch.Tensor | None:
        storage = self._storage()
        return None if storage is None else torch.empty(0, dtype=torch.uint8).set_(storage, self._offset, self._size)


class _LateCopy:
    """A copy, and its own `Marker`. It keeps host memory alive."""

    def __init__(self, copies: LateCopies, source: torch.Tensor | _Block, target: torch.Tensor | _Block) -> None:
        self._copies = copies
        self._source, self._target = source, target
        self._num_queries, self._is_made = 0, False
        with copies.lock:
            copies.stream.append(self)

    def query(self) -> bool:
        self._num_queries += 1
        if self._num_queries >= _NUM_QUERIES:
            self.synchronize()
        return self._is_made

    def synchronize(self) -> None:
        with self._copies.lock:
            while not self._is_made:
                self._copies.stream.popleft().make()

    def make(self) -> None:
        source, target = (each.tensor() if isinstance(each, _Block) else each for each in (self._source, self._target))
        del self._source, self._target
        if source is None or target is None:
            self._copies.num_dead += 1
        else:
            with torch.no_grad():
                target.copy_(source)
        self._is_made = True
