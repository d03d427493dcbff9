"""The working parts of a store (residency, engine, traces): how they begin, and how they end.

They outlive the last reference to the store itself: the engine's thread keeps them alive until it has ended."""

from __future__ import annotations

import threading
import time
import warnings
from functools import partial

import torch

from ..base.caller import stacklevel_of_user
from ..base.defaults import NUM_AT_ONCE, NUM_BESIDE_DEVICE
from ..base.system_words import words_of
from ..base.threads import is_thread_of_store
from ..disk.tier import DiskUsage
from ..errors import StorageIOError, StoreFullError, TierStoreError, TierStoreWarning
from ..ledger.lookahead import LearnedOrders
from ..ledger.whole_graphs import WholeGraphs
from ..residency.residency import Residency
from ..returning.advice import MemoryUse
from ..returning.allocator import allocator_of_process
from ..returning.cached import CachedMemory
from ..returning.caching import CachingAllocator, caching_allocator
from ..returning.returner import Returner
from ..tensors.pinning import device_in_use
from ..tracing.events import StoreSettings
from ..tracing.recordings import Recordings, header_of
from .engine import Engine, OpenDisk
from .lifetime import watch_over
from .options import StoreOptions
from .plans import PlansOfStore
from .stats import StoreStats
from .use import Use

_OPEN_DEADLINE_SECONDS = 60.0  # to end the parts that were begun, when a store cannot be opened


class Core:
    """The residency, engine and traces of one store. When `store` dies, the engine ends.

    The constructor blocks until the disk tier is open. `end_at_exit` and `close` block until the I/O in progress has
    ended; `close` on a store's own thread does not block.

    Raises:
        StorageIOError: the system or the drive refused; nothing was stored, and nothing is left behind.
        TierStoreError: any other error of `open_disk`, as it is; likewise.
    """

    def __init__(self, store: object, options: StoreOptions) -> None:
        self.name = options.name
        self.use = Use(options.name)
        self.use.begin()
        self._staging_bytes = options.staging_bytes
        self._opened_at = time.monotonic()
        self._closed_at: float | None = None
        num_drives = 1 if options.disk is None else options.disk.num_drives
        num_lanes = num_drives * (NUM_BESIDE_DEVICE + (NUM_AT_ONCE if options.disk is None else options.disk.io_depth))
        allocator = caching_allocator(torch.__version__, _make_tensor)
        self._start_engine(store, options.open_disk, num_lanes)
        is_pinned = options.copies is not None or torch.accelerator.is_available()  # or has to be, at some time
        self.residency = Residency(
            options.name,
            self.engine,
            host_bytes=options.host_bytes,
            staging_bytes=options.staging_bytes,
            staging_grows=options.staging_grows,
            copies=options.copies,
            pools=isinstance(allocator, CachingAllocator) and not is_pinned,
        )
        self.engine.serve(self.residency)
        self.returner: Returner | CachedMemory
        if isinstance(allocator, str):
            of_process = allocator_of_process().for_tensors(_make_tensor)
            self.returner = Returner(options.return_memory, self.residency.has_any, of_process)
        else:
            self.returner = CachedMemory(options.return_memory, allocator)
        windows = options.host_bytes, options.staging_bytes
        self.plans = PlansOfStore(self.returner.limit, self.residency.limit_windows, *windows)
        settings = _settings(options, self.engine.disk.usage())
        self.learned_orders = LearnedOrders()
        self.whole_graphs = WholeGraphs()
        self.of_thread = threading.local()  # the hooks' own
        self.traces = Recordings(self.residency, partial(header_of, settings))
        watch_over(self)
        self._start_returner()
        if options.copies is None and (device := device_in_use()) is not None:
            self.residency.begin_to_pin(device)

    def _start_engine(self, store: object, open_disk: OpenDisk, num_lanes: int) -> None:
        try:
            self.engine = Engine(
                open_disk,
                "tierstore",
                num_lanes=num_lanes,
                owner=self,
                user=store,
                on_death=self._store_died,
            )
        except (OSError, StoreFullError) as error:
            if isinstance(error, StoreFullError):
                reason = error.reason.removeprefix(f"{self.name}: ")
            else:
                reason = words_of(error, self.name)
            raise StorageIOError("open", self.name, reason, "nothing was stored") from error

    def _start_returner(self) -> None:
        try:
            self.returner.start()
        except OSError as error:
            self.close(_OPEN_DEADLINE_SECONDS)
            raise StorageIOError("open", self.name, words_of(error, self.name), "nothing was stored") from error

    def stats(self) -> StoreStats:
        disk, returner = self.engine.disk, self.returner
        usage = disk.usage()
        self.plans.drain()
        self.residency.tidy()
        memory = self.memory_use()
        ends_at = time.monotonic() if self._closed_at is None else self._closed_at
        with self.residency.counted() as (counters, levels):
            return StoreStats._of(
                counters,
                **levels,
                staging_bytes=self._staging_bytes + disk.scratch_bytes,
                write_allowance_bytes=usage.write_allowance_bytes,
                resident_bytes=memory.resident_bytes,
                allocator_free_bytes=memory.allocator_free_bytes,
                returned_bytes=returner.returned_bytes,
                return_seconds=returner.return_seconds,
                memory_return=returner.description,
                open_seconds=ends_at - self._opened_at,
                io_mode=usage.io_mode,
                host_memory=self.residency.slab.description,
                codec_choices=disk.codec_choices(),
                memory_plan=self.plans.figures,
            )

    def memory_use(self) -> MemoryUse:
        return self.returner.use(self._mapped_bytes())

    def warn_if_memory_stays(self) -> None:
        """Warn, once, if the process's memory did not fall, and say why, unless a memory plan limits it. Warnings may
        raise."""
        if not self.plans.limits_process:
            reason = self.returner.why_memory_stays(self.residency.disk_bytes, self._mapped_bytes())
            if reason is not None:
                text = f"<TierStore {self.name}>: {reason}"
                warnings.warn(text, TierStoreWarning, stacklevel=stacklevel_of_user())

    def warn_if_nothing_came(self) -> None:
        """Of a store that is closed. A plan may store nothing. Warnings may raise."""
        with self.residency.counted() as (counters, _):
            is_used = counters.packed_tensors or any(counters.kept_bytes.values())
        if not (is_used or self.plans.had_any):
            self.use.warn_if_nothing_came()

    def _mapped_bytes(self) -> int:
        return self.residency.slab.mapped_bytes + self.engine.disk.scratch_bytes

    @property
    def is_open(self) -> bool:
        return self._closed_at is None

    def close(self, deadline_seconds: float) -> None:
        if self._closed_at is None:
            self._closed_at = time.monotonic()
        self.residency.guard.close()
        self.returner.request_stop()
        if is_thread_of_store():
            self.engine.request_stop()
            self.traces.request_stop()
            return
        try:
            self.engine.stop(deadline_seconds)
        finally:
            self.returner.stop(deadline_seconds)
            self.traces.end(deadline_seconds, "the store was closed")

    def _store_died(self) -> None:
        """Nobody refers to the store any more. If its constructor was interrupted, it may be incomplete."""
        for name in ("returner", "traces"):
            part: Returner | CachedMemory | Recordings | None = getattr(self, name, None)
            if part is not None:
                part.request_stop()

    def end_at_exit(self, deadline_seconds: float) -> None:
        """Stop, wake all waiting threads, and join its own; drain nothing."""
        self.residency.guard.close("the interpreter exits")
        self.returner.stop(deadline_seconds)
        try:
            self.engine.stop(deadline_seconds)
        except TierStoreError:
            pass  # a job hangs at exit: its daemon thread ends with the process
        try:
            self.traces.end(deadline_seconds, "the interpreter exits")
        except TierStoreError as error:
            warnings.warn(str(error), TierStoreWarning, stacklevel=2)
        if self.is_open:
            self.warn_if_nothing_came()

    def end_in_child(self) -> None:
        """Close the child's copies of descriptors, refuse all use. The parent's are untouched."""
        self.engine.disk.abandon_after_fork()  # first: the others may be in the middle of a change
        self.traces.abandon()
        self.residency.guard.abandon("it belongs to the process that this one was forked from")


def _make_tensor(nbytes: int) -> object:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _settings(options: StoreOptions, usage: DiskUsage) -> StoreSettings:
    disk = options.disk
    return StoreSettings(
        place=options.name,
        is_connected=disk is None,
        host_bytes=options.host_bytes,
        staging_bytes=options.staging_bytes,
        disk_bytes=usage.budget_bytes,
        codec=None if disk is None else disk.codec,
        inline_bytes=None if disk is None else disk.inline_bytes,
        checksum=None if disk is None else disk.checksum,
        io_mode=usage.io_mode,
        io_depth=None if disk is None else disk.io_depth,
        staging_grows=options.staging_grows,
    )
