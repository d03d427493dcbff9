"""The state of a store, without the bytes: what is registered, what each window holds, and what is to be moved. Pure.

`down.py`, `up.py` and `ledger.py` change it.

NOTE [No sooner than needed]
The owners of a storage, and the window that is charged with its bytes, only matter once something has to leave memory.
While the budget has room for everything here, records are neither scanned nor charged. This saves most of the cost
of a pack. Only at the end of a scope, records that somebody else also holds are marked as shared, for the statistics.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any, Generic

from ..errors import StoreFullError
from .counters import Counters, NewlyKept
from .eviction import EvictionOrder as Eviction
from .explicit_prefetch import ExplicitPrefetch
from .jobs import Jobs
from .log import LogRemains
from .lookahead import Lookahead
from .observer import Observer
from .plan import PlannedTier
from .record import R
from .state import State
from .tracked import TrackedTensors
from .windows import HostWindows

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


class Books(Generic[R]):
    """Guarded by the store's lock.

    Attributes:
        pending: records whose bytes are where autograd left them.
        records: all records whose handle lives, by key.
        released: records whose handle is gone, and that nobody has accounted for yet.
        counters: totals since the store was opened. `newly_kept`: what they do not have yet; needs no lock.
        observer: is told of every event, where a trace is recorded; else None.
        jobs: what is to be moved to and from disk.
        eviction: which record leaves host memory next.
        blocked: records that are solely owned, and for which there is no room; packs wait until it is empty.
        unspilled: records in HOST, by key, that are charged to staging: they were on their way out.
        ahead: lookahead of the backward that asked last; None: none has.
        explicit_prefetch: records that were named to `TierStore.prefetch`.
        num_packing: threads that wait for room. `num_getting`: for bytes, or whose bytes are there but which have not
            woken yet.
        disk_is_full: a write found no room, and nothing was freed on disk since.
        disk_error: the disk tier's latest error for lack of room; None: it never was full.
        spill_error: the error of a failed write, which the next pack raises; None: it was raised, or no write failed.
    """

    def __init__(
        self, windows: HostWindows, tracked: TrackedTensors[Any, R], is_sole_owner: Callable[[R], bool]
    ) -> None:
        self.windows = windows
        self.tracked = tracked
        self.pending = Pending[R](is_sole_owner)
        self.records: dict[int, R] = {}
        self.released: deque[R] = deque()
        self.counters = Counters()
        self.newly_kept = NewlyKept()
        tracked.on_device.note_kept = self.newly_kept.adder("alive elsewhere")
        self.observer: Observer | None = None
        self.jobs = Jobs[R]()
        self.eviction = Eviction[R]()
        self.blocked: deque[R] = deque()
        self.unspilled: dict[int, R] = {}
        self.ahead: Lookahead[R] | None = None
        self.explicit_prefetch = ExplicitPrefetch[R]()
        self.num_packing = self.num_getting = 0
        self.disk_bytes = self.disk_bytes_peak = 0
        self.disk_is_full = False
        self.disk_error: StoreFullError | None = None
        self.spill_error: Exception | None = None
        self.is_closed = False

    def end_grants(self, of: LogRemains | None = None) -> None:
        """End all grants, or that of one log, and enter what was packed by them: see NOTE [Grants] in `grants.py`."""
        for remains in list(self.tracked.grants) if of is None else (of,):
            entries = self.tracked.end_grant(remains)
            self.counters.packed_tensors += len(entries)
            self.counters.packed_bytes += sum([nbytes for _, (_, nbytes) in entries])

    def uncharged_bytes(self) -> int:
        """Bytes of pending and tracked tensors that no window is charged with yet."""
        return self.pending.num_bytes + self.tracked.num_bytes - self.windows.tracked_bytes

    def must_act(self) -> bool:
        """Whether a pack has something to do first, even if it needs no room."""
        return bool(self.pending.must_be_scanned or self.blocked or self.spill_error is not None)
