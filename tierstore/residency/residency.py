"""All that the store and the hooks ask of the records: tensors are saved, asked for, counted, and given up.

Who may hold the lock, and who waits, is in `guard.py`; requests are in `handing_out.py`; in here is what saves tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ..ledger.counters import STALL_CAUSES, Counters
from ..ledger.observer import Observer
from ..ledger.pending import NUM_EXAMINED_PER_PACK
from ..ledger.state import State
from .guard import holds_any_lock, whole
from .handing_out import HandingOut
from .handle import Record
from .layout import Layout, memory_at, unseen_by_modes
from .ownership import claims_of

if TYPE_CHECKING:
    from ..ledger.log import LogRemains
    from .graph_times import GraphTimes
    from .noted import NotedLog, NotedTensor

_PACK_WAITS = STALL_CAUSES[0]
_EVERY = 4
"""Tracked tensors for which the driver is asked once whether copies are over: that takes it microseconds."""


class Residency(HandingOut):
    """See the module's docstring."""

    # --- tensors are saved: may wait -------------------------------------------------------------------------------

    def note(self, noted: NotedTensor, node: int, nbytes: int) -> None:
        """Note a tensor in host memory that autograd node `node` saved; its storage has `nbytes` bytes.

        Its bytes are not read before a later node saves something, or its log is settled. Waits while the budget is
        full. Raises what `save` does.
        """
        if self._lock_is_mine() or (self.are_several and holds_any_lock()):  # as `lock` does
            self._refuse_handler()
        with self._lock:
            try:
                if self.closed is not None or self._is_changing:
                    self._check_open()
                ledger, log = self.ledger, noted.log
                log.newest_node = node
                new_bytes = 0 if (noted.storage_id, nbytes) in log.num_noted else nbytes
                is_short = ledger.is_short_of(new_bytes)
                is_planned = log.plan is not None and not ledger.may_wait
                is_short |= is_planned
                if is_short and (ledger.must_examine() or not self._booking.is_booked(noted)):
                    self._relieve(is_planned=is_planned)
                    ledger.is_short_of(new_bytes)  # it may stay noted now
                self._is_changing = True
                counters = self._counters
                counters.packed_tensors += 1
                counters.packed_bytes += nbytes
                new_bytes = self._noted.add(noted, node, nbytes)
                if ledger.uses_staging:
                    ledger.charge_noted(new_bytes)
                if is_short:
                    if self._booking.may_be_booked(noted):
                        self._join_if_booked(noted)
                    self._slots.trim()
                self._is_changing = False
            except BaseException as error:  # as in `whole`, but without its extra call: every pack passes here
                self._judge(error)
                raise

    def track(self, tracked: NotedTensor, node: int, nbytes: int, device: torch.device, *, leaves: bool) -> None:
        """Track one on an accelerator that has room: see NOTE [Tracked, then booked] in `ledger/tracked.py`.

        `leaves`: it has not, and waits for enough others to leave with them.
        """
        if self._lock_is_mine() or (self.are_several and holds_any_lock()):  # as `lock` does
            self._refuse_handler()
        with self._lock:
            try:
                if self.closed is not None or self._is_changing:
                    self._check_open()
                ledger, log = self.ledger, tracked.log
                log.newest_node = node
                device_rules = ledger.device
                must_act: object = ledger.pending.must_be_examined or ledger.blocked or ledger.spill_error is not None
                if not (must_act or tracked.key % _EVERY) and (device_rules.flights or device_rules.busy):
                    must_act = device_rules.has_finished()
                if leaves and log.leaving_bytes + nbytes > ledger.device_group_bytes:
                    self._is_changing = True
                    self._booking.book_leaving(self.ledger.device_group_bytes, log, may_wait=True)
                    self._is_changing = False
                    must_act = True
                if must_act:
                    self._relieve()
                self._is_changing = True
                tracked.device, tracked.stream = device, self._devices.streams.note_current(device)
                counters = self._counters
                counters.packed_tensors += 1
                counters.packed_bytes += nbytes
                self._noted.add(tracked, node, nbytes)
                if leaves:
                    log.let_leave(tracked.index)
                if device_rules.flights:
                    device_rules.bound_flight()
                self._is_changing = False
            except BaseException as error:  # as in `note`
                self._judge(error)
                raise

    @whole
    def find_room_to_track(self, log: NotedLog, node: int, nbytes: int) -> bool:
        """Node `node` will save a tensor. If neither dead ones nor those that are to leave anyway give it room, the log
        tracks no more. Does not wait.
        """
        if self.closed is None:
            self._drain()
            if self._devices.window.fits(nbytes):
                return True
            self._is_changing = True
            log.newest_node = node
            group_bytes = self.ledger.device_group_bytes
            if log.leaving:
                self._booking.book_leaving(group_bytes, log, may_wait=True)
            if not self._devices.window.fits(nbytes):
                log.tracks = False
                self._booking.book_tracked(group_bytes)
        return log.tracks

    @whole
    def save(self, record: Record, log: NotedLog, node: int, fresh: list[Record], *, is_new: bool = True) -> int:
        """Enter a record that autograd node `node` saved as the next of the log; returns its index there.

        A new one is taken in; its bytes are not read before it is settled. Else one more tensor shares it. `fresh`:
        earlier records, whose bytes may be read from now on; the list is left empty. One call for all that a pack
        changes, since each takes some microseconds. Waits while the budget is full.

        Raises:
            StoreFullError: host budget and disk are full; everything is where it was.
            StorageIOError: an earlier write failed; its bytes, and all others, are in memory.
            StoreClosedError: the store is closed.
        """
        self._check_open()
        self._drain()
        self._is_changing = True
        if log.leaving_bytes > self.ledger.device_group_bytes:
            log.newest_node = node
            self._booking.book_leaving(self.ledger.device_group_bytes, log, may_wait=True)
        self.ledger.pending.settle(fresh)
        fresh.clear()
        if is_new:
            self._register(record)
            try:
                self._send_out()
            except BaseException:
                self._withdraw(record)
                raise
        if not log.num_packs:
            self._noted.drop_ended()  # orders learned from earlier logs are needed for this one
        return log.append_booked(record, node)

    def begin_log(self, log: NotedLog) -> LogRemains:
        return self._noted.begin(log)

    @whole
    def store(self, record: Record) -> None:
        """Like `save`, but without a log: the record is stored even if others hold its storage, and from now on."""
        self._check_open()
        self._drain()
        self._is_changing = True
        if self.ledger.windows.noted_bytes:
            self.ledger.examine(0)
        self._register(record)
        record.forced = True
        if record.nbytes:
            self.ledger.admit(record)
            self._slots.trim()
            try:
                self._make_room()
            except BaseException:
                self._withdraw(record)
                raise

    @whole
    def settle(self, records: Iterable[Record] = ()) -> None:
        """Allow the records' bytes to be read from now on. Does not wait."""
        if self.closed is None:
            self._drain()
            self._is_changing = True
            self.ledger.pending.settle(records)
            self._slots.trim()

    def begin_backward(self, log: NotedLog) -> None:
        """Backward of the log begins: its plan ends, and `survey`. Does not wait."""
        self.ledger.end_plan(log.records)
        self.survey(log)

    @whole
    def survey(self, log: NotedLog) -> None:
        """At the end of a scope or a forward, find out which storages others also hold. Does not wait.

        Noted tensors whose storage others also hold are booked. Pending records are examined again if room is short.
        """
        if self.closed is None:
            self._drain()
            self._is_changing = True
            if log.tracked:
                self._survey_tracked(log)
            self.ledger.relieve(None)
            self._booking.survey(log)
            self.ledger.pending.survey()

    @whole
    def book(self, noted: NotedTensor) -> None:
        """Book a tensor whose handle is needed; its bytes may be read from now on. Does not wait."""
        if noted.handle is None:
            self._check_open()
            self._drain()
            self._is_changing = True
            self._booking.book_one(noted)

    @whole
    def join(self, record: Record, layout: Layout, nbytes: int) -> bool:
        """Let one more view share the record. Does not wait.

        False: it may not, because the bytes were read already, the handle is gone, or the store is closed.
        """
        if record.span is not None or record.source is None or self.closed is not None:
            return False
        self._is_changing = True
        record.joined += (layout,)
        self._count_join(nbytes)
        return True

    @unseen_by_modes
    def rejoin(self, record: Record, tensor: torch.Tensor, layout: Layout) -> Layout | None:
        """Let a tensor over restored bytes, which is saved again, share the record that they were restored from.

        Returns the tensor's layout over the storage of that record. None: the bytes may not be the record's any more
        (they could have been changed through another version counter). Computes a checksum, but does not wait.
        """
        storage = tensor.untyped_storage()
        with self.lock:
            if record.state is not State.CLEAN or record.device is not None or record.claims is not claims_of(storage):
                return None
            memory = memory_at(record.address, record.nbytes)  # the caller's tensor keeps it alive
        if not self._engine.confirms(record.key, memory):
            return None
        self._count_rejoined(tensor.numel() * layout.dtype.itemsize)
        return layout._replace(offset=layout.offset + record.first_byte // layout.dtype.itemsize)

    @whole
    def flush(self) -> None:
        """Wait until all writes that were decided on are done.

        Raises:
            StoreFullError, StorageIOError: a write failed; the bytes are in memory.
            StoreClosedError: the store is closed.
        """
        self._check_open()
        self._drain()
        self._is_changing = True
        self.ledger.disk_is_full = False  # others may have freed something
        self.ledger.examine()
        self._slots.trim()
        self._make_room()
        while True:
            self._is_changing = False
            while self.ledger.num_spills or self.ledger.num_discards or self.ledger.has_doomed:
                self._wait(_PACK_WAITS)
            self._raise_spill_error()
            if not self.ledger.unwritten_bytes:
                return
            if self.ledger.disk_is_full:
                raise self.ledger.full_error(self.ledger.unwritten_bytes) from self.ledger.disk_error
            self._is_changing = True
            self.ledger.retry_unwritten()

    @whole
    def _count_rejoined(self, nbytes: int) -> None:
        self._is_changing = True
        self._count_join(nbytes)

    # --- under the lock --------------------------------------------------------------------------------------------

    def _survey_tracked(self, log: NotedLog) -> None:
        group_bytes = self.ledger.device_group_bytes
        if not (log.tracks and self._devices.window.fits(0)):
            self._booking.book_tracked(group_bytes, log)
        elif log.leaving:
            self._booking.book_leaving(group_bytes, log, may_wait=False)

    def _register(self, record: Record) -> None:
        self._books.register(record)
        if record.device is not None:
            self.slab.begin_to_pin(record.device)
            self._devices.streams.note_stream(record)

    def _count_join(self, nbytes: int) -> None:
        self._counters.packed_tensors += 1
        self._counters.deduplicated_bytes += nbytes

    @unseen_by_modes
    def _relieve(self, *, is_planned: bool = False) -> None:
        self._drain()
        self._send_out(is_planned=is_planned)

    def _send_out(self, *, is_planned: bool = False) -> None:
        self._is_changing = True
        self.ledger.relieve(NUM_EXAMINED_PER_PACK, is_planned=is_planned)
        if self.ledger.blocked or self.ledger.spill_error is not None:
            self._make_room()

    @unseen_by_modes
    def _join_if_booked(self, noted: NotedTensor) -> None:
        self._booking.join_if_booked(noted)

    def _withdraw(self, record: Record) -> None:
        was_changing, self._is_changing = self._is_changing, True
        self.ledger.withdraw(record)
        self._advance()
        self._is_changing = was_changing

    # --- reports and settings --------------------------------------------------------------------------------------

    @property
    def records(self) -> list[Record]:
        return list(self._books.records.values())

    def has_any(self) -> bool:
        """Any thread, without the lock: it may be out of date."""
        return bool(self._books.records or self._noted.num_bytes or self._devices.held_bytes)

    @property
    def disk_bytes(self) -> int:
        """Any thread, without the lock: it may be out of date."""
        return self.ledger.disk_bytes

    def count_kept(self, reason: str, nbytes: int) -> None:
        with self.lock:
            self._counters.kept_bytes[reason] += nbytes

    @whole
    def tidy(self) -> None:
        """Account for everything that has died, and for everything that is ours by now. Does not wait."""
        self._is_changing = True
        self._lent_views.take_back(None)
        self._drain()
        if self.closed is None:
            self._booking.book_tracked(self.ledger.device_group_bytes)
            self.ledger.examine()
            self._engine.hurry()

    @contextmanager
    def counted(self) -> Iterator[tuple[Counters, Mapping[str, int]]]:
        """Hold the lock while the caller reads: all counters, and the levels of now. See `StoreStats`."""
        with self.lock:
            ledger, windows = self.ledger, self.ledger.windows
            host_bytes, staging_bytes = windows.used_bytes
            levels = {
                "live_handles": self._booking.num_live(),
                "device_bytes": self._devices.held_bytes,
                "device_limit_bytes": self.device_limit_bytes,
                "host_bytes": host_bytes,
                "host_bytes_peak": windows.host_bytes_peak,
                "staging_used_bytes": staging_bytes,
                "lent_bytes": windows.lent.used_bytes,
                "disk_bytes": ledger.disk_bytes,
                "disk_bytes_peak": ledger.disk_bytes_peak,
            }
            yield self._counters, levels

    @property
    def device_limit_bytes(self) -> int:
        """Bytes of saved tensors that may stay on accelerators now. Any thread, without the lock."""
        return self._devices.window.resident.limit_bytes

    @property
    def window_limits(self) -> tuple[int, int]:
        return self.ledger.windows.limits

    @whole
    def limit_windows(self, host_bytes: int, staging_bytes: int) -> None:
        """Keep at most `host_bytes` in host memory from now on, and `staging_bytes` more for what is being moved."""
        self._is_changing = True
        self.ledger.windows.limit(host_bytes, staging_bytes)

    @whole
    def keep_on_device(self, device_bytes: int) -> None:
        """Let the last `device_bytes` that are saved stay on the accelerator from now on. Spoils times being taken."""
        self._is_changing = True
        self._devices.keep(device_bytes)
        if not self._devices.window.fits(0):
            self._booking.book_tracked(self.ledger.device_group_bytes)

    @whole
    def time_graph(self, device: torch.device) -> GraphTimes:
        """Take the times of a graph, from this point of the stream on which this thread works there."""
        self._is_changing = True
        return self._devices.time_graph(device)

    # --- traces: the caller holds the lock -------------------------------------------------------------------------

    def observe(self, observer: Observer) -> None:
        self.ledger.observer = observer

    def levels(self) -> tuple[int, ...]:
        windows, uncharged_bytes = self.ledger.windows, self._books.uncharged_bytes()
        lent_bytes = windows.lent.used_bytes
        return self._devices.held_bytes, uncharged_bytes, *windows.used_bytes, lent_bytes, self.disk_bytes
