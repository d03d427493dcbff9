"""What tests see inside of a store: where its parts keep what nothing public tells.

    inspect(store).num_waiting

This module alone knows how a store is put together, so a change of that is a change here, and in no test.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from tests.existing import set_existing

if TYPE_CHECKING:
    from tierstore import TierStore, tiered_offload
    from tierstore.disk.drives import Drives
    from tierstore.disk.extents import ExtentSpace
    from tierstore.disk.local import LocalDisk
    from tierstore.ledger.eviction import EvictionOrder
    from tierstore.ledger.windows import Window
    from tierstore.residency.handle import Record
    from tierstore.residency.tracked import TrackedTensor
    from tierstore.store.engine import Engine

__all__ = [
    "inspect",
    "inspect_drives",
    "inspect_engine",
    "inspect_scope",
    "inspect_tier",
    "keys_in",
    "segment_files",
]

_STALL_SECONDS = 60.0


class InsideStore:
    """Answers questions about a store. Without its lock, the answers are those of some moment.

    Attributes:
        name: of the store, in messages.
        residency: what the hooks and the store call, under the lock.
        ledger, books: what is decided under it, and the state of that.
        engine, loop, thread: what moves bytes, its event loop, and the thread that runs that.
        disk: the disk tier.
        slab: pinned host memory.
        devices, copies, device_window: what is on accelerators, what copies it, and the limits on what is on its way.
        returner: returns freed memory.
    """

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self.name = store._core.name
        self.residency = store._core.residency
        self._enter_packs(self.residency.guard)
        self.ledger = store._core.residency.ledger
        self.books = self.ledger.books
        self.engine = store._core.engine
        self.loop, self.thread = self.engine._loop, self.engine._thread
        self.disk: Any = self.engine.disk
        self.slab = self.residency.slab
        self.devices = self.residency._devices
        self.copies: Any = self.devices.streams._copies
        self.device_window = self.devices.window
        self.returner = store._core.returner

    def _enter_packs(self, guard: Any) -> None:
        """What was packed without the lock is seen too: NOTE [Grants] in `ledger/grants.py`."""
        if not guard.is_mine() and guard.mutex.acquire(timeout=1):
            try:
                self.residency.books.end_grants()
            finally:
                guard.mutex.release()

    @property
    def lock(self) -> Any:
        return self.residency.lock

    @property
    def closed(self) -> Exception | None:
        """Why it cannot be used any more."""
        return self.residency.guard.closed

    @property
    def num_waiting(self) -> int:
        """Threads that wait for progress."""
        return len(self.residency.guard.progress._waiters)  # type: ignore[attr-defined]

    @property
    def num_known_graphs(self) -> int:
        """The graphs of which the order of backward was learned."""
        return len(self._store._core.learned_orders._known.prefixes.traces)

    def wait_for_room(self) -> None:
        """Wait as a pack without room does: for ever, where nothing makes progress."""
        with self.lock:
            self.residency.guard.wait_for_room()

    def hurry(self) -> None:
        """Have small records written too, as if a thread waited."""
        with self.lock:
            self.books.jobs.hurry()
            self.residency.guard.tell()

    def wait_until_closed(self, seconds: float) -> bool:
        """Wait, as a thread that needs room does, until nothing can be stored any more."""
        with self.lock:
            return self.residency.guard.progress.wait_for(lambda: self.closed is not None, seconds)

    @contextmanager
    def lock_given_back(self) -> Iterator[None]:
        """Others may have the lock meanwhile, which this thread holds as it waits. In the block it acts for them."""
        from tierstore.residency.guard import WAITING

        lock = self.residency.guard.mutex
        WAITING.discard(threading.get_ident())
        lock.release()
        try:
            yield
        finally:
            lock.acquire()

    def replace_progress(self, condition: object) -> None:
        """Have threads wait on something else than the condition."""
        set_existing(self.residency.guard, progress=condition)

    @property
    def records(self) -> list[Record]:
        """Those that are registered, oldest first."""
        return [record for _, record in sorted(self.books.records.items())]

    @property
    def tracked(self) -> list[TrackedTensor]:
        """What is only tracked, and alive."""
        return list(self.residency._tracked.living())

    @property
    def tracked_bytes(self) -> int:
        """All that is tracked; what has died since the last call included."""
        return self.residency._tracked.num_bytes

    @property
    def newest_tracked_bytes(self) -> list[int]:
        """The newest entry of each log in which something is tracked."""
        logs = (reference() for reference in self.residency._tracked._logs.values())
        return [log.packs[-1][1] for log in logs if log is not None]

    def drop_ended(self) -> None:
        """Account for what was tracked and is gone."""
        self.residency._tracked.drop_ended()

    @property
    def num_restores(self) -> int:
        """Reads that are queued or running."""
        return self.books.jobs.num_reads

    @property
    def num_discards(self) -> int:
        """Records to be freed on disk, queued or running."""
        return self.books.jobs.num_discards

    @property
    def is_fetching_explicitly(self) -> bool:
        """Whether something that was named to `prefetch` is still to be fetched."""
        return self.books.explicit_prefetch.peek() is not None

    def window(self, name: Literal["host", "staging", "outstanding"]) -> Window:
        """One of the windows of host memory."""
        window: Window = getattr(self.books.windows, name)
        return window

    @property
    def used_bytes(self) -> tuple[int, int]:
        """Held within host memory's budget, and beside it."""
        return self.books.windows.used_bytes

    @property
    def tracked_bytes_in_staging(self) -> int:
        """What is tracked, as far as staging is charged with it."""
        return self.books.windows.tracked_bytes

    @property
    def uncharged_bytes(self) -> int:
        """What was saved, and no window is charged with."""
        return self.books.uncharged_bytes()

    @property
    def pending_bytes(self) -> int:
        """Registered, but not yet known to be solely owned."""
        return self.books.pending.num_bytes

    @property
    def has_slots(self) -> bool:
        """Whether there are slots of the slab that nobody gave back."""
        return bool(self.slab._num_slots_in)

    def let_staging_grow(self, grows: bool = True) -> None:
        """As where no `staging_bytes` is given."""
        set_existing(self.books.windows, grows=grows)

    def stall(self) -> threading.Event:
        return InsideEngine(self.engine).stall()

    @property
    def counters(self) -> Any:
        """Totals since it was opened."""
        return self.books.counters

    @property
    def observer(self) -> Any:
        """It is told of every move."""
        return self.books.observer

    @property
    def recorder(self) -> Any:
        """Of the trace that is being recorded; None: there is none."""
        return self._store._core.traces._current


class InsideEngine:
    """Answers questions about an engine, which may belong to no store.

    Attributes:
        loop, thread: its event loop, and the thread that runs that.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.loop, self.thread = engine._loop, engine._thread

    @property
    def has_turn_due(self) -> bool:
        """Whether the worker is about to ask what is to be moved."""
        worker = self._engine._worker
        if worker is None:
            return self._engine._awake
        return self._engine._awake or worker._is_turn_due or worker._timer is not None

    def call_before_turns(self, wait: Callable[[], None]) -> None:
        """From now on, on the loop, before the worker takes a turn that it was woken for."""
        woken = self._engine._woken

        def wait_and_wake() -> None:
            wait()
            woken()

        set_existing(self._engine, _woken=wait_and_wake)

    def submit(self, job: Callable[[], object]) -> None:
        """Have one of the I/O threads run it. On the loop."""
        self._engine._io_threads.submit(job)

    def stall(self) -> threading.Event:
        """Have the loop stand still until the event is set, or a minute is over: what is queued is not begun."""
        stalled, go_on = threading.Event(), threading.Event()

        def stand_still() -> None:
            stalled.set()
            go_on.wait(_STALL_SECONDS)

        self.loop.call_soon_threadsafe(stand_still)
        assert stalled.wait(_STALL_SECONDS)
        return go_on


class InsideTier:
    """Answers questions about a disk tier on a directory.

    Attributes:
        locations: where each record lies, by key; the tier's own.
        index, space: the index and the segments.
        descriptors: every one that keeps space on disk, LMDB's own included; those of segments first.
    """

    def __init__(self, tier: LocalDisk) -> None:
        self._tier = tier
        self.locations = tier._locations
        self.index, self.space = tier._index, tier._space

    def pretend_session(self, session: int) -> None:
        """From now on its checksums are those of another session."""
        set_existing(self._tier, session=session)

    @contextmanager
    def without_native(self) -> Iterator[None]:
        """Inside it, records are moved by the jobs in Python."""
        native = self._tier._native
        set_existing(self._tier, _native=None)
        yield
        set_existing(self._tier, _native=native)

    @property
    def descriptors(self) -> list[int]:
        return [file.fileno() for file in segment_files(self.space)] + self.index.descriptors()


def segment_files(space: ExtentSpace) -> list[io.FileIO]:
    return [segment.file for segment in space.segments.values()]


class InsideDrives:
    """Answers questions about a disk tier over several drives.

    Attributes:
        disks: the tier of each drive.
        divides: whether large records are divided.
    """

    def __init__(self, tier: Drives) -> None:
        self._tier = tier
        self.disks = [drive.disk for drive in tier._drives]
        self.divides = tier._divides

    @property
    def queued_bytes(self) -> list[int]:
        """Of each drive, bytes of writes that have not ended."""
        return [drive.queued_bytes for drive in self._tier._drives]

    def parts_of(self, key: int) -> list[int]:
        """The lengths of a record's parts."""
        return [part.num_bytes for part in self._tier._parts_of[key]]

    def set_clock(self, clock: Callable[[], float]) -> None:
        """Time by which the drives measure and rest."""
        for drive in self._tier._drives:
            set_existing(drive, _clock=clock)

    def set_speeds(self, speeds: list[float]) -> None:
        """As if that had been measured for long, until now."""
        for drive, speed in zip(self._tier._drives, speeds, strict=True):
            set_existing(drive.speed, _num_bytes=1e6 * speed, _seconds=1e6, measured_at=drive._clock())


class InsideScope:
    """What a scope of the hooks was made with.

    Attributes:
        store: the one that it packs into.
        device_bytes: None: "auto".
        prefetch, lookahead_bytes: as they were given, or the defaults.
    """

    def __init__(self, scope: tiered_offload) -> None:
        self.store = scope._store
        self.device_bytes = scope._log_options.device_bytes
        self.prefetch = scope._options.prefetch
        self.lookahead_bytes = scope._options.lookahead_bytes


inspect = InsideStore
inspect_engine = InsideEngine
inspect_tier = InsideTier
inspect_drives = InsideDrives
inspect_scope = InsideScope


def keys_in(order: EvictionOrder[Any]) -> list[int]:
    """The keys of its records, what leaves first first, but for what a plan has leave."""
    queues = order._used, order._clean, order._dirty, order._asked
    return [record.key for queue in queues for record in queue.values()]
