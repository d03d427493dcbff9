"""What is booked: the records, the tensors before they have one, and what each window is charged with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol

from .counters import Counters
from .pending import Pending
from .record import R
from .windows import HostWindows


class Noted(Protocol):
    """The tensors that are only noted: see `noted.py`. `num_bytes`: an upper bound."""

    @property
    def num_bytes(self) -> int: ...


class Books(Generic[R]):
    """Made first, since the memory and the rules both need it. Guarded by the store's lock.

    Attributes:
        pending: records whose bytes are where autograd left them.
        records: all records whose handle lives, by key.
        released: records whose handle is gone, and that nobody has accounted for yet.
        counters: totals since the store was opened.
    """

    def __init__(self, windows: HostWindows, noted: Noted, is_sole_owner: Callable[[R], bool]) -> None:
        self.windows = windows
        self.noted = noted
        self.pending = Pending[R](is_sole_owner)
        self.records: dict[int, R] = {}
        self.released: deque[R] = deque()
        self.counters = Counters()

    def uncharged_bytes(self) -> int:
        """Bytes of pending and noted tensors that no window is charged with yet."""
        return self.pending.num_bytes + self.noted.num_bytes - self.windows.noted_bytes

    def register(self, record: R) -> None:
        self.records[record.key] = record
        self.counters.packed_tensors += 1
        self.counters.packed_bytes += record.nbytes
