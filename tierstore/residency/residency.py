"""The tensors of a store under its lock: its parts, what the worker exchanges, reports and settings.

Saving is in `saving.py`, requests are in `handing_out.py`. Who may hold the lock, and who waits, is in `guard.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

from ..errors import StoreClosedError
from ..ledger.books import Books
from ..ledger.counters import Counters
from ..ledger.jobs import Job, Room
from ..ledger.ledger import Ledger
from ..ledger.lookahead import Lookahead
from ..ledger.observer import Observer
from ..ledger.tracked import TrackedTensors
from ..ledger.windows import HostWindows, Window
from ..tensors.copies import AcceleratorCopies, Copies
from ..tensors.slots import Slots
from .device import DeviceTier
from .graph_times import GraphTimes
from .guard import Guard, change_if_open, whole
from .handing_out import HandingOut
from .handle import Record
from .memory import StoreMemory
from .outstanding import OutstandingViews
from .ownership import is_sole_owner
from .registration import HandleFactory, Registration
from .saving import Saving
from .tracked import TrackedLog, TrackedTensor
from .transfers import Worker
from .validating_lock import is_wanted


class Residency:
    """Makes the parts of a store that stand under its lock, and owns them.

    Attributes:
        ledger: what is decided, and `books` its state. Only under the lock.
        guard: the lock, who waits for it, and whether the store is open.
        saving, handing_out: what the hooks call.
        slab: host memory for restored bytes, and for copies from accelerators.
        handles: makes handles and their records.
        device_of: the accelerator that a tensor lives on; None: it is in host memory. Any thread, without the lock.
        current_stream: the stream that a thread works on there. Likewise.
        streams: those of accelerators.
        cpu_is_host: `device_of` gives None for every tensor on the CPU: no accelerator is simulated.
    """

    def __init__(
        self,
        name: str,
        worker: Worker,
        *,
        host_bytes: int,
        staging_bytes: int,
        staging_grows: bool = False,
        copies: Copies | None = None,
        pools: bool = False,
    ) -> None:
        validates = is_wanted()
        windows = HostWindows(host_bytes, staging_bytes, grows=staging_grows)
        resident = Window(0)
        self._tracked = TrackedTensors[TrackedTensor, Record](windows, resident)
        self.begin_log = self._tracked.begin
        self.books = books = Books[Record](windows, self._tracked, is_sole_owner)
        self._counters = books.counters
        self._outstanding_views = outstanding_views = OutstandingViews()
        size_bytes = host_bytes + staging_bytes
        slots = Slots(windows, size_bytes, books.uncharged_bytes, counters=books.counters, pools=pools)
        self.slab = slots.slab
        self._copies = copies = copies or AcceleratorCopies()
        self._devices = devices = DeviceTier(copies, outstanding_views, slots.note_copy, resident)
        self.streams = streams = devices.streams
        self.device_of, self.current_stream = streams.device_of, streams.current_stream
        self.cpu_is_host = isinstance(copies, AcceleratorCopies)
        self.handles = HandleFactory(self, books.released.append, self._tracked.keys, keep_stories=validates)
        self._registration = Registration(books, self.handles, self._tracked, outstanding_views, slots, devices.streams)
        self._memory = StoreMemory(self._registration, slots, devices, outstanding_views)
        self.ledger = ledger = Ledger[Record](books, self._memory, devices, worker.disk_budget_bytes)
        self.guard = self._guard = Guard(name, ledger, worker, validates=validates)
        self.saving = Saving(self.guard, ledger, self._registration, slots, devices, worker)
        self.handing_out = HandingOut(self.guard, ledger, outstanding_views, devices)

    @property
    def lock(self) -> AbstractContextManager[object]:
        return self.guard.lock

    def begin_backward(self, log: TrackedLog) -> None:
        """Backward of the log begins: its plan ends, and `Saving.scan_owners`. Does not wait."""
        self.ledger.down.end_plan(log.records)
        self.saving.scan_owners(log)

    @change_if_open
    def look_ahead(self, lookahead: Lookahead[Record]) -> None:
        """Bring back what backward will ask for. Does not wait."""
        self.books.ahead = lookahead
        self.ledger.go_ahead()

    @whole
    def begin_to_pin(self, device: torch.device) -> None:
        """Pin the slab before the first tensor of that device comes. Does not wait."""
        self.slab.begin_to_pin(device)

    # --- the worker: each call waits for nothing but the lock ------------------------------------------------------

    def exchange(self, ended: Sequence[tuple[Job[Record], Any]], room: Room) -> Sequence[Job[Record]]:
        """Jobs have ended; return those to begin: see `Ledger.exchange`. On the loop.

        A write comes with its `BytesToWrite`, a read with the memory that it fills. An error closes the store before
        the lock is released."""
        guard = self.guard
        with guard.mutex:  # not `lock`: it is never called on a thread that may hold one
            if guard.are_half_changed:  # `engine_ended` frees what can be freed
                with suppress(StoreClosedError):
                    guard.must_be_open()
                return []
            try:
                begun = self.ledger.exchange(ended, room)
                if guard.jobs.has_progress or guard.jobs.has_news:
                    guard.tell()
                return begun
            except BaseException as error:
                guard.end_failed(error)
                raise

    def engine_ended(self, error: BaseException | None) -> None:
        guard = self.guard
        with guard.lock:
            if error is None:
                guard.end(StoreClosedError(guard.name, "it was closed"))
            else:
                guard.end_failed(error)
            try:
                self.ledger.end_jobs()
            except Exception:
                if not guard.are_half_changed:  # else they cannot always be taken apart
                    raise
            under_way = self._devices.under_way()
        for marker in under_way:
            try:
                marker.synchronize()
            except Exception:  # noqa: BLE001 - the device has failed, or its copies were given up
                pass
        with guard.lock:
            self._devices.finish()
            if isinstance(self._copies, AcceleratorCopies):
                self._copies.drop_events()
        self.slab.spare = None
        self.slab.unpin()  # waits for a thread, where a finalizer may want the lock

    # --- reports and settings --------------------------------------------------------------------------------------

    def has_any(self) -> bool:
        """Any thread, without the lock: it may be out of date."""
        return bool(self.books.records or self._tracked.num_bytes or self._devices.held_bytes)

    @property
    def disk_bytes(self) -> int:
        """Any thread, without the lock: it may be out of date."""
        return self.books.disk_bytes

    @whole
    def tidy(self) -> None:
        """Account for everything that has died, and for everything of which the store is the sole owner by now.

        Does not wait."""
        self.guard.is_changing = True
        self._outstanding_views.take_back(None)
        self._devices.ask_anew()
        self.guard.drain()
        if self.guard.closed is None:
            self._registration.register_on_device(self.ledger.device_grouping())
            self.ledger.down.scan_pending()
            self.guard.jobs.hurry()

    @contextmanager
    def counted(self) -> Iterator[tuple[Counters, Mapping[str, int]]]:
        """Hold the lock while the caller reads: all counters, and the levels of now. See `StoreStats`."""
        with self.lock:
            books, windows = self.books, self.books.windows
            books.newly_kept.move_to(self._counters.kept_bytes)
            host_bytes, staging_bytes = windows.used_bytes
            levels = {
                "live_handles": self._registration.num_live(),
                "device_bytes": self._devices.held_bytes,
                "device_limit_bytes": self.device_limit_bytes,
                "host_bytes": host_bytes,
                "host_bytes_peak": windows.host_bytes_peak,
                "staging_used_bytes": staging_bytes,
                "lent_bytes": windows.outstanding.used_bytes,
                "disk_bytes": books.disk_bytes,
                "disk_bytes_peak": books.disk_bytes_peak,
            }
            yield self._counters, levels

    @property
    def device_limit_bytes(self) -> int:
        """Bytes of saved tensors that may stay on accelerators now. Any thread, without the lock."""
        return self._devices.window.resident.limit_bytes

    @property
    def window_limits(self) -> tuple[int, int]:
        return self.books.windows.limits

    @change_if_open
    def limit_windows(self, host_bytes: int, staging_bytes: int) -> None:
        """Keep at most `host_bytes` in host memory from now on, and `staging_bytes` more for what is being moved."""
        self.books.windows.limit(host_bytes, staging_bytes)

    @change_if_open
    def keep_on_device(self, device_bytes: int) -> None:
        """Let the last `device_bytes` that are saved stay on the accelerator from now on. Spoils times being taken."""
        self._devices.poll()
        self._devices.keep(device_bytes)
        if not self._devices.window.fits(0):
            self._registration.register_on_device(self.ledger.device_grouping())

    @whole
    def time_graph(self, device: torch.device, *, is_marked: bool = True) -> GraphTimes:
        """Take the times of a graph, from this point of the stream on which this thread works there: see
        `GraphTimes`."""
        self.guard.is_changing = True
        return self.streams.time_graph(device, self.device_limit_bytes, is_marked=is_marked)

    # --- traces: the caller holds the lock -------------------------------------------------------------------------

    def observe(self, observer: Observer | None) -> None:
        self.books.observer = observer

    def levels(self) -> tuple[int, ...]:
        windows, uncharged_bytes = self.books.windows, self.books.uncharged_bytes()
        lent_bytes = windows.outstanding.used_bytes
        return self._devices.held_bytes, uncharged_bytes, *windows.used_bytes, lent_bytes, self.disk_bytes
