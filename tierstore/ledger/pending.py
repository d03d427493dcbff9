"""Records whose bytes are still where autograd left them: they may be read, but are not known to be solely owned.

NOTE [No sooner than needed]
The owners of a storage, and the window that is charged with its bytes, only matter once something has to leave memory.
While the budget has room for everything here, records are neither scanned nor charged. This saves most of the cost
of a pack. Only at the end of a scope, records that somebody else also holds are marked as shared, for the statistics.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic

from .plan import PlannedTier
from .record import R
from .state import State

NUM_SCANNED_PER_PACK = 4
"""How many shared records each pack scans again: more than one, so that the list cannot grow without end; few, so
that a pack stays cheap."""


class Pending(Generic[R]):
    """The settled records in state PENDING. Guarded by the store's lock.

    Attributes:
        num_bytes: bytes of all of them. `shared_bytes`: of those whose storage somebody else held at the last look.
        must_be_scanned: one of them leaves as soon as the store is its sole owner: it is on an accelerator, or the plan
            sends it away.
    """

    def __init__(self, is_sole_owner: Callable[[R], bool]) -> None:
        self._is_sole_owner = is_sole_owner
        self._fresh: dict[int, R] = {}  # not scanned yet
        self._unscanned: list[R] = []  # the fresh ones that were settled since the last scan
        self._shared: OrderedDict[int, R] = OrderedDict()  # somebody else held their storage at the last look
        self.num_bytes = self.shared_bytes = 0
        self.must_be_scanned = False

    def settle(self, records: Iterable[R]) -> None:
        for record in records:
            if record.state is State.PENDING:
                self._fresh[record.key] = record
                self._unscanned.append(record)
                self.num_bytes += record.nbytes
                self.must_be_scanned |= record.device is not None or record.planned is PlannedTier.DISK

    def share(self, record: R) -> None:
        record.shared = True
        self._shared[record.key] = record
        is_to_go = record.planned is PlannedTier.DISK or (
            record.planned is PlannedTier.HOST and record.device is not None
        )
        self.must_be_scanned |= is_to_go
        self.num_bytes += record.nbytes
        self.shared_bytes += record.nbytes

    def scan_owners(self) -> None:
        """Share those records, settled since the last scan, whose storage somebody else also holds."""
        scanned, self._unscanned = self._unscanned, []
        for record in scanned:
            if record.key in self._fresh and not self._is_sole_owner(record):
                self.remove(record)
                self.share(record)

    def take(self, how_many: int | None) -> list[R]:
        """Remove and return all fresh records, then `how_many` (None: all) shared ones, the oldest entry first."""
        self._unscanned.clear()
        self.must_be_scanned = False
        taken = list(self._fresh.values())
        self._fresh.clear()
        for record in taken:
            self.num_bytes -= record.nbytes
        for _ in range(len(self._shared) if how_many is None else min(how_many, len(self._shared))):
            _, record = self._shared.popitem(last=False)
            self.num_bytes -= record.nbytes
            self.shared_bytes -= record.nbytes
            taken.append(record)
        return taken

    def remove(self, record: R) -> None:
        if self._fresh.pop(record.key, None) is not None:
            self.num_bytes -= record.nbytes
        elif self._shared.pop(record.key, None) is not None:
            self.num_bytes -= record.nbytes
            self.shared_bytes -= record.nbytes

    def clear(self) -> None:
        self._fresh.clear()
        self._unscanned.clear()
        self._shared.clear()
        self.num_bytes = self.shared_bytes = 0
